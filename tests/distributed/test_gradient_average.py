"""DistributedDataParallel against a flat all-reduce of summed gradients, and faults of one rank."""

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_train import train
from rl_train.evaluation import evaluate
from rl_train.loggers import tensorboard
from rl_train.loss import MicroBatchLoss
from rl_train.policies import sa2va
from rl_train.rollout import RewardOutput
from rl_train.tasks import CaptionMaskCaption, MaskCaptionMask
from sa2va_hf.prediction import MASKS_AT_ONCE
from tests.ranks import forked, free_port
from tests.runs import distance, flags, measure, picture, rollouts, weights

SAME = dict(
    batch_size=1,
    num_generations=3,
    max_completion_length=16,
    micro_batch_size=2,
    max_steps=2,
    save_steps=1,
    learning_rate=1e-3,
    seed=1,
)
CASES = {
    "both": {},
    "twice": dict(num_iterations=2, gradient_accumulation_steps=2, max_steps=1),
    "loop 1": dict(loop2_weight=0, max_steps=1),
    "loop 2": dict(loop1_weight=0),  # each mask is decoded again in the backward
    "unscored": {},  # rank 1 has no reward at all
    # nor a row in the update
    "skipped": dict(skip_zero_variance="", loop2_weight=0, max_steps=1),
}
FAULTS = ("loss", "gradient")  # of rank 1, of loop 2


class FlatAverage:
    """The reference: gradients of all micro-batches are summed, then all-reduced in one piece."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *args, last):
        return self.module(*args, last)

    @contextlib.contextmanager
    def averaging(self, last):
        yield
        if last:
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            for p in (p for p in parameters if p.grad is None):  # reached by no term on this rank
                p.grad = torch.zeros_like(p)
            flat = torch.cat([p.grad.flatten() for p in parameters])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for p, mean in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad = mean.view_as(p).clone()


def unscored(kind):
    """Make a task's judge give no reward."""
    judge = kind.judge

    def none(task, rollout):
        outcome = judge(task, rollout)
        rewards = {name: torch.full_like(v, torch.nan) for name, v in outcome.rewards.items()}
        return RewardOutput(rewards, outcome.masks, outcome.replies)

    kind.judge = none
    return lambda: setattr(kind, "judge", judge)


def poisoned(fault: str, build):
    """`build`, with a loss or a gradient of loop 2 that is not finite."""
    forward = MicroBatchLoss.forward

    def broken(module, work, *rest):
        loss, statistics = forward(module, work, *rest)
        if work.task.name == "loop2":
            loss, statistics = loss * torch.nan, statistics | dict(loss=torch.tensor(torch.nan))
        return loss, statistics

    def built(*args):
        parts = build(*args)
        if fault == "loss":
            MicroBatchLoss.forward = broken
        else:
            trainable = parts.state.policy.trainable
            name = next(n for n in trainable if n.startswith("text_hidden_fcs."))
            trainable[name].register_hook(lambda gradient: gradient * torch.inf)
        return parts

    return built


def work(data: Path, folder: Path, ports: list[str]):
    """What each of two ranks does: each case twice, then the faults, of which it writes a file."""
    rank, ours, build = int(os.environ["RANK"]), train.GradientAverage, train.build
    os.chdir(folder)
    evaluate.measure, tensorboard.rollout_picture = measure, picture
    for name, changes in CASES.items():
        for kind, average in (("ddp", ours), ("flat", FlatAverage)):
            os.environ["MASTER_PORT"] = ports.pop()
            alone = rank == 1 and name in ("unscored", "skipped")
            tasks = (MaskCaptionMask, CaptionMaskCaption) if alone else ()
            undo = [unscored(task) for task in tasks]
            train.GradientAverage = average
            sa2va.MASKS_AT_ONCE = 1 if name == "loop 2" else MASKS_AT_ONCE
            train.main(flags(data, folder / f"{name} {kind}", **SAME | changes))
            for back in undo:
                back()
    train.GradientAverage = ours
    seen = {}
    for fault in FAULTS:
        os.environ["MASTER_PORT"] = ports.pop()
        forward, made = MicroBatchLoss.forward, []
        wrong = poisoned(fault, build) if rank == 1 else build
        train.build = lambda *args: made.append(wrong(*args)) or made[-1]
        try:
            train.main(flags(data, folder / fault, **SAME))
            message = "went on"
        except SystemExit as error:
            message = error.code
        MicroBatchLoss.forward, state = forward, made[-1].state
        start = state.roles.copies
        still = all(
            torch.equal(p, bank[n])
            for bank in start.values()
            for n, p in state.policy.trainable.items()
        )
        seen[fault] = [message, still and not state.optimizer.state]
    Path(f"rank_{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def ended(data, tmp_path_factory):
    """The folder in which two ranks did their `work`."""
    folder = tmp_path_factory.mktemp("runs")
    ports = [str(free_port()) for _ in range(2 * len(CASES) + len(FAULTS))]
    ended = forked(folder, *[lambda: work(data, folder, ports)] * 2)
    assert [status for status, _ in ended] == [0, 0], ended
    return folder


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_a_flat_all_reduce_bit_for_bit(ended, name):
    ddp, flat = ended / f"{name} ddp", ended / f"{name} flat"
    steps = range(1, 1 + CASES[name].get("max_steps", SAME["max_steps"]))
    for step in steps:
        for file in ("trainables.safetensors", "ema.safetensors"):
            one, other = weights(ddp, step, file), weights(flat, step, file)
            assert all(torch.equal(one[key], other[key]) for key in one | other), (step, file)
    assert rollouts(ddp) == rollouts(flat)
    if len(steps) > 1:
        assert distance(weights(ddp, 2), weights(ddp, 1)) > 1e-6  # something was learnt


def test_a_rank_without_a_scored_row_learns_from_the_other(ended):
    lines = [
        json.loads(line)
        for rank in range(2)
        for line in (ended / "unscored ddp" / "rollouts" / f"rank{rank}.jsonl")
        .read_text()
        .splitlines()
    ]
    missing = [line["reward"] is None for line in lines]
    assert missing == [False] * 12 + [True] * 12  # steps, loops, samples
    assert any(line["advantage"] for line in lines)


def test_a_fault_of_rank_1_is_named_on_both_and_nothing_is_stepped(ended):
    for rank in range(2):
        seen = json.loads((ended / f"rank_{rank}.json").read_text())
        message, still = seen["loss"]
        assert "rank 1: loop2/loss" in message and "rank 0" not in message, message
        assert "loop1/loss" not in message and still
        message, still = seen["gradient"]
        assert "rank 0, 1: gradient of text_hidden_fcs." in message, message
        assert "rank 0" not in message and "loss" not in message and still
    assert not list(ended.glob("loss/checkpoint*")) + list(ended.glob("gradient/checkpoint*"))
