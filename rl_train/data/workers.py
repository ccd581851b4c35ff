"""Start a loader's workers, send their batches through /dev/shm, explain the death of a worker.

If /dev/shm is full, a thread of the worker fails, its batch is lost, and the trainer would wait for
ever. So the worker itself puts its batch there (`to_shared_memory`), where the failure is an
exception.
"""

import gc
import io
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.utils.data import DataLoader

from rl_train.rollout import Batch
from rl_train.utils.io import UserFault

P, T = ParamSpec("P"), TypeVar("T")


class BatchLoader(DataLoader):
    """A DataLoader whose workers never collect the trainer's garbage.

    A worker is a fork: it has the trainer's garbage, CUDA events among it, and a worker that
    collects one of these is aborted with "CUDA error: initialization error".
    """

    def __iter__(self):
        """Start the workers while all objects are frozen, so that no worker frees them."""
        if not self.num_workers:
            return super().__iter__()
        gc.freeze()
        try:
            return super().__iter__()
        finally:
            gc.unfreeze()


class _Sharer(pickle.Pickler):
    """Moves tensors into shared memory; what it pickles of the rest is thrown away."""

    def persistent_id(self, value: object) -> int | None:
        """Move a tensor, and return an id so that the pickler does not descend into it."""
        if not isinstance(value, torch.Tensor):
            return None
        value.share_memory_()
        return 0  # any id will do


def to_shared_memory(batch: Batch) -> Batch:
    """Move the tensors of a batch into shared memory; a worker sends them from there uncopied.

    Raises RuntimeError if it is full.
    """
    _Sharer(io.BytesIO()).dump(batch)
    return batch


def reporting_dead_workers(
    num_workers: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what `function` does; raise UserFault, with torch's reason, if a worker dies.

    torch raises RuntimeError on SIGCHLD, wherever the process is by then.
    """
    try:
        try:
            return function(*args, **kwargs)
        except (EOFError, ConnectionError) as error:
            time.sleep(1)  # of a worker that died while it sent: SIGCHLD comes a moment later
            *_, innermost = traceback.extract_tb(error.__traceback__)
            # Its connection, or the file descriptor of a tensor that is fetched.
            if Path(innermost.filename).parent != Path(multiprocessing.__file__).parent:
                raise
            # torch's error is lost if SIGCHLD comes inside a callback of the garbage collector.
            raise RuntimeError("DataLoader worker exited unexpectedly") from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if "shared memory(shm)" in str(error):
            reason = "a worker cannot send its batch: /dev/shm is full"
        elif not reason.startswith("DataLoader worker"):
            raise
        raise UserFault(
            f"--num_workers {num_workers}: {reason.rstrip('. ')}; /dev/shm or memory may be too "
            "small (docker run --shm-size, or fewer workers, as 0), or a file of the data was cut "
            "short"
        ) from error
