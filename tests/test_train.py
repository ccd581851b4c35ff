"""The entry point, run as a user runs it, on the tiny checkpoint and drawn scenes."""

import json
import shutil

import pytest
import torch

from rl_train import cli
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.evaluation.cycle_metrics import METRICS
from rl_train.rewards import meteor
from rl_train.tasks import CaptionMaskCaption, MaskCaptionMask
from tests.runs import (
    ASKED,
    curve,
    distance,
    events,
    flags,
    on_one_core,
    rollouts,
    run,
    weights,
)
from tools.evaluate import read_before

one_core = pytest.fixture(autouse=True)(on_one_core)

LOOP = (
    "loss policy_loss kl_div reward_mean reward_std frac_zero_std entropy clip_frac "
    "completion_length truncated_frac empty_frac sampler_gap sampler_gap_mean "
    "sampler_k3 iou repeats_frac digits_frac whole_mask_frac"
).split()
LOOP2 = (
    "meteor mask_spread no_seg_frac latent_joint_kl latent_clip_frac latent_loss "
    "mask_loss latent_std capped_frac"
).split()
TAGS = (
    {f"loop1/{tag}" for tag in LOOP}
    | {f"loop2/{tag}" for tag in LOOP + LOOP2}
    | {"total_loss", "learning_rate"}
    | {f"grad_norm/{group}" for group in ("lora", "mlp1", "text_hidden_fcs", "sam2")}
    | {
        f"{place}/{metric}"
        for place in ("eval", "eval_ema")
        for metric in METRICS
        if metric not in ASKED | {"caption_cider"}
    }
    | {
        f"perf/{phase}_seconds"
        for phase in ("step", "data", "encode", "rollout", "teacher", "reference", "update")
    }
    | {
        "perf/rollout_tokens_per_second",
        "teacher/distance_to_reference",
        "teacher/distance_to_policy",
        "teacher/decay",
    }
    | {f"Main/{curve}_loop{loop}" for curve in ("reward", "kl") for loop in (1, 2)}
    | {f"Main/eval_{m}" for m in ("seg_iou", "caption_meteor", "cycle_iou", "cycle_meteor")}
    | {"Main/sampler_gap"}
)


@pytest.fixture(scope="module")
def two_steps(data, tmp_path_factory):
    return run(data, tmp_path_factory.mktemp("run"), num_generations=4, eval_samples=4, seed=1)


# What a run leaves behind


def test_two_steps_are_two_updates(two_steps):
    state = torch.load(two_steps / "checkpoint_step_2" / "training_state.pt", weights_only=True)
    assert state["step"] == 2
    assert {s["step"].item() for s in state["optimizer"]["state"].values()} == {2}
    assert len(state["optimizer"]["state"]) == len(weights(two_steps, 2))
    assert state["scheduler"]["last_epoch"] == 2


def test_every_documented_curve_is_there(two_steps):
    log = events(two_steps)
    assert set(log.Tags()["scalars"]) == TAGS
    for tag in TAGS:
        assert [e.step for e in log.Scalars(tag)] == (
            [0, 2] if tag.removeprefix("Main/").startswith("eval") else [1, 2]
        ), tag
        assert all(e.value == e.value for e in log.Scalars(tag)), tag
    for first, tag in (
        ("reward_loop2", "loop2/reward_mean"),
        ("eval_seg_iou", "eval/seg_iou"),
    ):
        assert curve(two_steps, f"Main/{first}") == curve(two_steps, tag)
    assert all(
        e.value > 0 for tag in TAGS if tag.startswith("grad_norm/") for e in log.Scalars(tag)
    )


def test_pictures_of_both_loops(two_steps):
    log = events(two_steps)
    of_rollouts = {f"loop{loop}/rollout_{row}" for loop in (1, 2) for row in range(3)}
    of_evaluations = {f"eval/sample_{number}" for number in range(1, 5)}
    assert set(log.Tags()["images"]) == of_rollouts | of_evaluations
    for tag in of_rollouts:
        (picture,) = log.Images(tag)
        assert (
            picture.step == 2
            and picture.width > 300
            and picture.encoded_image_string.startswith(b"\x89PNG")
        )
    for tag in of_evaluations:  # the same samples at every evaluation
        assert [picture.step for picture in log.Images(tag)] == [0, 2]
        # First the base alone, then the policy beside it.
        assert [picture.width for picture in log.Images(tag)] == [848, 1276]
    assert "custom_scalars__config__" in log.Tags()["tensors"]


def test_a_resumed_run_draws_the_base_as_before(data, tmp_path):
    """Its answers come from the file of the evaluation before training."""
    how = dict(num_generations=4, eval_samples=2, seed=1, save_steps=1)
    whole = run(data, tmp_path / "whole", **how)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoint_step_2")
    (resumed / "evaluation" / "step_2.json").unlink()
    run(data, resumed, **how, resume="")
    assert len(list((resumed / "tensorboard").iterdir())) == 2  # a file of each session
    for number in (1, 2):
        images = [events(folder).Images(f"eval/sample_{number}") for folder in (whole, resumed)]
        drawn, again = ([(i.step, i.encoded_image_string) for i in of_run] for of_run in images)
        assert [step for step, _ in drawn] == [0, 2] and drawn == again
    assert curve(resumed, "Main/eval_seg_iou") == curve(whole, "Main/eval_seg_iou")


def test_total_loss_is_the_weighted_sum(data, two_steps, tmp_path):
    one, two, total = (curve(two_steps, tag) for tag in ("loop1/loss", "loop2/loss", "total_loss"))
    assert all(total[step] == pytest.approx(one[step] + two[step], abs=1e-6) for step in (1, 2))
    output = run(data, tmp_path, max_steps=1, loop1_weight=0.5, loop2_weight=3)
    one, two, total = (curve(output, tag)[1] for tag in ("loop1/loss", "loop2/loss", "total_loss"))
    assert total == pytest.approx(0.5 * one + 3 * two, rel=1e-5)


def test_rollouts_are_readable(two_steps):
    lines = rollouts(two_steps)
    assert len(lines) == 2 * 2 * 2 * 4  # steps, loops, prompts, samples
    needed = {"step", "task", "image_id", "caption", "completion", "reward", "advantage", "iou"}
    needed |= {"mask"}
    for line in lines:
        assert set(line) == (needed if line["task"] == "loop1" else needed | {"meteor", "reply"})
        assert 0 <= line["iou"] <= 1 and 0 <= line.get("meteor", 0) <= 1 and line["caption"]
        expected = line["iou"] if line["task"] == "loop1" else line["meteor"]
        assert line["reward"] == pytest.approx(expected, abs=1e-6)
    assert {line["step"] for line in lines} == {0, 1}
    assert (
        len({line["image_id"] for line in lines}) == 4
    )  # two prompts a step, both loops on the same
    assert any(line["advantage"] for line in lines if line["task"] == "loop1")
    assert any(line["advantage"] for line in lines if line["task"] == "loop2")
    rewards = [line["iou"] for line in lines if line["task"] == "loop1"]
    assert curve(two_steps, "loop1/reward_mean")[1] == pytest.approx(sum(rewards[:8]) / 8, abs=1e-4)


def test_flags_are_saved(data, two_steps):
    asked = cli.parse(flags(data, two_steps, num_generations=4, eval_samples=4, seed=1))
    expected = json.loads(json.dumps(asked.flags | dict(world_size=1)))
    for folder in (two_steps, two_steps / "checkpoint_step_2"):
        assert json.loads((folder / "config.json").read_text()) == expected
    assert expected["num_generations"] == 4 and expected["loop1_weight"] == 1


# What the loop computes


def test_the_seed_decides_everything(data, two_steps, tmp_path):
    again = run(data, tmp_path / "again", num_generations=4, eval_samples=4, seed=1)
    for tag in ("total_loss", "loop1/loss", "loop2/loss", "grad_norm/lora", "eval/cycle_iou"):
        assert curve(again, tag) == curve(two_steps, tag), tag
    assert rollouts(again) == rollouts(two_steps)
    other = run(data, tmp_path / "other", num_generations=4, max_steps=1, seed=2)
    assert curve(other, "total_loss")[1] != curve(two_steps, "total_loss")[1]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_accumulation_is_a_larger_batch(data, tmp_path, loss_type):
    same = dict(
        loss_type=loss_type,
        learning_rate=1e-5,
        num_generations=4,
        reward_weights=["loop2.meteor=.5", "loop2.likelihood=.5"],
    )
    whole = run(data, tmp_path / "whole", **same)
    parts = run(
        data,
        tmp_path / "parts",
        batch_size=1,
        gradient_accumulation_steps=2,
        micro_batch_size=3,
        **same,
    )

    def key(line):
        return (
            line["step"],
            line["task"],
            line["image_id"],
            line["completion"],
            line["advantage"],
        )

    assert sorted(map(key, rollouts(whole))) == sorted(map(key, rollouts(parts)))
    # Two steps move a weight by 2e-5. Sums in another order differ by what a CPU rounds.
    assert distance(weights(whole, 2), weights(parts, 2)) < 4e-6
    for tag in (
        "lora",
        "mlp1",
        "text_hidden_fcs",
        "sam2",
    ):  # AdamW's steps hardly depend on a gradient's size
        assert curve(parts, f"grad_norm/{tag}")[2] == pytest.approx(
            curve(whole, f"grad_norm/{tag}")[2], rel=1e-3
        ), tag
    assert curve(parts, "total_loss")[2] == pytest.approx(curve(whole, "total_loss")[2], abs=1e-5)


def test_gradient_checkpointing_changes_neither_rollouts_nor_weights(data, two_steps, tmp_path):
    # On by default. Checkpointed layers drop the KV cache in training mode, so they must not be in
    # it while sampling.
    again = run(
        data,
        tmp_path / "run",
        **{"no-gradient_checkpointing": ""},
        num_generations=4,
        eval_samples=4,
        seed=1,
    )
    assert [line["completion"] for line in rollouts(again)] == [
        line["completion"] for line in rollouts(two_steps)
    ]
    assert distance(weights(again, 2), weights(two_steps, 2)) < 1e-6


def test_several_updates_on_the_same_rollouts(data, tmp_path):
    output = run(data, tmp_path, num_iterations=2, max_steps=1, learning_rate=1e-3)
    state = torch.load(output / "checkpoint_step_1" / "training_state.pt", weights_only=True)
    assert state["step"] == 1 and {
        s["step"].item() for s in state["optimizer"]["state"].values()
    } == {2}
    assert state["scheduler"]["last_epoch"] == 1  # the schedule counts steps
    assert len(rollouts(output)) == 2 * 2 * 2  # sampled once: loops, prompts, samples
    assert curve(output, "loop1/sampler_gap")[1] < 1e-4  # of the first update alone
    assert curve(output, "loop1/kl_div")[1] > 1e-6  # the second update's policy is not the sampler


def test_evaluations_are_files_that_the_tool_compares_with(two_steps):
    assert sorted(file.name for file in (two_steps / "evaluation").iterdir()) == [
        "step_0.json",
        "step_2.json",
    ]
    for step in (0, 2):
        found = read_before(two_steps / "evaluation" / f"step_{step}.json", 4)
        assert found["flags"]["seed"] == 1 and len(found["captions"]) == 4
        for metric in ("cycle_iou", "seg_iou"):
            assert curve(two_steps, f"eval/{metric}")[step] == pytest.approx(
                found["values"][metric].mean().item(), abs=1e-6
            )
        with pytest.raises(ValueError, match="holds 4 samples"):
            read_before(two_steps / "evaluation" / f"step_{step}.json", 5)


def test_every_teacher_is_asked_before_any_reward(data, tmp_path, monkeypatch):
    """Loop 2 is first, as its captions are sampled with loop 1's; loop 1 is learnt from first."""
    calls = []
    for task_class in (MaskCaptionMask, CaptionMaskCaption):
        for method in ("ask_teacher", "own_rewards"):

            def noted(task, rollout, method=method, real=getattr(task_class, method)):
                calls.append((method, task.name))
                return real(task, rollout)

            monkeypatch.setattr(task_class, method, noted)
    output = run(data, tmp_path, max_steps=1)
    asks = [("ask_teacher", "loop2"), ("ask_teacher", "loop1")]
    assert calls == [*asks, ("own_rewards", "loop2"), ("own_rewards", "loop1")]
    assert list(dict.fromkeys(line["task"] for line in rollouts(output))) == ["loop1", "loop2"]


def test_a_teacher_that_answers_for_itself(data, two_steps, tmp_path, monkeypatch):
    """--teacher_answer sampled: nothing is forced; the demo's teacher says what would be.

    So that the rewards are the same.
    """

    def forced(*_):
        raise AssertionError("a forced answer")

    monkeypatch.setattr("rl_train.policies.sa2va_queries.segment", forced)
    output = run(data, tmp_path, num_generations=4, seed=1, max_steps=1, teacher_answer="sampled")
    plain = [line for line in rollouts(two_steps) if line["step"] == 0]
    assert [line["iou"] for line in rollouts(output)] == pytest.approx(
        [line["iou"] for line in plain], abs=1e-6
    )
    with pytest.raises(AssertionError, match="a forced answer"):
        run(data, tmp_path / "default", max_steps=1)


def test_a_control_counts_and_the_measures_stay(data, two_steps, tmp_path, capsys):
    """--ablation_reward fixed: the first caption decides; all else is the run's without it."""
    output = run(data, tmp_path, num_generations=4, seed=1, max_steps=1, ablation_reward="fixed")
    caption = GraspAnyRegionDataset(data / "train")[0]["caption"]
    assert f"--ablation_reward fixed: {caption}\n" in capsys.readouterr().out
    lines, plain = rollouts(output), [line for line in rollouts(two_steps) if line["step"] == 0]
    assert len(lines) == len(plain) == 16
    for line, before in zip(lines, plain):
        changed = ("reward", "advantage", "ablation_reward")
        assert {k: v for k, v in line.items() if k not in changed} == {
            k: v for k, v in before.items() if k not in changed
        }
        assert line["reward"] == line["ablation_reward"] and "ablation_reward" not in before
    for line in lines[:8]:
        by_hand = meteor([caption], [line["completion"]]).item()
        assert line["ablation_reward"] == pytest.approx(by_hand, abs=1e-6)
    assert any(a["reward"] != b["reward"] for a, b in zip(lines[8:], plain[8:]))
    for loop, mine in (("loop1", lines[:8]), ("loop2", lines[8:])):
        mean = sum(line["ablation_reward"] for line in mine) / 8
        assert curve(output, f"{loop}/ablation_reward")[1] == pytest.approx(mean, abs=1e-6)
        assert curve(output, f"{loop}/reward_mean")[1] == pytest.approx(mean, abs=1e-6)
