"""Ranks, the few collectives of a step, and gradients by DistributedDataParallel."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from rl_train.files import CannotWrite

# That ranks wait for one which does not come to a collective, before they end the run: one may load
# a model from a slow disk, write a checkpoint or evaluate meanwhile.
PATIENCE = timedelta(minutes=30)
PR_SET_PDEATHSIG = 1  # of Linux's prctl
SENTENCE = 2  # exit status of a run that ended with one; argparse's too
# Above 0 in a run that the launcher or torchrun has started again.
RESTARTS = ("RL_TRAIN_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
LAUNCHED = "RL_TRAIN_LAUNCHED"  # when the launcher started it first, seconds since the epoch
before_meeting = []  # called before each collective, by all ranks (see `sharding`)


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Fault:
    """In place of what a rank would have said: why it cannot go on."""

    sentence: str


class Refused(ValueError):
    """Raised on all ranks: one of them said a Fault."""


def init() -> Ranks:
    """Join the process group that torchrun describes (NCCL or gloo), or be alone without one."""
    end_with_launcher()
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    return Ranks(rank, world_size, device)


def end_with_launcher():
    """Have the kernel send SIGTERM to this process when the torchrun that started it is gone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def close():
    before_meeting.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def print0(*parts):
    """Print on the first rank, without breaking a progress bar."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(" ".join(map(str, parts)))


def gather_objects(value) -> list:
    """`value` of every rank, in rank order. Raises Refused on all if one says a Fault."""
    if not dist.is_initialized():
        return [value]
    for prepare in before_meeting:
        prepare()
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    ranks_of = {}  # {sentence: ranks that say it}
    for rank, said in enumerate(values):
        if isinstance(said, Fault):
            ranks_of.setdefault(said.sentence, []).append(str(rank))
    if ranks_of:
        named = [f"rank {', '.join(ranks)}: {sentence}" for sentence, ranks in ranks_of.items()]
        alike = all(said == values[0] for said in values)
        raise Refused(values[0].sentence if alike else "; ".join(named))
    return values


@contextlib.contextmanager
def stop_together():
    """A context that ends on all ranks with Refused if bad input or a bad disk ends it on one.

    The others hear of it at their next `gather_objects`, which must therefore be the only kind of
    collective in there, and its end.
    """
    try:
        yield
    except (ValueError, CannotWrite, SystemExit) as error:
        if isinstance(error, Refused) or not dist.is_initialized() or is_help(error):
            raise
        if isinstance(error, SystemExit):
            error = error.__context__ or "the command line is wrong"  # argparse has said it
        gather_objects(Fault(str(error)))


def restarted() -> bool:
    """Whether this process takes the place of one that crashed."""
    return any(int(os.environ.get(name, 0)) for name in RESTARTS)


def once_a_machine(sentence: str) -> str | int:
    """What SystemExit takes on this rank: the sentence, or status 2 where another says it."""
    return sentence if os.environ.get("LOCAL_RANK", "0") == "0" else SENTENCE


def is_help(error: BaseException) -> bool:
    """Whether --help has been answered, on all ranks."""
    return isinstance(error, SystemExit) and not error.code


def lost_rank(error: BaseException | None) -> str | None:
    """In a line, how a collective failed because another rank has ended or hangs; else None."""
    by_torch = isinstance(error, (dist.DistBackendError, dist.DistNetworkError))
    words = " ".join(str(error).split())
    # Of gloo not what says that ranks had met for different things, which is a fault of ours.
    by_gloo = isinstance(error, RuntimeError) and "gloo" in words and "preamble" not in words
    return words if by_torch or by_gloo else None


def all_sum(values: dict[str, float], faults: Sequence[str] = ()) -> dict[str, float]:
    """Sums over ranks; every rank passes the same names. With faults as `raise_on_any_rank`."""
    of_ranks, faults = zip(*gather_objects((dict(values), faults)))
    _raise_not_finite(faults)
    return {name: sum(mine[name] for mine in of_ranks) for name in values}


def raise_on_any_rank(faults: Sequence[str]):
    """Raise FloatingPointError on all ranks, with every rank's faults, if any rank has one."""
    _raise_not_finite(gather_objects(faults))


def _raise_not_finite(of_ranks: Sequence[Sequence[str]]):
    ranks_of = {}  # {fault: ranks that have it}
    for rank, mine in enumerate(of_ranks):
        for fault in mine:
            ranks_of.setdefault(fault, []).append(str(rank))
    named = [f"rank {', '.join(ranks)}: {fault}" for fault, ranks in ranks_of.items()]
    if named:
        raise FloatingPointError("not finite: " + "; ".join(named[:20]))


class _Reaching(torch.autograd.Function):
    """A loss as it is; its backward comes by all parameters, and brings them nothing."""

    @staticmethod
    def forward(ctx, loss, *parameters):
        ctx.num = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *[None] * ctx.num


def reaching(loss: torch.Tensor, parameters) -> torch.Tensor:
    """The loss, of whose backward all parameters are a part, as DistributedDataParallel wants it.

    Not by 0 * each parameter, which would be six kernels for each of hundreds.
    """
    return _Reaching.apply(loss, *parameters)


class GradientAverage:
    """A module whose backward leaves, on every rank, the mean of all ranks' gradients.

    By DistributedDataParallel where there are processes; alone, the module as it is. Before they
    are averaged, the norm of each of this rank's own gradients is kept: one that is not finite is
    so on all ranks afterwards, and only these norms say on which it arose.

    Args:
        module: whose parameters, {name: parameter} in `names`, all take part in the last backward.
    """

    def __init__(self, module: torch.nn.Module, names: dict[str, torch.nn.Parameter]):
        self.module, self.names, self.own = module, names, {}
        if dist.is_initialized():
            how = dict(broadcast_buffers=False, gradient_as_bucket_view=True)
            self.module = DistributedDataParallel(module, **how)
            self.module.register_comm_hook(None, self._reduce)

    def __call__(self, *args, last: bool):
        """What the module returns, of the step's `last` micro-batch or of one before it."""
        return self.module(*args, last and dist.is_initialized())

    def averaging(self, last: bool):
        """The context of a forward and backward: gradients are averaged in that of the last one."""
        if last or not dist.is_initialized():
            return contextlib.nullcontext()
        return self.module.no_sync()

    def _reduce(self, _, bucket):
        norms = torch._foreach_norm(bucket.gradients())
        self.own |= zip(map(id, bucket.parameters()), norms)
        return allreduce_hook(dist.group.WORLD, bucket)

    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms of this rank's own gradients and of the averaged ones, by `names`, one each.

        Alone they are the same.
        """
        parameters = self.names.values()
        averaged = gradient_norms(parameters)
        if not dist.is_initialized():
            return averaged, averaged
        return torch.stack([self.own[id(p)] for p in parameters]), averaged


def gradient_norms(parameters) -> torch.Tensor:
    """(one a parameter,) norms of their gradients, which nobody waits for yet.

    A gradient that no term reached becomes 0.
    """
    for parameter in (p for p in parameters if p.grad is None):
        parameter.grad = torch.zeros_like(parameter)
    return torch.stack(torch._foreach_norm([p.grad for p in parameters]))
