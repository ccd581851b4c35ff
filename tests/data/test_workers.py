"""A loader's worker that dies, or cannot send: one sentence that names the flag."""

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from multiprocessing import reduction

import pytest
import torch

from rl_train.data.loader import eval_loader
from rl_train.data.workers import reporting_dead_workers
from rl_train.utils.io import UserFault
from tests.data.gar_rows import read, row
from tests.runs import ENVIRONMENT, ROOT, on_one_core

one_core = pytest.fixture(autouse=True)(on_one_core)


class Pixels:
    """The inputs of a model that takes a megabyte of each sample."""

    def check(self, sample):
        pass

    def prepare(self, sample):
        return torch.zeros(2**20, dtype=torch.uint8)

    def collate(self, prepared):
        return prepared


class Deadly:
    """A data set whose sample 5 does something to the process that reads it."""

    def __init__(self, dataset, act):
        self.dataset, self.act = dataset, act

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        if i == 5:
            self.act()
        return self.dataset[i]


def kill(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture
def dataset(tmp_path):
    return read(tmp_path, *[row() for _ in range(8)])


@pytest.mark.parametrize(
    "act, words",
    [
        (kill(signal.SIGBUS), "killed by signal: Bus error"),
        (kill(signal.SIGKILL), "killed by signal: Killed"),
        (kill(signal.SIGSEGV), "killed by signal: Segmentation fault"),
        (lambda: os._exit(3), "exited"),
    ],
)
def test_a_killed_worker(dataset, act, words):
    message = f"^--num_workers 1: DataLoader worker .*({words}|exited unexpectedly).*; /dev/shm or"
    with pytest.raises(UserFault, match=message) as raised:
        reporting_dead_workers(1, list, eval_loader(Deadly(dataset, act), Pixels(), 1, 1))
    assert "\n" not in str(raised.value)


class Event:
    """As torch.cuda.Event: it belongs to the process that made it; elsewhere its end is fatal."""

    def __init__(self):
        self.process, self.cycle = os.getpid(), self  # only the garbage collector frees it

    def __del__(self):
        if os.getpid() != self.process:
            os._exit(3)


def test_a_worker_does_not_collect_the_garbage_of_its_trainer(dataset):
    gc.disable()
    try:
        Event()
        loader = eval_loader(Deadly(dataset, gc.collect), Pixels(), 1, 1)
        batches = reporting_dead_workers(1, list, loader)
    finally:
        gc.enable()
        gc.collect()  # no later test's child inherits the event
    assert len(batches) == 8 and gc.get_freeze_count() == 0


def test_a_worker_whose_death_was_not_signalled():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.close()
    with pytest.raises(UserFault, match="^--num_workers 1: DataLoader worker exited unexpectedly;"):
        reporting_dead_workers(1, receiver.recv)


def test_a_worker_that_dies_while_a_tensor_is_fetched():
    """As it was seen once: the file descriptor of a tensor is asked for, and nobody answers."""
    ours, worker = socket.socketpair()
    ours.send(b"which file?")
    worker.close()  # with unread bytes: a reset
    with pytest.raises(UserFault, match="^--num_workers 1: DataLoader worker exited unexpectedly;"):
        reporting_dead_workers(1, reduction.recvfds, ours, 1)
    ours.close()


def test_other_lost_connections_pass():
    def lose():
        raise ConnectionResetError("of a judge")

    with pytest.raises(ConnectionResetError, match="^of a judge$"):
        reporting_dead_workers(1, lose)


def test_other_errors_pass():
    def fail():
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="^CUDA out of memory$"):
        reporting_dead_workers(2, fail)


# On a /dev/shm of 4 MiB of its own. Before a worker itself shared its batch, the trainer waited for
# ever for one that a full /dev/shm had cost it.
FULL = """
import sys
import torch
from rl_train.data import GraspAnyRegionDataset
from rl_train.data.loader import eval_loader
from rl_train.data.workers import reporting_dead_workers
class Pixels:
    check = prepare = lambda self, sample: torch.zeros(2**20, dtype=torch.uint8)
    collate = lambda self, prepared: prepared
reporting_dead_workers(1, list, eval_loader(GraspAnyRegionDataset(sys.argv[1]), Pixels(), 1, 1))
"""
MOUNT = "mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "


def test_a_full_shared_memory(dataset, tmp_path):  # `dataset` lies in tmp_path
    private = ["unshare", "-Urm", "sh", "-c"]
    if subprocess.run([*private, f"{MOUNT}true"], capture_output=True, timeout=100).returncode:
        pytest.skip("this machine lets no user mount a tmpfs")
    done = subprocess.run(
        [*private, f'{MOUNT}"$0" "$@"', sys.executable, "-c", FULL, str(tmp_path)],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,  # it ended the process too, whose other worker ignores SIGTERM
    )
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode == 1 and last.startswith(
        "rl_train.utils.io.UserFault: --num_workers 1: a worker cannot send its batch: "
        "/dev/shm is full; /dev/shm or memory may be too small"
    )
