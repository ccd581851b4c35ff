"""Points through the real entry point: a tiny Qwen-VL and SAM2, a few steps, resumed."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rl_train.export.merge import export
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.policies.qwen_vl_model import version_of
from tests.data.parquet_rows import row, visionreasoner_solution, write_parquet
from tests.policies.tiny_points import write_qwen, write_qwen3, write_sam
from tests.runs import (
    CHECKPOINT,
    complaint_of,
    curve,
    events,
    flags,
    on_one_core,
    rollouts,
    run,
    weights,
)

one_core = pytest.fixture(autouse=True)(on_one_core)


NO_POINT_FLAGS = dict.fromkeys(["sam_path", "answer_style", "sam_passes", "image_size"])


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """Flags of a run about points, whose model knows no JSON."""
    folder = tmp_path_factory.mktemp("points")
    return dict(
        model_path=write_qwen(folder / "qwen"),
        sam_path=write_sam(folder / "sam"),
        tasks="point_segmentation",
        answer_style="points",
        sam_passes=2,
        image_size=56,
        max_completion_length=4,
        learning_rate=1e-3,
        latent_std=None,
    )


@pytest.fixture
def answering(monkeypatch):
    """Make each answer a point and a negative one, as its first tokens say."""

    def text(policy, ids):
        spots = [[1 + token % 53, 1 + token * 7 % 53] for token in (ids * 2)[:2]]  # of 56 pixels
        if policy.coordinates == "thousand":
            spots = [[value * 1000 // 56 for value in spot] for spot in spots]
        return f'{{"points": [{spots[0]}], "negative_points": [{spots[1]}]}}'

    monkeypatch.setattr(QwenVLPolicy, "completion_text", text)


@pytest.fixture(scope="module")
def points3(points, tmp_path_factory):
    """The same for Qwen3-VL, whose cells have 32 pixels a side."""
    return points | dict(model_path=write_qwen3(tmp_path_factory.mktemp("qwen3")), image_size=64)


@pytest.mark.parametrize("flags_of", ["points", "points3"])
def test_two_steps_and_resumed(data, tmp_path, flags_of, answering, request):
    """No teacher is kept or logged, rewards are those of masks, and the LoRA moves."""
    points = request.getfixturevalue(flags_of)
    whole = run(data, tmp_path / "whole", **points, save_steps=1, max_steps=2, eval_steps=1)
    lines = rollouts(whole)
    assert {line["task"] for line in lines} == {"points"} and len(lines) == 2 * 4
    assert any(line["iou"] > 0 for line in lines) and {line["format"] for line in lines} == {1.0}
    assert any(line["iou"] != line["iou_without"] for line in lines)
    folder = whole / "checkpoint_step_2"
    assert not (folder / "ema.safetensors").exists() and (folder / "adapter").is_dir()
    before, after = (weights(whole, step) for step in (1, 2))
    assert all((before[name] != after[name]).any() for name in after if "lora_A" in name)
    tags = events(whole).Tags()["scalars"]
    assert not [tag for tag in tags if tag.startswith(("teacher/", "eval_ema/"))]
    assert set(curve(whole, "points/kl_div")) == {1, 2}
    assert max(curve(whole, "points/sampler_gap").values()) < 1e-4
    folder.rename(tmp_path / "gone")
    run(data, whole, **points, save_steps=1, max_steps=2, eval_steps=1, resume="")
    again = weights(whole, 2)
    assert all(torch.equal(again[name], after[name]) for name in after)
    assert rollouts(whole) == lines
    exported_loads(whole / "checkpoint_step_2", tmp_path / "merged", points)


def exported_loads(checkpoint, output, points):
    """The merged folder is one that transformers loads: base and LoRA summed, in its own dtype."""
    assert export(checkpoint, output, role="auto") == "policy"
    model_class = version_of(points["model_path"]).model_class
    merged, base = (
        model_class.from_pretrained(folder) for folder in (output, points["model_path"])
    )
    config = (output / "config.json").read_bytes()
    assert config == (points["model_path"] / "config.json").read_bytes()
    assert (output / "tokenizer.json").is_file() and (output / "preprocessor_config.json").is_file()
    trained = {
        n.removeprefix("vlm."): t
        for n, t in load_file(checkpoint / "trainables.safetensors").items()
    }
    for name, weight in base.state_dict().items():
        stem = name.removesuffix("weight")
        if f"{stem}lora_A.default.weight" in trained:
            a, b = (trained[f"{stem}lora_{x}.default.weight"] for x in "AB")
            weight = weight + 2 * b @ a  # --lora_alpha 8 over --lora_r 4
        torch.testing.assert_close(merged.state_dict()[name], weight, atol=1e-6, rtol=0)


def test_answers_that_cannot_be_read_are_counted(data, tmp_path, points):
    """The run goes on: no answer can be parsed, and has reward 0."""
    folder = run(data, tmp_path, **points, max_steps=1, eval_steps=0)
    assert curve(folder, "points/unparsed_frac") == {1: 1.0}
    assert {line["iou"] for line in rollouts(folder)} == {0.0}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Flags of a run on a set in VisionReasoner's layout, one file of Parquet without masks."""
    folder = tmp_path_factory.mktemp("published")
    train = write_parquet(folder / "train", [row(k, visionreasoner_solution(k)) for k in range(8)])
    heldout = [row(k, visionreasoner_solution(k)) for k in range(20, 26)]
    names = dict(data_dir=train, eval_data_dir=write_parquet(folder / "heldout", heldout))
    return names | dict(dataset="segzero", answer_style="visionreasoner", sam_passes=1)


def test_a_published_set_is_trained_on_as_published(data, tmp_path, points, published, monkeypatch):
    """Rewards are those of its boxes and points, and what is held out is measured by boxes."""

    def text(policy, ids):
        item = dict(bbox_2d=[7, 13, 33, 40], point_2d=[20, 27 + ids[0] % 9])
        return f"<think>so</think><answer>{json.dumps([item])}</answer>" if ids[0] % 3 else "so"

    monkeypatch.setattr(QwenVLPolicy, "completion_text", text)
    how = points | published | dict(reward_set="visionreasoner", negative_points="off")
    folder = run(data, tmp_path / "run", **how, save_steps=1, max_steps=2, eval_steps=1)
    lines = rollouts(folder)
    for line in lines:
        parts = ("thinking_format", "segmentation_format", "bbox_iou", "bbox_l1", "point_l1")
        assert line["reward"] == pytest.approx(sum(line[p] for p in (*parts, "non_repeat")))
        read = line["completion"] != "so"
        assert line["bbox_l1"] == (0.5 if read else 0) and "iou" not in line  # one box of two
    assert {line["reward"] for line in lines} >= {1.0}
    tags = events(folder).Tags()["scalars"]
    assert {"points/repaired/clipped", "eval/matched_box_iou", "eval/points_in_boxes"} <= set(tags)
    assert "eval/seg_iou" not in tags and "eval/score" not in tags
    assert (folder / "checkpoint_best").is_dir()  # chosen by matched_box_iou
    run(data, folder, **how, save_steps=1, max_steps=2, eval_steps=1, resume="")


def test_sets_without_masks_are_refused_where_masks_are_needed(data, tmp_path, points, published):
    for changes, words in (
        (dict(), "--reward_set mask: these samples have boxes and points and no masks"),
        (dict(distractors=""), "--data_dir: its samples have boxes and points and no masks"),
        (
            dict(model_path=CHECKPOINT, tasks=None) | NO_POINT_FLAGS,
            "which --tasks mask_caption_mask needs",
        ),
    ):
        how = points | published | changes
        assert words in complaint_of(flags(data, tmp_path / "run", **how)), words
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(sam_path=None), "--sam_path"),
        (dict(sam_path="nowhere"), "--sam_path nowhere: no such folder"),
        (
            dict(tasks="mask_caption_mask") | NO_POINT_FLAGS,
            "--tasks mask_caption_mask: asks a model of the family",
        ),
        (dict(tasks="mask_caption_mask"), "--sam_passes: only with --tasks point_segmentation"),
    ],
)
def test_a_sentence_for_each_wrong_flag(data, tmp_path, points, changes, words):
    assert words in complaint_of(flags(data, tmp_path / "run", **points | changes))


@pytest.mark.parametrize("name", ["hidden", "away", "majority"])
def test_trained_on_a_cheap_cause(data, tmp_path, points, answering, name):
    """--ablation_reward: it alone counts, and the task's own components are logged beside it."""
    output = run(data, tmp_path, **points, max_steps=1, ablation_reward=name, num_generations=4)
    lines = rollouts(output)
    assert {line["format"] for line in lines} == {1.0}
    assert all(line["reward"] == line["ablation_reward"] for line in lines)
    assert len({line["ablation_reward"] for line in lines}) > 1
