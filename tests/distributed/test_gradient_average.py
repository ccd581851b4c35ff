"""DistributedDataParallel against a flat all-reduce of summed gradients, and faults of one rank."""

import contextlib
import functools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_train import train
from rl_train.distributed import process_group
from rl_train.evaluation import evaluate
from rl_train.loggers import tensorboard
from rl_train.loss import MicroBatchLoss
from rl_train.policies import sa2va
from rl_train.run import start
from rl_train.tasks import CaptionMaskCaption, MaskCaptionMask
from sa2va_hf.prediction import MASKS_AT_ONCE
from tests.ranks import forked, free_port
from tests.runs import distance, flags, measure, picture, weights

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
    "loop 2": dict(loop1_weight=0, max_steps=1),  # each mask is decoded again in the backward
    "unscored": dict(max_steps=1),  # rank 1 has no reward at all
    # and no other term of the loss either: it keeps one group, to average gradients with rank 0
    "unscored, no KL": dict(kl_coef=0, mask_loss_coef=0, max_steps=1),
}
FAULTS = ("loss", "gradient")  # of rank 1, of loop 2


class Checked:
    """The functions of `process_group`, with a flat all-reduce beside each update.

    The reference sums this rank's gradients of all micro-batches, reduces them over ranks in one
    piece and divides by the number of ranks.
    """

    def __init__(self):
        self.num_checked = 0  # updates compared

    def distributed_data_parallel(self, module):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.sums = {}  # {parameter: this rank's gradients so far}
        for p in self.parameters:
            p.register_hook(functools.partial(self.add, p))
        return process_group.distributed_data_parallel(module)

    def add(self, parameter, gradient):
        if gradient is not None:  # `touch_all_params` brings none
            before = self.sums.get(parameter)
            self.sums[parameter] = gradient.clone() if before is None else before + gradient

    @contextlib.contextmanager
    def sync_gradients(self, ddp, last):
        with process_group.sync_gradients(ddp, last):
            yield
        if last:
            zeros = {p: torch.zeros_like(p) for p in self.parameters}  # reached by no term here
            flat = torch.cat([(zeros | self.sums)[p].flatten() for p in self.parameters])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for p, mean in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
                assert torch.equal(zeros[p] if p.grad is None else p.grad, mean.view_as(p))
            self.sums = {}
            self.num_checked += 1


def unscored(task_class):
    """Make a task give no reward; return a function that undoes it."""
    rewards = task_class.rewards

    def no_rewards(task, rollout):
        outcome = rewards(task, rollout)
        missing = {name: torch.full_like(v, torch.nan) for name, v in outcome.rewards.items()}
        return replace(outcome, rewards=missing)

    task_class.rewards = no_rewards
    return lambda: setattr(task_class, "rewards", rewards)


def poisoned(fault: str, build):
    """`build`, with a loss or a gradient of loop 2 that is not finite."""
    forward = MicroBatchLoss.forward

    def broken(module, micro_batch):
        loss, statistics = forward(module, micro_batch)
        if micro_batch.scored.task.name == "loop2":
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
    """Do each case and each fault on this rank; what was seen goes to a file."""
    rank, build = int(os.environ["RANK"]), train.start_run
    os.chdir(folder)
    evaluate.measure, tensorboard.rollout_picture = measure, picture
    start.CALIBRATION_SAMPLES = 8
    seen = {}
    for name, changes in CASES.items():
        os.environ["MASTER_PORT"] = ports.pop()
        alone = rank == 1 and name.startswith("unscored")
        undo = [unscored(task) for task in ((MaskCaptionMask, CaptionMaskCaption) if alone else ())]
        sa2va.MASKS_AT_ONCE = 1 if name == "loop 2" else MASKS_AT_ONCE
        checked = Checked()
        train.distributed_data_parallel, train.sync_gradients = (
            checked.distributed_data_parallel,
            checked.sync_gradients,
        )
        train.main(flags(data, folder / name, **SAME | changes))
        seen[name] = checked.num_checked
        for back in undo:
            back()
    train.distributed_data_parallel, train.sync_gradients = (
        process_group.distributed_data_parallel,
        process_group.sync_gradients,
    )
    for fault in FAULTS:
        os.environ["MASTER_PORT"] = ports.pop()
        forward, built = MicroBatchLoss.forward, []
        faulty = poisoned(fault, build) if rank == 1 else build
        train.start_run = lambda *args: built.append(faulty(*args)) or built[-1]
        try:
            train.main(flags(data, folder / fault, **SAME))
            message = "went on"
        except SystemExit as error:
            message = error.code
        MicroBatchLoss.forward, state = forward, built[-1].state
        unchanged = all(
            torch.equal(p, copies[n])
            for copies in state.roles.copies.values()
            for n, p in state.policy.trainable.items()
        )
        seen[fault] = [message, unchanged and not state.optimizer.state]
    Path(f"rank_{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def ended(data, tmp_path_factory):
    """The folder in which two ranks did their `work`."""
    folder = tmp_path_factory.mktemp("runs")
    ports = [str(free_port()) for _ in range(len(CASES) + len(FAULTS))]
    ended = forked(folder, *[lambda: work(data, folder, ports)] * 2)
    assert [status for status, _ in ended] == [0, 0], ended
    return folder


@pytest.mark.parametrize("name, updates", dict(zip(CASES, (2, 2, 1, 1, 1), strict=True)).items())
def test_gradients_are_those_of_a_flat_all_reduce_bit_for_bit(ended, name, updates):
    """Every update of both ranks was compared, and something was learnt."""
    for rank in range(2):
        assert json.loads((ended / f"rank_{rank}.json").read_text())[name] == updates
    if (ended / name / "checkpoint_step_2").exists():
        assert distance(weights(ended / name, 2), weights(ended / name, 1)) > 1e-6


def test_a_rank_without_a_scored_row_learns_from_the_other(ended):
    lines = [
        json.loads(line)
        for rank in range(2)
        for line in (ended / "unscored" / "rollouts" / f"rank{rank}.jsonl").read_text().splitlines()
    ]
    missing = [line["reward"] is None for line in lines]
    assert missing == [False] * 6 + [True] * 6  # of two loops, three samples each
    assert any(line["advantage"] for line in lines)


def test_a_fault_of_rank_1_is_named_on_both_and_nothing_is_stepped(ended):
    """Gradients are averaged in the backward, so those of both ranks are not finite either way.

    A loss is each rank's own: the one that is not finite is named first, by its rank alone.
    """
    for rank in range(2):
        seen = json.loads((ended / f"rank_{rank}.json").read_text())
        message, unchanged = seen["loss"]
        assert message.startswith("rl_train: not finite: rank 1: loop2/loss; rank 0, 1: gradient")
        assert "loop1/loss" not in message and unchanged
        message, unchanged = seen["gradient"]
        assert message.startswith("rl_train: not finite: rank 0, 1: gradient of text_hidden_fcs.")
        assert "loss" not in message and unchanged
    assert not list(ended.glob("loss/checkpoint*")) + list(ended.glob("gradient/checkpoint*"))
