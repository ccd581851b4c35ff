"""A fault stops a run before its weights move, with a name; a damaged sample does not."""

from types import SimpleNamespace

import pytest
import torch

from rl_train import train
from rl_train.data import DamagedSample, GraspAnyRegionDataset
from rl_train.loggers.metrics import StepMetrics
from rl_train.loss import MicroBatchLoss
from tests.runs import REGIONS, curve, parts_of, rollouts, run, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)


def poison_loss(monkeypatch, task: str):
    """Make the loss of a task NaN."""
    forward = MicroBatchLoss.forward

    def poisoned(module, micro_batch):
        loss, statistics = forward(module, micro_batch)
        if micro_batch.scored.task.name != task:
            return loss, statistics
        return loss * torch.nan, statistics | dict(loss=statistics["loss"] * torch.nan)

    monkeypatch.setattr(MicroBatchLoss, "forward", poisoned)


def test_a_fault_in_a_reward_is_raised(data, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise TypeError("a fault of ours")

    monkeypatch.setattr("rl_train.tasks.mask_caption_mask.segment_model_captions", broken)
    with pytest.raises(TypeError, match="a fault of ours"):
        run(data, tmp_path)
    assert not list(tmp_path.glob("checkpoint_step_*"))


def test_a_function_of_the_users_own_that_returns_no_rewards_ends_the_run_with_a_sentence(
    data, tmp_path, monkeypatch
):
    """An error that it raises itself keeps its traceback, a ValueError too."""
    (tmp_path / "users.py").write_text(
        "def short(completions, **kwargs):\n    return [1.0]\n\n"
        "def broken(completions, **kwargs):\n    return [float(text) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        SystemExit,
        match=r"^rl_train: --reward users:short: returned \[1.0\] for 4 completions, not a list "
        r"with a finite number or None for each$",
    ):
        run(data, tmp_path / "short", reward="users:short")
    with pytest.raises(ValueError, match="^could not convert string to float"):
        run(data, tmp_path / "broken", reward="users:broken")


@pytest.mark.parametrize(
    "way, line",
    [("sys.exit(0)", 4), ("sys.exit()", 4), ("exit(0)", 4), ("raise SystemExit('done')", 4)],
)
def test_a_function_of_the_users_own_that_exits_is_a_crash(data, tmp_path, monkeypatch, way, line):
    """It is no end of a finished run, which is status 0."""
    module = tmp_path / f"leaving{abs(hash(way))}.py"
    module.write_text(f"import sys\n\ndef leave(completions, **kwargs):\n    {way}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run(data, tmp_path / "run", reward=f"{module.stem}:leave")
    sentence = stopped.value.code
    assert isinstance(sentence, str) and "\n" not in sentence  # printed, with status 2
    assert sentence.startswith(f"rl_train: {module}, line {line}, in leave: sys.exit(")
    assert "would end an unfinished run as if it were done" in sentence


def test_a_sampler_that_exits_is_named_before_the_first_step(data, tmp_path, monkeypatch):
    module = tmp_path / "leaving_sampler.py"
    module.write_text("import sys\n\ndef order(*_):\n    sys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match=f"^rl_train: {module}, line 4, in order: sys.exit"):
        run(data, tmp_path / "run", sampler="leaving_sampler:order")
    assert not (tmp_path / "run").exists()


def test_a_module_that_exits_when_imported_is_named(data, tmp_path, monkeypatch):
    (tmp_path / "exits.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="--reward exits:f: its module calls sys.exit") as stopped:
        run(data, tmp_path / "run", reward="exits:f")
    assert stopped.value.code
    with pytest.raises(SystemExit, match="--tasks exits:Task: its module calls sys.exit"):
        run(data, tmp_path / "run", tasks="exits:Task")


@pytest.mark.parametrize("loop", ["loop1", "loop2"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_move(data, tmp_path, monkeypatch, loop):
    built = parts_of(monkeypatch)
    poison_loss(monkeypatch, loop)
    with pytest.raises(SystemExit, match=f"not finite: rank 0: {loop}/loss") as raised:
        run(data, tmp_path, max_steps=1)
    assert f"loop{3 - int(loop[-1])}/loss" not in str(raised.value)
    state = built[0].state
    start = state.roles.copies["reference"]  # a copy made before the first step
    assert all(torch.equal(p, start[n]) for n, p in state.policy.trainable.items())
    assert all(torch.equal(t, start[n]) for n, t in state.roles.copies["teacher"].items())
    assert not state.optimizer.state and not list(tmp_path.glob("checkpoint_step_*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_clipped(value):
    weights = {name: torch.nn.Parameter(torch.ones(3)) for name in ("one", "two", "three")}
    policy = SimpleNamespace(trainable=weights, group_of={name: name[:1] for name in weights})
    state = SimpleNamespace(policy=policy)
    tally = StepMetrics()
    weights["one"].grad = torch.tensor([3.0, 0.0, 4.0])
    weights["two"].grad = torch.tensor([0.0, value, 1.0])
    weights["three"].grad = torch.zeros(3)
    with pytest.raises(
        FloatingPointError, match=r"^not finite: rank 0: gradient of two \(norm (nan|inf)\)$"
    ):
        train.clip_gradients(state, tally, max_norm=1.0)
    assert weights["one"].grad.tolist() == [3.0, 0.0, 4.0]  # nothing is clipped
    assert tally.updates == 0
    weights["two"].grad = torch.tensor([0.0, 12.0, 0.0])
    train.clip_gradients(state, tally, max_norm=1.0)
    assert tally.same_on_ranks == {"grad_norm/o": 5.0, "grad_norm/t": 12.0} and tally.updates == 1
    clipped = torch.stack([p.grad for p in weights.values()]).norm()
    assert clipped == pytest.approx(1, abs=1e-5)


def test_damaged_samples_are_replaced_counted_and_stop_the_run(data, tmp_path, monkeypatch):
    """A region whose image does not decode is left out with its name.

    Above --max_bad_fraction the run ends with one sentence.
    """
    read = GraspAnyRegionDataset.__getitem__
    bad = set(range(1, REGIONS, 6))

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
    """--latent_std auto, training and evaluation leave it out."""
    read = GraspAnyRegionDataset.__getitem__
    long = ("a red thing " * 900).strip()
    monkeypatch.setattr(
        GraspAnyRegionDataset,
        "__getitem__",
        lambda dataset, i: read(dataset, i) | ({"caption": long} if i % 3 == 1 else {}),
    )
    output = run(
        data,
        tmp_path / "run",
        max_steps=2,
        max_bad_fraction=1,
        max_prompt_length=10_000,
        tasks="caption_mask_caption",
        latent_std="auto",
        eval_samples=4,
    )
    assert curve(output, "data/damaged")[2] >= 1 and all(
        line["caption"] != long for line in rollouts(output)
    )
    assert (
        "caption of 10799 characters: 5417 text tokens exceed the 1972 that"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["loss", "kl_div", "completion_length", "reward_std", "iou"])
def test_a_reward_of_the_users_own_named_like_a_curve_ends_the_run(
    data, tmp_path, monkeypatch, name
):
    """The first step ends with a sentence; the curve would else hold two numbers."""
    (tmp_path / f"users_{name}.py").write_text(
        f"def {name}(completions, **kwargs):\n    return [0.5] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    how = dict(reward=f"users_{name}:{name}", num_generations=4, seed=1, max_steps=1)
    with pytest.raises(SystemExit, match=f"^rl_train: --reward.*{name}") as stopped:
        run(data, tmp_path / "run", **how)
    assert "\n" not in str(stopped.value)
    assert not list((tmp_path / "run").glob("checkpoint_step_*"))
