"""Ranks, the few collectives of a step, and gradients by DistributedDataParallel."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from rl_train.utils.io import CannotWrite

# That ranks wait for one which does not come to a collective, before they end the run: one may load
# a model from a slow disk, write a checkpoint or evaluate meanwhile.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
PR_SET_PDEATHSIG = 1  # of Linux's prctl
EXIT_BAD_INPUT = 2  # exit status of a run that ended with one; argparse's too


Value = TypeVar("Value")
_closed: list[dist.ProcessGroup] = []  # groups that were left, see `close`


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
    """Sent by a rank instead of its value: why it cannot go on."""

    sentence: str


class RankError(ValueError):
    """Raised on all ranks after one of them sent a Fault."""


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
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    return Ranks(rank, world_size, device)


def end_with_launcher():
    """Have the kernel send SIGTERM to this process when the torchrun that started it is gone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def close():
    """Leave the process group.

    It is kept until Python ends. DDP's reducer, freed after this, would else be its last owner and
    hold the GIL while it joins a thread of gloo, which may wait for the GIL to free a tensor.
    """
    if dist.is_initialized():
        _closed.append(dist.group.WORLD)
        dist.destroy_process_group()


def print0(*parts: str):
    """Print on the first rank, without breaking a progress bar."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(" ".join(parts))


def gather_objects(value: Value) -> list[Value]:
    """`value` of every rank, in rank order. Raises RankError on all if one sends a Fault."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    faults = [[v.sentence] if isinstance(v, Fault) else [] for v in values]
    if any(faults):
        alike = all(fault == faults[0] for fault in faults)
        raise RankError(faults[0][0] if alike else "; ".join(_by_ranks(faults)))
    return values


def _by_ranks(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Every sentence once, after the ranks that say it, those of the fewest ranks first.

    A number that is not finite on one rank reaches the others by the averaged gradients.
    """
    ranks_of = {}  # {sentence: ranks}
    for rank, sentences in enumerate(of_ranks):
        for sentence in sentences:
            ranks_of.setdefault(sentence, []).append(str(rank))
    by_count = sorted(ranks_of.items(), key=lambda item: len(item[1]))
    return [f"rank {', '.join(ranks)}: {sentence}" for sentence, ranks in by_count]


@contextlib.contextmanager
def fail_together():
    """A context that ends on all ranks with RankError if bad input or a bad disk ends it on one.

    The others hear of it at their next `gather_objects`, which must therefore be the only kind of
    collective in there, and its end.
    """
    try:
        yield
    except (ValueError, CannotWrite, SystemExit) as error:
        if isinstance(error, RankError) or not dist.is_initialized():
            raise
        if isinstance(error, SystemExit):
            error = error.__context__ or "the command line is wrong"  # argparse has said it
        gather_objects(Fault(str(error)))


def only_local_rank0(sentence: str) -> str | int:
    """What SystemExit takes on this rank: the sentence, or status 2 where another says it."""
    return sentence if os.environ.get("LOCAL_RANK", "0") == "0" else EXIT_BAD_INPUT


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
    return {name: sum(values_of_rank[name] for values_of_rank in of_ranks) for name in values}


def raise_on_any_rank(faults: Sequence[str]):
    """Raise FloatingPointError on all ranks, with every rank's faults, if any rank has one."""
    _raise_not_finite(gather_objects(faults))


def _raise_not_finite(of_ranks: Sequence[Sequence[str]]):
    if sentences := _by_ranks(of_ranks):
        raise FloatingPointError("not finite: " + "; ".join(sentences[:20]))


class _Reaching(torch.autograd.Function):
    """A loss as it is; its backward comes by all parameters, and brings them nothing."""

    @staticmethod
    def forward(ctx, loss, *parameters):
        ctx.num = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *[None] * ctx.num


def touch_all_params(loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The loss, of whose backward all parameters are a part, as DistributedDataParallel wants it.

    Not by 0 * each parameter, which would be six kernels for each of hundreds.
    """
    return _Reaching.apply(loss, *parameters)


class GradientAverage:
    """Wrapper of a module whose backward leaves, on every rank, the mean of all ranks' gradients.

    With several processes it is DistributedDataParallel, alone the module itself. All trainable
    parameters take part in the last backward of a step.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        if dist.is_initialized():
            self.module = DistributedDataParallel(
                module, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def __call__(self, *args: Any, last: bool) -> Any:
        """Return the module's output for the step's `last` micro-batch or one before it."""
        return self.module(*args, last and dist.is_initialized())

    def averaging(self, last: bool) -> contextlib.AbstractContextManager:
        """Return the context of a forward and backward; the last one averages the gradients."""
        if last or not dist.is_initialized():
            return contextlib.nullcontext()
        return self.module.no_sync()


def gradient_norms(parameters: Collection[torch.nn.Parameter]) -> torch.Tensor:
    """(one a parameter,) norms of their gradients, which nobody waits for yet.

    A gradient that no term reached becomes 0.
    """
    for parameter in (p for p in parameters if p.grad is None):
        parameter.grad = torch.zeros_like(parameter)
    return torch.stack(torch._foreach_norm([p.grad for p in parameters]))
