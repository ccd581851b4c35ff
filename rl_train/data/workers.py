"""A loader's workers: what they send goes through /dev/shm, and when one dies, why.

torch says the same of all that can end a worker, or nothing at all: a full /dev/shm shows in a
thread of the worker, whose batch is lost, and the trainer waits for it for ever. So batches are put
there by the worker itself (`share`), and its faults are told apart here.
"""

import contextlib
import io
import os
import pickle
import shutil
import signal
import time
import weakref
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from rl_train.data.arrow import shards_cut_short

SHM = Path("/dev/shm")
PREFETCHED = 2  # batches of each worker, torch's default
MIB = 2**20
REMEDY = "make it larger (docker run --shm-size), or give --num_workers 0"
OPEN = weakref.WeakSet()  # iterators of loaders with workers


class WorkerFailed(ValueError):
    """A worker died or could not send its batch; the sentence names the file or the flag."""


class _Sharer(pickle.Pickler):
    """Moves the tensors that it meets into shared memory, and pickles the rest for nothing."""

    def persistent_id(self, value):
        return 0 if isinstance(value, torch.Tensor) and value.share_memory_() is not None else None


def share(batch):
    """`batch`, its tensors in shared memory, where a worker's are sent from without a copy.

    Raises RuntimeError if that is full.
    """
    _Sharer(io.BytesIO()).dump(batch)
    return batch


class Loader(DataLoader):
    """A DataLoader whose workers are known to `explaining`."""

    def __iter__(self):
        batches = super().__iter__()
        if self.num_workers:
            OPEN.add(batches)
        return batches


def explaining(num_workers: int, function, *args):
    """What `function(*args)` returns; the death of a worker in it is a `WorkerFailed` saying why.

    Caught twice in one frame: torch raises of SIGCHLD too, once and wherever the process is, so
    perhaps while the first error is looked at. Workers end with it: they ignore a SIGTERM (see
    `stops`), so that Python, which ends what is left of them by one, would wait for ever.
    """
    OPEN.clear()
    faults, flag = (RuntimeError, EOFError, ConnectionError), f"--num_workers {num_workers}"
    try:
        try:
            return function(*args)
        except faults as error:
            if found := explain(error, flag):
                raise found from error
            raise
    except RuntimeError as error:
        if found := explain(error, flag):
            raise found from error
        raise
    finally:
        for batches in list(OPEN):
            batches._shutdown_workers()


def explain(error: Exception, flag: str) -> WorkerFailed | None:
    """What `error` comes from, in a sentence that begins with `flag` or a file, or None."""
    full = "shared memory(shm)" in str(error)
    death = None if full else exit_of_worker()
    if not full and death is None:
        return None
    if cut := shards_cut_short():
        return WorkerFailed(f"{cut[0]} was cut short while a worker read it")
    if full:
        what = f"cannot send its batch, {size()} is full: {REMEDY}"
    elif death == -signal.SIGBUS:
        what = f"was killed by a bus error: a file was cut short, or {size()} was full: {REMEDY}"
    elif death == -signal.SIGKILL:
        what = "was killed, as the kernel does where memory runs out: give fewer"
    else:
        status = signal.strsignal(-death).lower() if death < 0 else f"exit status {death}"
        what = f"ended by itself: {status}"
    return WorkerFailed(f"{flag}: a worker {what}")


def exit_of_worker() -> int | None:
    """The exit status of a worker that has died, negative for a signal; None if none has.

    Waits for a second: what a worker leaves unfinished shows before its end does.
    """
    for _ in range(50 if OPEN else 0):
        with contextlib.suppress(RuntimeError):  # in which torch may say so now, by SIGCHLD
            for worker in [worker for batches in OPEN for worker in batches._workers]:
                if worker.exitcode:
                    return worker.exitcode
            time.sleep(0.02)
    return None


def size() -> str:
    return f"{SHM} of {shutil.disk_usage(SHM).total // MIB} MiB"


def shm_free() -> int:
    """Bytes free in shared memory."""
    return shutil.disk_usage(SHM).free


def small_shm(sample, num_samples: int, num_workers: int) -> str | None:
    """A sentence if /dev/shm has no room for `num_samples` like `sample` of each local rank."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    need = len(pickle.dumps(sample)) * num_samples * ranks
    if not SHM.is_dir() or shm_free() >= need:
        return None
    return (
        f"warning: {SHM} has {shm_free() // MIB} MiB free, the batches of --num_workers "
        f"{num_workers} on {ranks} ranks may take {need // MIB}: {REMEDY}"
    )
