"""Answers with several [SEG], answers that think first, and grounded captions."""

import json
from dataclasses import replace

import pytest
import torch
from pycocotools import mask as coco

from rl_train.evaluation import gcg_metrics
from rl_train.evaluation.cycle_metrics import measure_phrases
from rl_train.rewards.ablations import AblationReward
from rl_train.rewards.objects import match
from rl_train.rewards.thinking import thinking_rewards
from rl_train.rewards.weights import ComponentWeight
from rl_train.roles import Roles
from rl_train.rollout import Rollout
from rl_train.run.build import weigh_components
from rl_train.tasks import TASKS
from rl_train.tasks.base import TaskContext
from rl_train.tasks.latent_mask import LatentMaskAction
from rl_train.utils.rng import RowRNG
from sa2va_hf.losses import mask_loss
from sa2va_hf.prompts import GROUNDED_CAPTION, THINK_FIRST
from tests.data.image_file_sets import write_gcg
from tests.runs import on_one_core, rollouts, run
from tests.updates import STEPS, backward, roll, work_of
from tools import evaluate
from tools.evaluate_flags import build_parser, flags_of_run


def build(model, name, *weights, **options):
    kind = TASKS[name]
    task = kind(kind.Options(**options), TaskContext(model, Roles(model.trainable), STEPS))
    weigh_components([task], list(map(ComponentWeight.parse, weights)))
    return task


@pytest.fixture(scope="module")
def halves(batch):
    """The four scenes: their regions cut in two, as one, as none, and cut in two."""
    objects = []
    for mask, count in zip(batch.masks, (2, 1, 0, 2)):
        column = mask.nonzero()[:, 1].float().mean().long()
        left, right = mask.clone(), mask.clone()
        left[:, column:], right[:, :column] = False, False
        parts = dict(enumerate([mask[None][:0], mask[None], torch.stack([left, right])]))
        objects.append(parts[count])
    masks = [part.any(0) if len(part) else mask & False for part, mask in zip(objects, batch.masks)]
    return replace(batch, masks=masks, objects=objects)


def said(model, images, batch, words):
    """A rollout of one answer a sample, of given tokens.

    Its hidden states are near those at which the region of the sample is found.
    """
    ids = torch.tensor(words)
    every = torch.ones(ids.shape, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    prompts = model.segment_prompts(images, list(range(len(words))), batch.captions)
    forced = prompts.followed_by([model.prompts.forced_answer] * len(words))
    found = model.last_hidden_states(images, forced)  # (B, 1, C)
    noise = torch.randn(*ids.shape, found.shape[-1], generator=generator)
    return Rollout(
        batch,
        images,
        prompts,
        texts=["said"] * len(words),
        num_generations=1,
        ids=ids,
        logp=torch.zeros(ids.shape),
        valid=every,
        stopped=every[:, 0],
        hidden=found + 0.3 * noise,
    )


def test_each_seg_has_its_mask_and_the_region_that_it_is_matched_with(model, images, halves):
    seg, word = model.model.seg_id, 5
    words = [
        [seg, word, seg, seg, word],
        [word, word, word, word, word],
        [word, seg, word, word, word],
        [word, seg, seg, word, word],
    ]
    rollout = said(model, images, halves, words)
    task = build(model, "referring", "referring.matched=1", latent_std=0.5)
    rollout.latents = latents = task.action.draw(rollout, RowRNG(0, 0, 1, [0, 1, 2, 3], 1))
    assert [len(masks) for masks in latents.seg_masks] == [3, 0, 1, 2]
    for own, mask in zip(latents.seg_masks, latents.masks):
        assert torch.equal(own.any(0), mask)
    alone = LatentMaskAction(model, 0.5, 0.1).draw(rollout, RowRNG(0, 0, 1, [0, 1, 2, 3], 1))
    assert alone.seg_masks is None and torch.equal(alone.z, latents.z)  # the same numbers are drawn
    rewards, expected, targets = task.rewards(rollout).rewards, [], []
    for own, objects in zip(latents.seg_masks, halves.objects):
        matching = match(own, objects)
        expected.append(matching.reward)
        pairs = dict(matching.pairs)
        targets += [objects[pairs[m]] if m in pairs else None for m in range(len(own))]
    expected[2] = float(not latents.masks[2].any())  # which names nothing
    assert rewards["matched"].tolist() == pytest.approx(expected)
    assert rewards["surplus"].tolist()[2] == 1 and rewards["missing"].tolist()[1] == 1
    assert rewards["iou"].tolist()[2] == expected[2]
    assert [t is None for t in latents.targets] == [t is None for t in targets]
    assert all(torch.equal(a, b) for a, b in zip(latents.targets, targets) if a is not None)


def test_a_seg_learns_its_own_region_and_a_surplus_one_nothing(model, halves):
    """The mask term by hand, with the second target taken away."""
    task = build(model, "referring", "referring.matched=1", latent_std=0.5, mask_loss_coef=1.0)
    rollout = roll(model, task, halves)
    latents = rollout.latents
    image = [rollout.prompts.image_index[row] for row in latents.rows.tolist()]
    latents.targets = [~halves.masks[i] for i in image]  # others than the union
    latents.targets[1] = None
    work = work_of(model, task, rollout, torch.zeros(8))
    _, sums, _ = backward(model, work, micro_batch_size=3)
    kept = [k for k in range(len(image)) if k != 1]
    with torch.no_grad():
        logits = model.decode_masks(rollout.features, [image[k] for k in kept], latents.z[kept])
    losses = mask_loss(logits, [latents.targets[k] for k in kept])
    assert sums["mask_loss"] == pytest.approx(losses.sum().item() / len(image), rel=1e-3)


@pytest.mark.parametrize("name", ["referring", "caption_mask_caption"])
def test_answers_that_think_first_are_asked_for_and_rewarded(model, batch, images, name):
    task = build(model, name, think=True, latent_std=1.0)
    asked = model.tokenizer.decode(task.prompts(batch, images).ids[0])
    assert THINK_FIRST.partition("{x}")[2] in asked
    assert task.reward_weights["format"] == 0.1 and task.measure is not None
    rollout = roll(model, task, batch)
    rollout.texts[0] = "<think>It is red.</think> Sure, [SEG]."
    rewards = task.rewards(rollout).rewards
    assert torch.equal(rewards["format"], thinking_rewards(rollout.texts))
    assert rewards["format"].tolist() == [1] + [0] * 7
    assert (
        "format" not in build(model, name, f"{task.name}.format=0", think=True).weighted_components
    )
    columns = task.measure(model, batch, images, STEPS)
    assert {"seg_iou", "no_seg"} <= set(columns) and "caption_meteor" not in columns


def test_a_checkpoint_that_thinks_is_evaluated_with_its_question(model, tmp_path):
    (tmp_path / "training_state.pt").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(dict(think=True, seed=3)))
    assert flags_of_run(tmp_path) == dict(think=True)
    parser = build_parser("")
    argv = ["--model_path", str(tmp_path), "--data_dir", "x"]
    assert evaluate.measures_of(model, parser.parse_args(argv)) == {}
    parser.set_defaults(**flags_of_run(tmp_path))
    measure = evaluate.measures_of(model, parser.parse_args(argv))["measure"]
    assert measure.func is measure_phrases and measure.keywords == dict(wording=THINK_FIRST)


def test_grounded_captions_do_not_think(model, batch, images):
    prompts = build(model, "grounded_captioning").prompts(batch, images)
    assert all(GROUNDED_CAPTION in model.tokenizer.decode(ids) for ids in prompts.ids)
    with pytest.raises(ValueError, match="--think: is of segmentation, not of --tasks grounded"):
        build(model, "grounded_captioning", think=True)


def test_cheap_rewards_of_grounded_captions(model, images, halves):
    """SAM2's confidence of each answer, and the agreement of a group's masks."""
    seg, word = model.model.seg_id, 5
    words = [[seg, word, seg], [word, word, word], [seg, seg, word], [seg, word, word]]
    rollout = said(model, images, halves, words)
    task = build(model, "grounded_captioning", latent_std=1.0)
    rollout.latents = task.action.draw(rollout, RowRNG(0, 0, 1, [0, 1, 2, 3], 1))
    outcome = task.rewards(rollout)

    def rewards(name, rows, outcome):
        ablated = AblationReward(name)(task, rows, outcome, (0, 0))
        return ablated.rewards["ablation_reward"].tolist()

    confidence = rewards("confidence", rollout, outcome)
    assert confidence == pytest.approx(outcome.mask_confidence)
    assert confidence[1] == 0 < confidence[0]
    first, last = outcome.masks[0], outcome.masks[3]
    # Two groups of two answers: one of equal masks, one of masks that have nothing in common.
    outcome = replace(outcome, masks=[first, first, last, ~last])
    assert rewards("majority", replace(rollout, num_generations=2), outcome) == [1, 1, 0, 0]


def test_grounded_captions_are_measured_mask_by_mask(model, batch, images, halves, monkeypatch):
    """The answers are to another question, which the demo's model gives with [SEG]."""

    def asked(policy, images):
        return policy.segment_prompts(images, list(range(4)), batch.captions)

    monkeypatch.setattr(gcg_metrics, "grounded_prompts", asked)
    columns = dict(phrases=[["left", "right"], ["whole"], [], ["left", "right"]])
    found = gcg_metrics.measure(model, replace(halves, columns=columns), images, STEPS)
    assert found["gcg_masks"] == [1] * 4 and found["gcg_phrases"] == [2, 1, 0, 2]
    assert found["gcg_matched"][1] == pytest.approx(found["seg_iou"][1], abs=1e-6)
    assert found["gcg_matched"][0] == pytest.approx(found["gcg_miou"][0] / 2)  # of two regions
    assert found["gcg_recalled"] == [0] * 4  # the answers hold no <p>
    each = [(len(masks), len(regions)) for masks, regions in found["mask_pairs"]]
    assert each == [(1, 2), (1, 1), (1, 0), (1, 2)]
    assert coco.decode(found["mask_pairs"][1][1][0]).sum() == batch.masks[1].sum()


one_core = pytest.fixture(on_one_core)


def test_grounded_captions_are_trained_and_measured(tmp_path, one_core):
    write_gcg(tmp_path / "data")
    how = dict(dataset="gcg", data_dir=tmp_path / "data", eval_data_dir=tmp_path / "data")
    how |= dict(
        tasks="grounded_captioning", latent_std=1, train_eval_overlap="keep", max_bad_fraction=1
    )
    output = run(tmp_path, tmp_path / "run", **how, max_steps=1, eval_samples=2)
    lines = rollouts(output)
    assert len(lines) == 4
    assert all({"matched", "meteor", "missing", "surplus"} <= line.keys() for line in lines)
    means = json.loads((output / "evaluation" / "step_1.json").read_text())["means"]
    names = ("gcg_ap50", "gcg_miou", "gcg_recall", "gcg_meteor", "gcg_matched", "gcg_masks")
    assert all(0 <= means[name] <= 12 for name in names)
    # The checkpoint alone has the run's metrics. The demo's model gives no grounded caption, so all
    # are 0: what is tested is that these are measured, not phrases.
    words = ["--model_path", output / "checkpoint_step_1", "--data_dir", tmp_path / "data"]
    words += ["--dataset", "gcg", "--num_samples", 2, "--max_completion_length", 12]
    words += ["--dtype", "float32", "--output", tmp_path / "again.json"]
    evaluate.main(list(map(str, words)))
    again = json.loads((tmp_path / "again.json").read_text())["means"]
    assert {name: again[name] for name in names} == {name: means[name] for name in names}
    with pytest.raises(SystemExit, match="--best_of: not with --dataset gcg, of its own metrics"):
        evaluate.main([*map(str, words), "--best_of", "2"])
