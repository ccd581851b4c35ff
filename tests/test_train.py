"""The entry point, run as a user runs it, on the tiny checkpoint and drawn scenes."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_train import parts, train
from rl_train.config import parse_args
from rl_train.data import DamagedSample, GraspAnyRegionDataset
from rl_train.distributed import Ranks
from rl_train.evaluation import METRICS
from rl_train.policies.sa2va import FLOAT32_MODULES
from rl_train.tb import rollout_sums, scalars
from tests.runs import distance, draw_data, flags, on_one_core, rollouts, run, weights
from tools.evaluate import read_before

one_core = pytest.fixture(autouse=True)(on_one_core)

LOOP = (
    "loss",
    "policy_loss",
    "kl_div",
    "reward_mean",
    "reward_std",
    "frac_zero_std",
    "entropy",
    "clip_frac",
    "completion_length",
    "truncated_frac",
    "empty_frac",
    "unscored_frac",
    "sampler_gap",
    "iou",
    "repeats_frac",
    "digits_frac",
    "whole_mask_frac",
)
LOOP2 = (
    "meteor",
    "likelihood",
    "mask_spread",
    "no_seg_frac",
    "latent_kl",
    "latent_loss",
    "mask_loss",
    "mask_sigma",
)
TAGS = (
    {f"loop1/{tag}" for tag in LOOP}
    | {f"loop2/{tag}" for tag in LOOP + LOOP2}
    | {"total_loss", "learning_rate"}
    | {f"grad_norm/{group}" for group in ("lora", "mlp1", "text_hidden_fcs", "sam2")}
    | {
        f"{place}/{metric}"
        for place in ("eval", "eval_ema")
        for metric in METRICS
        if metric != "caption_cider"
    }
    | {
        f"perf/{phase}_seconds"
        for phase in ("step", "encode", "rollout", "teacher", "reference", "update")
    }
    | {"perf/rollout_tokens_per_second", "data/damaged", "teacher/drift", "teacher/lag"}
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_data(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def two_steps(data, tmp_path_factory):
    return run(data, tmp_path_factory.mktemp("run"), num_generations=4, eval_samples=4, seed=1)


def events(output):
    accumulator = EventAccumulator(
        str(output / "tensorboard"), {"scalars": 0, "images": 0, "tensors": 0}
    )
    accumulator.Reload()
    return accumulator


def curve(output, tag):
    """{step: value}"""
    return {e.step: e.value for e in events(output).Scalars(tag)}


def parts_of(monkeypatch):
    """A list that receives what the next `main` builds."""
    built, build = [], train.build
    monkeypatch.setattr(
        train, "build", lambda args, ranks: built.append(build(args, ranks)) or built[-1]
    )
    return built


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
            [0, 2] if tag.startswith("eval") else [1, 2]
        ), tag
        assert all(e.value == e.value for e in log.Scalars(tag)), tag
    assert all(
        e.value > 0 for tag in TAGS if tag.startswith("grad_norm/") for e in log.Scalars(tag)
    )
    assert log.Tensors("hparams/text_summary")


def test_pictures_of_both_loops(two_steps):
    log = events(two_steps)
    assert set(log.Tags()["images"]) == {
        f"loop{loop}/rollout_{row}" for loop in (1, 2) for row in range(3)
    }
    for tag in log.Tags()["images"]:
        (picture,) = log.Images(tag)
        assert (
            picture.step == 2
            and picture.width > 300
            and picture.encoded_image_string.startswith(b"\x89PNG")
        )


def test_total_loss_is_the_weighted_sum(data, two_steps, tmp_path):
    one, two, total = (curve(two_steps, tag) for tag in ("loop1/loss", "loop2/loss", "total_loss"))
    assert all(total[step] == pytest.approx(one[step] + two[step], abs=1e-6) for step in (1, 2))
    output = run(data, tmp_path, max_steps=1, mask_to_caption_weight=0.5, caption_to_mask_weight=3)
    one, two, total = (curve(output, tag)[1] for tag in ("loop1/loss", "loop2/loss", "total_loss"))
    assert total == pytest.approx(0.5 * one + 3 * two, rel=1e-5)


def test_rollouts_are_readable(two_steps):
    lines = rollouts(two_steps)
    assert len(lines) == 2 * 2 * 2 * 4  # steps, loops, prompts, samples
    needed = {"step", "task", "image_id", "caption", "completion", "reward", "advantage", "iou"}
    for line in lines:
        assert set(line) == (
            needed if line["task"] == "loop1" else needed | {"meteor", "likelihood", "reply"}
        )
        assert 0 <= line["iou"] <= 1 and 0 <= line.get("meteor", 0) <= 1 and line["caption"]
        expected = (
            line["iou"]
            if line["task"] == "loop1"
            else 0.5 * line["meteor"] + 0.5 * line["likelihood"]
        )
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
    args = vars(
        parse_args(flags(data, two_steps, num_generations=4, eval_samples=4, seed=1))
    ) | dict(world_size=1)
    assert json.loads((two_steps / "config.json").read_text()) == args
    assert json.loads((two_steps / "checkpoint_step_2" / "config.json").read_text()) == args


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
    same = dict(loss_type=loss_type, learning_rate=1e-5, num_generations=4)
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
    assert distance(weights(whole, 2), weights(parts, 2)) < 1e-6
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
    # On by default. Checkpointed layers drop the KV cache in training mode, so they must not be in it while sampling.
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
    assert state["scheduler"]["last_epoch"] == 2
    assert len(rollouts(output)) == 2 * 2 * 2  # sampled once: loops, prompts, samples
    assert curve(output, "loop1/sampler_gap")[1] < 1e-4  # of the first update alone
    assert curve(output, "loop1/kl_div")[1] > 1e-6  # the second update's policy is not the sampler


@pytest.mark.parametrize(
    "off, left", [("mask_to_caption_weight", "loop2"), ("caption_to_mask_weight", "loop1")]
)
def test_weight_zero_leaves_a_loop_out(data, tmp_path, off, left):
    output = run(data, tmp_path, max_steps=1, num_generations=4, **{off: 0})
    tags = events(output).Tags()["scalars"]
    assert {tag.split("/")[0] for tag in tags if tag.startswith("loop")} == {left}
    assert {line["task"] for line in rollouts(output)} == {left}
    assert curve(output, "total_loss") == curve(output, f"{left}/loss")
    reached = {"lora", "mlp1"} | ({"text_hidden_fcs", "sam2"} if left == "loop2" else set())
    assert {tag.split("/")[1] for tag in tags if tag.startswith("grad_norm/")} == reached


def test_length_from_epochs(data, tmp_path):
    args = parse_args(flags(data, tmp_path, max_steps=0, num_epochs=0.5, batch_size=4))
    assert (
        train.build(args, Ranks(0, 1, torch.device("cpu"))).max_steps == 8
    )  # ceil(60 regions / 4 / 2)


def test_learning_rate_schedule():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = parts.cosine_schedule(optimizer, 10, 0.2)
    rates = []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[6] == pytest.approx(0.5) and rates[10] == pytest.approx(0.0)


def test_evaluations_are_files_that_the_tool_compares_with(data, two_steps):
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


def test_a_teacher_that_answers_for_itself(data, two_steps, tmp_path, monkeypatch):
    """--teacher_answer sampled: nothing is forced; the demo's teacher says what would be, so that the rewards are the same."""

    def forced(*_):
        raise AssertionError("a forced answer")

    monkeypatch.setattr("rl_train.tasks.mask_caption_mask.segment", forced)
    output = run(data, tmp_path, num_generations=4, seed=1, max_steps=1, teacher_answer="sampled")
    plain = [line for line in rollouts(two_steps) if line["step"] == 0]
    assert [line["iou"] for line in rollouts(output)] == pytest.approx(
        [line["iou"] for line in plain], abs=1e-6
    )
    with pytest.raises(AssertionError, match="a forced answer"):
        run(data, tmp_path / "default", max_steps=1)


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_loop_2_rewards_meteor_and_likelihood(data, tmp_path, share):
    lines = rollouts(
        run(data, tmp_path, max_steps=1, tasks="caption_mask_caption", likelihood_share=share)
    )
    assert any(line["meteor"] for line in lines)
    for line in lines:
        assert ("likelihood" in line) == (share > 0)  # at share 0 nobody pays for it
        assert line["reward"] == pytest.approx(
            (1 - share) * line["meteor"] + share * line.get("likelihood", 0), abs=1e-6
        )


def test_equal_rewards_leave_the_weights_alone(data, tmp_path, monkeypatch):
    """--control constant: no step is taken, though every row has a reward."""
    built = parts_of(monkeypatch)
    output = run(data, tmp_path, control="constant", weight_decay=0.5)
    (p,) = built
    assert all(
        torch.equal(parameter, p.roles.banks["reference"][n])
        for n, parameter in p.policy.trainable.items()
    )
    assert not p.optimizer.state and {line["reward"] for line in rollouts(output)} == {1.0}
    assert any(
        line["iou"] != 1 for line in rollouts(output)
    )  # the rewards as they were are still logged by name
    for loop in ("loop1", "loop2"):
        assert curve(output, f"{loop}/frac_zero_std") == {1: 1, 2: 1}
    for tag in ("teacher/drift", "teacher/lag"):
        assert curve(output, tag) == {1: 0, 2: 0}
    updates = {
        f"{loop}/{name}"
        for loop in ("loop1", "loop2")
        for name in ("loss", "kl_div", "entropy", "sampler_gap", "mask_loss", "latent_kl")
    }
    assert not {*updates, "total_loss"} & set(
        events(output).Tags()["scalars"]
    )  # nothing was computed: no 0 either


def test_shuffled_rewards_are_those_of_their_group(data, two_steps, tmp_path):
    """--control shuffled: the first step's rollouts and measurements are the run's without it, the rewards in another order."""
    output = run(data, tmp_path, num_generations=4, seed=1, max_steps=1, control="shuffled")
    plain = [line for line in rollouts(two_steps) if line["step"] == 0]
    turned = rollouts(output)
    assert [line["completion"] for line in turned] == [line["completion"] for line in plain]
    rewards = [
        [[line["reward"] for line in lines[i : i + 4]] for i in range(0, 16, 4)]
        for lines in (plain, turned)
    ]
    assert (
        list(map(sorted, rewards[0])) == list(map(sorted, rewards[1])) and rewards[0] != rewards[1]
    )
    assert [line["iou"] for line in turned] == [line["iou"] for line in plain]


@pytest.mark.parametrize("rate, groups", [(None, 1), (1e-4, 1), (1e-3, 2)])
def test_the_prompt_embedding_has_a_rate_of_its_own(data, tmp_path, rate, groups):
    args = parse_args(flags(data, tmp_path, learning_rate=1e-4, prompt_learning_rate=rate))
    built = train.build(args, Ranks(0, 1, torch.device("cpu")))
    assert len(built.optimizer.param_groups) == groups
    rate_of = {
        id(p): group["initial_lr"]
        for group in built.optimizer.param_groups
        for p in group["params"]
    }
    assert (
        len(rate_of)
        == sum(len(group["params"]) for group in built.optimizer.param_groups)
        == len(built.policy.trainable)
    )
    for name, parameter in built.policy.trainable.items():
        own = built.policy.group_of(name) == "text_hidden_fcs"
        assert rate_of[id(parameter)] == ((rate or 1e-4) if own else 1e-4), name
    assert built.scheduler.base_lrs[0] == 1e-4  # what the curve `learning_rate` shows
    assert all(group["weight_decay"] == args.weight_decay for group in built.optimizer.param_groups)


@pytest.mark.parametrize("decay, twin", [(0, "policy"), (1, "reference")])
def test_ends_of_the_ema(data, tmp_path, monkeypatch, decay, twin):
    """0: the policy is its own teacher; 1: the teacher stays what the run started from."""
    built = parts_of(monkeypatch)
    output = run(data, tmp_path, ema_decay=decay, learning_rate=1e-3)
    (p,) = built
    same = p.policy.trainable if twin == "policy" else p.roles.banks["reference"]
    assert all(torch.equal(t, same[n]) for n, t in p.roles.banks["teacher"].items())
    assert p.roles.distance("policy", "reference") > 1e-4
    lag, drift = curve(output, "teacher/lag"), curve(output, "teacher/drift")
    assert (lag if twin == "policy" else drift) == {1: 0, 2: 0} and (
        drift if twin == "policy" else lag
    )[2] > 1e-4


def test_the_clock_books_seconds_and_peaks_where_they_arise(monkeypatch):
    """A phase of two laps has their seconds together and the higher peak; without a GPU there is none."""
    peaks, times = iter([3 * 2**30, 5 * 2**30, 4 * 2**30]), iter([0.0, 1.0, 3.0, 7.0])
    resets = []
    for name, function in dict(
        synchronize=lambda _: None,
        max_memory_allocated=lambda _: next(peaks),
        reset_peak_memory_stats=resets.append,
    ).items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(times))
    clock = train.Clock(torch.device("cuda"))
    for phase in ("rollout", "teacher", "rollout"):
        clock(phase)
    assert clock.laps == [
        ("rollout", 1.0, 3 * 2**30),
        ("teacher", 2.0, 5 * 2**30),
        ("rollout", 4.0, 4 * 2**30),
    ]
    assert clock.seconds == {"rollout": 5.0, "teacher": 2.0} and clock.peaks == {
        "rollout": 4.0,
        "teacher": 5.0,
    }
    assert len(resets) == 4  # no phase sees the peak of the one before
    monkeypatch.undo()
    clock = train.Clock(torch.device("cpu"))
    clock("rollout")
    assert list(clock.seconds) == ["rollout"] and clock.peaks == {}


def test_memory_that_a_run_holds(policy):
    """Roles cost banks of the trainables, not copies of the model."""
    model = policy(groups=("lora", "mlp1"), dtype=torch.bfloat16)
    sizes = parts.standing_memory(model)
    trainable = 4 * sum(p.numel() for p in model.trainable.values())
    assert sizes["trainable weights"] == sizes["gradients"] == trainable
    assert sizes["optimizer"] == sizes["teacher and reference"] == 2 * trainable
    frozen = {n: p for n, p in model.model.named_parameters() if n not in model.trainable}
    float32 = sum(p.numel() for n, p in frozen.items() if n.startswith(FLOAT32_MODULES))
    assert sizes["frozen base"] == 2 * sum(p.numel() for p in frozen.values()) + 2 * float32


# What goes wrong stops the run


def test_a_fault_in_a_reward_is_raised(data, tmp_path, monkeypatch):
    def broken(*_):
        raise TypeError("a fault of ours")

    monkeypatch.setattr("rl_train.tasks.mask_caption_mask.segment", broken)
    with pytest.raises(TypeError, match="a fault of ours"):
        run(data, tmp_path)
    assert not list(tmp_path.glob("checkpoint_step_*"))


def test_a_function_of_the_users_own_that_returns_no_rewards_ends_the_run_with_a_sentence(
    data, tmp_path, monkeypatch
):
    """What it raises itself keeps its traceback, a ValueError too."""
    (tmp_path / "users.py").write_text(
        "def short(completions, **kwargs):\n    return [1.0]\n\n"
        "def broken(completions, **kwargs):\n    return [float(text) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        SystemExit,
        match="^rl_train: --reward users:short: returned 1 for 4 completions, not one number each$",
    ):
        run(data, tmp_path / "short", reward="users:short")
    with pytest.raises(ValueError, match="^could not convert string to float"):
        run(data, tmp_path / "broken", reward="users:broken")


@pytest.mark.parametrize("loop", ["loop1", "loop2"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_move(data, tmp_path, monkeypatch, loop):
    built, loss_of = parts_of(monkeypatch), train.rollout_loss

    def poisoned(policy, rollout, *rest):
        loss, stats = loss_of(policy, rollout, *rest)
        return (loss * float("nan") if rollout.has_mask == (loop == "loop2") else loss), stats

    monkeypatch.setattr(train, "rollout_loss", poisoned)
    with pytest.raises(FloatingPointError, match=f"not finite: rank 0: {loop} loss") as raised:
        run(data, tmp_path, max_steps=1)
    assert f"loop{3 - int(loop[-1])} loss" not in str(raised.value)
    (parts,) = built
    start = parts.roles.banks["reference"]  # a copy made before the first step
    assert all(torch.equal(p, start[n]) for n, p in parts.policy.trainable.items())
    assert all(torch.equal(t, start[n]) for n, t in parts.roles.banks["teacher"].items())
    assert not parts.optimizer.state and not list(tmp_path.glob("checkpoint_step_*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_nothing_moves(value):
    weights = {name: torch.nn.Parameter(torch.ones(3)) for name in ("one", "two", "three")}
    policy, optimizer = (
        SimpleNamespace(trainable=weights, group_of=lambda name: name[:1]),
        torch.optim.AdamW(weights.values()),
    )
    weights["one"].grad, weights["two"].grad = (
        torch.tensor([3.0, 0.0, 4.0]),
        torch.tensor([0.0, value, 1.0]),
    )
    args = SimpleNamespace(max_grad_norm=1.0)
    with pytest.raises(
        FloatingPointError, match=r"^not finite: rank 0: gradient of two \(norm (nan|inf)\)$"
    ):
        train.update(args, policy, optimizer, {"loop1": Counter(loss=0.5)})
    assert all((p == 1).all() for p in weights.values()) and not optimizer.state
    weights["two"].grad = torch.tensor([0.0, 12.0, 0.0])
    assert train.update(args, policy, optimizer, {"loop1": Counter(loss=0.5)}) == {
        "o": 5.0,
        "t": 12.0,
    }  # three has none: 0
    assert not (weights["two"] == 1).all() and all(p.grad is None for p in weights.values())


def test_damaged_samples_are_replaced_counted_and_stop_the_run(data, tmp_path, monkeypatch):
    """A region whose image does not decode is left out with its name; above --max_bad_fraction the run ends with one sentence."""
    read = GraspAnyRegionDataset.__getitem__
    bad = {1, 2, 3, 5, 8, 13, 21, 34, 55}

    def damaged(dataset, i):
        if i in bad and len(dataset) > 30:
            raise DamagedSample(f"region{i}", "damaged image")
        return read(dataset, i)

    monkeypatch.setattr(GraspAnyRegionDataset, "__getitem__", damaged)
    output = run(
        data,
        tmp_path / "kept",
        max_steps=8,
        batch_size=4,
        max_bad_fraction=0.5,
        tasks="mask_caption_mask",
    )
    found = list(curve(output, "data/damaged").values())
    assert 0 <= found[0] <= found[-1] <= len(bad) and found[-1] >= 3
    assert all("region" not in line["image_id"] for line in rollouts(output))
    with pytest.raises(SystemExit) as stopped:
        run(
            data,
            tmp_path / "stopped",
            max_steps=8,
            batch_size=4,
            max_bad_fraction=0.03,
            tasks="mask_caption_mask",
        )
    assert "--max_bad_fraction 0.03" in str(stopped.value) and "damaged when decoded" in str(
        stopped.value
    )


def test_a_caption_beyond_the_context_is_left_out(data, tmp_path, monkeypatch, capsys):
    """By --mask_sigma auto, by training and by evaluation."""
    read = GraspAnyRegionDataset.__getitem__
    long = ("a red thing " * 900).strip()
    monkeypatch.setattr(
        GraspAnyRegionDataset,
        "__getitem__",
        lambda dataset, i: read(dataset, i) | ({"caption": long} if i % 3 else {}),
    )
    output = run(
        data,
        tmp_path / "run",
        max_steps=2,
        max_bad_fraction=1,
        tasks="caption_mask_caption",
        mask_sigma="auto",
        eval_samples=4,
    )
    assert curve(output, "data/damaged")[2] >= 1 and all(
        line["caption"] != long for line in rollouts(output)
    )
    assert (
        "caption of 10799 characters: its prompt of 2781 tokens (--max_tiles 1) and --max_completion_length 12"
        in capsys.readouterr().out
    )


def test_regions_of_one_image_stay_on_one_side(monkeypatch):
    """Whole images are held out; what of the last one is too many is not trained on either."""

    class Regions:
        images = np.array([0, 0, 1, 2, 2, 2, 3, 3, 4])

        def __init__(self, data_dir):
            pass

        def __len__(self):
            return len(self.images)

        def report(self):
            return dict(rows=5, kept=9, skipped={}, resized_masks=0)

    monkeypatch.setitem(parts.DATASETS, "gar", Regions)
    for eval_samples in range(1, 6):
        args = SimpleNamespace(
            dataset="gar",
            data_dir="x",
            eval_data_dir=None,
            eval_samples=eval_samples,
            max_bad_fraction=0,
        )
        training, heldout, _ = parts.split_dataset(args)
        images = [{int(Regions.images[i]) for i in part.indices} for part in (training, heldout)]
        assert (
            len(heldout) == eval_samples
            and images[0].isdisjoint(images[1])
            and len(images[0] | images[1]) == 5
        )
        assert sorted(i for i in range(9) if Regions.images[i] in images[0]) == training.indices


def test_pictures_are_held_out_whole(data):
    """Though each of their regions is a row of its own, as `write_gar` writes them."""
    args = SimpleNamespace(
        dataset="gar",
        data_dir=data / "train",
        eval_data_dir=None,
        eval_samples=10,
        max_bad_fraction=0,
    )
    training, heldout, _ = parts.split_dataset(args)
    pictures = [
        {part[i]["image"].tobytes() for i in range(len(part))} for part in (training, heldout)
    ]
    assert (
        len(heldout) == 10
        and pictures[0].isdisjoint(pictures[1])
        and len(pictures[0] | pictures[1]) == 20
    )


def test_no_reward_at_all_is_no_reward_of_zero():
    """A step in which the judge was down leaves no point on the reward's curve."""
    rewards = {"meteor": torch.full((4,), torch.nan)}
    rollout = SimpleNamespace(
        num_generations=2,
        valid=torch.ones(4, 3, dtype=torch.bool),
        stopped=torch.ones(4, dtype=torch.bool),
        texts=["a"] * 4,
        replies=[],
        has_mask=False,
        masks=[torch.zeros(2, 2, dtype=torch.bool)] * 4,
    )
    sums = Counter(rollout_sums(rollout, rewards, rewards["meteor"])) + Counter()
    curves = scalars(
        Counter(dict.fromkeys(("loss", "policy_loss", "tokens", "kl", "clipped", "entropy"), 0.0))
        | sums
    )
    assert curves["unscored_frac"] == 1 and not {"reward_mean", "reward_std", "meteor"} & set(
        curves
    )
