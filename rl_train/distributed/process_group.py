"""Ranks, the few collectives of a step, and gradients by DistributedDataParallel."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DDP imports it; with a group its defaults would hold it
from torch.autograd.function import FunctionCtx
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from rl_train.utils.command_line import EXIT_BAD_INPUT
from rl_train.utils.io import CannotWrite

# Time that ranks wait in a collective before they end the run: another rank may load a model from a
# slow disk, write a checkpoint or evaluate meanwhile.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
PR_SET_PDEATHSIG = 1  # of Linux's prctl


Value = TypeVar("Value")
_closed: list[dist.ProcessGroup] = []  # groups that were left, see `close`
_print_listeners: list[Callable[[str], None]] = []  # see `also_printed_to`
_ddp_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
JOIN_SECONDS = 10  # that `close` waits for threads of the group


@dataclass(frozen=True)
class RankInfo:
    """Number and device of this process among those of a run."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


class RankError(ValueError):
    """Sent by a rank that cannot go on instead of its value, and then raised on all ranks."""


def init() -> RankInfo:
    """Join the process group that torchrun describes (NCCL or gloo), or be alone without one."""
    end_with_launcher()
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    # torchrun sets it, also for one process.
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        # torchrun keeps one store for all attempts (--max_restarts). Under a name of its own an
        # attempt cannot read the addresses of ranks that the one before it left there.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store, _, _ = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"attempt {attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    return RankInfo(rank, world_size, device)


def end_with_launcher():
    """Have the kernel send SIGTERM to this process when the torchrun that started it is gone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def close():
    """Leave the process group, and end gloo's native threads.

    Such a thread frees the tensors of a collective shortly after the collective is over, and needs
    the GIL for it. If Python has begun to exit by then, the process is aborted.

    Freeing the group joins its threads. Python's own object of it gives the GIL up meanwhile; DDP's
    reducer does not, and would deadlock as the last owner. So reducers go first, and a group that
    is held elsewhere, as by an error's traceback, is kept until Python ends.
    """
    if not dist.is_initialized():
        return
    group = dist.group.WORLD
    if dist.get_backend(group) != "gloo":
        _closed.append(group)
        dist.destroy_process_group()
        return
    for module in _ddp_modules:
        for owner in ("reducer", "logger", "process_group"):
            module.__dict__.pop(owner, None)
    last_owner = [group._get_backend(torch.device("cpu"))]
    dist.destroy_process_group()
    held_elsewhere = weakref.ref(group)
    del group
    if held_elsewhere() is not None:
        _closed.append(held_elsewhere())
    # In a thread: a collective that waits for a rank that hangs would hold this one up.
    joining = threading.Thread(target=last_owner.clear, daemon=True)
    joining.start()
    joining.join(JOIN_SECONDS)


def print0(text: str):
    """Print on the first rank, without breaking a progress bar."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(text)
        for listener in _print_listeners:
            listener(text)


@contextlib.contextmanager
def also_printed_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Context in which `listener` is called with each text that `print0` prints."""
    _print_listeners.append(listener)
    try:
        yield
    finally:
        _print_listeners.remove(listener)


def gather_objects(value: Value) -> list[Value]:
    """Return `value` of every rank, in rank order. Raises RankError on all if one sends it."""
    if not dist.is_initialized():
        return [value]
    # Objects go by pickle: for a few numbers and sentences, not for tensors.
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    faults = [[str(v)] if isinstance(v, RankError) else [] for v in values]
    if any(faults):
        alike = all(fault == faults[0] for fault in faults)
        raise RankError(faults[0][0] if alike else "; ".join(_by_ranks(faults)))
    return values


def _by_ranks(sentences_of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return each sentence once, after its ranks; those of the fewest ranks come first.

    A number that is not finite on one rank reaches the others by the averaged gradients.
    """
    ranks_of = {}  # {sentence: ranks}
    for rank, sentences in enumerate(sentences_of_ranks):
        for sentence in sentences:
            ranks_of.setdefault(sentence, []).append(str(rank))
    by_count = sorted(ranks_of.items(), key=lambda item: len(item[1]))
    return [f"rank {', '.join(ranks)}: {sentence}" for sentence, ranks in by_count]


@contextlib.contextmanager
def fail_together():
    """Context that raises RankError on all ranks if bad input or a bad disk ends it on one.

    The others learn of it at their next `gather_objects`, which must therefore be the only kind of
    collective inside, and follow it.
    """
    try:
        yield
    except (ValueError, CannotWrite, SystemExit) as error:
        if isinstance(error, RankError) or not dist.is_initialized():
            raise
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                error = error.code.removeprefix("rl_train: ")  # the name stands before all ranks
            else:  # a function of the user has exited
                error = f"it exited with {error.code!r}"
        gather_objects(RankError(str(error)))  # the sentence alone can always be pickled


def only_local_rank0(sentence: str) -> str | int:
    """Return SystemExit's argument: the sentence on a machine's first rank, else status 2."""
    return sentence if os.environ.get("LOCAL_RANK", "0") == "0" else EXIT_BAD_INPUT


def lost_rank(error: BaseException | None) -> str | None:
    """Return, in a line, a collective's error due to a rank that has ended or hangs; else None."""
    by_torch = isinstance(error, (dist.DistBackendError, dist.DistNetworkError))
    words = " ".join(str(error).split())
    # gloo's "preamble": ranks have met for different collectives, which is a defect of the program.
    by_gloo = isinstance(error, RuntimeError) and "gloo" in words and "preamble" not in words
    return words if by_torch or by_gloo else None


def all_sum(values: dict[str, float], faults: Sequence[str] = ()) -> dict[str, float]:
    """Return the sums over ranks; every rank passes the same names.

    Raises FloatingPointError on all ranks, with every rank's faults, if any rank has one.
    """
    of_ranks, faults_of_ranks = zip(*gather_objects((dict(values), faults)))
    if sentences := _by_ranks(faults_of_ranks):
        raise FloatingPointError("not finite: " + "; ".join(sentences[:20]))
    return {name: sum(values_of_rank[name] for values_of_rank in of_ranks) for name in values}


def raise_on_any_rank(faults: Sequence[str]):
    """Raise FloatingPointError on all ranks, with every rank's faults, if any rank has one."""
    all_sum({}, faults)


class _TouchParameters(torch.autograd.Function):
    """Identity of a loss, whose backward reaches all parameters without a gradient."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, loss: torch.Tensor, *parameters: torch.nn.Parameter
    ) -> torch.Tensor:
        ctx.num_parameters = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *[None] * ctx.num_parameters


def touch_all_params(loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Connect every parameter to the loss so that DistributedDataParallel reduces all of them.

    Adding 0 * parameter would launch six kernels for each of hundreds of parameters.
    """
    return _TouchParameters.apply(loss, *parameters)


def distributed_data_parallel(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module in DistributedDataParallel; alone, the module itself."""
    if not dist.is_initialized():
        return module
    ddp = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)
    _ddp_modules.add(ddp)
    return ddp


def sync_gradients(ddp: torch.nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Return the context of a micro-batch's forward and backward: `ddp.no_sync()` but in the last.

    In the last one gradients are averaged over ranks, so all trainable parameters take part in its
    backward, see `touch_all_params`.
    """
    return contextlib.nullcontext() if last or not dist.is_initialized() else ddp.no_sync()


def gradient_norms(parameters: Collection[torch.nn.Parameter]) -> torch.Tensor:
    """Return the gradients' norms, (number of parameters,), without waiting for the GPU.

    A gradient that no term of the loss reached becomes 0.
    """
    for parameter in (p for p in parameters if p.grad is None):
        parameter.grad = torch.zeros_like(parameter)
    return torch.stack(torch._foreach_norm([p.grad for p in parameters]))
