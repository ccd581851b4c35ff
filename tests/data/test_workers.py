"""A loader's worker that dies, or cannot send: one sentence that names the file or the flag."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_train import train
from rl_train.data import arrow, workers
from rl_train.data.loader import (
    StepSampler,
    eval_loader,
    shared_memory_warning,
    train_loader,
)
from rl_train.data.workers import WorkerFailed, explaining, small_shm
from tests.data.gar_rows import read, row
from tests.runs import ENVIRONMENT, ROOT, draw_data, flags, on_one_core

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


@pytest.fixture(autouse=True)
def nothing_is_mapped(monkeypatch):
    monkeypatch.setattr(arrow, "MAPPED", {})


@pytest.fixture
def dataset(tmp_path):
    return read(tmp_path, *[row() for _ in range(8)])


@pytest.mark.parametrize(
    "act, words",
    [
        (kill(signal.SIGBUS), "bus error: a file was cut .*, or /dev/shm of .* --num_workers 0$"),
        (kill(signal.SIGKILL), "was killed, as the kernel does where memory runs out: give fewer$"),
        (kill(signal.SIGSEGV), "a worker ended by itself: segmentation fault$"),
        (lambda: os._exit(3), "a worker ended by itself: exit status 3$"),
    ],
)
def test_a_killed_worker(dataset, act, words):
    with pytest.raises(WorkerFailed, match=f"^--num_workers 1: .*{words}") as raised:
        explaining(1, list, eval_loader(Deadly(dataset, act), Pixels(), 1, 1))
    assert "\n" not in str(raised.value)


def test_a_shard_that_was_cut_short_is_named(dataset, tmp_path):
    """What a worker does that reads on in the map of such a shard."""
    path = tmp_path / "Part1" / "data-00000-of-00001.arrow"

    def cut():
        os.truncate(path, 1000)
        kill(signal.SIGBUS)()

    message = f"^{path} was cut short while a worker read it$"
    with pytest.raises(WorkerFailed, match=message):
        explaining(1, list, eval_loader(Deadly(dataset, cut), Pixels(), 1, 1))


def test_other_errors_pass():
    def fail():
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="^CUDA out of memory$"):
        explaining(2, fail)


def test_a_run_whose_shard_is_cut_short_names_it(tmp_path, monkeypatch):
    data, build = draw_data(tmp_path), train.build
    [path] = (data / "train").rglob("*.arrow")

    def build_and_cut(*args):
        parts = build(*args)
        os.truncate(path, path.stat().st_size // 2)
        return parts

    monkeypatch.setattr(train, "build", build_and_cut)
    with pytest.raises(SystemExit) as stopped:
        train.main(flags(data, tmp_path / "run", num_workers=1))
    sentence = str(stopped.value)
    assert f"{path} was cut short while it was read" in sentence and "\n" not in sentence


# On a /dev/shm of 4 MiB of its own. Before a worker itself shared its batch, the trainer waited for
# ever for one that a full /dev/shm had cost it.
FULL = """
import sys
import torch
from rl_train.data import GraspAnyRegionDataset
from rl_train.data.loader import eval_loader
from rl_train.data.workers import explaining
class Pixels:
    check = prepare = lambda self, sample: torch.zeros(2**20, dtype=torch.uint8)
    collate = lambda self, prepared: prepared
explaining(1, list, eval_loader(GraspAnyRegionDataset(sys.argv[1]), Pixels(), 1, 1))
"""
MOUNT = "mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "


def test_a_full_shared_memory(dataset, tmp_path):
    private = ["unshare", "-Urm", "sh", "-c"]
    if subprocess.run([*private, f"{MOUNT}true"], capture_output=True).returncode:
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
        "rl_train.data.workers.WorkerFailed: --num_workers 1: a worker cannot send its batch, "
        "/dev/shm of 4 MiB is full: make it larger"
    )


def test_small_shared_memory_is_said_at_the_start(dataset, monkeypatch):
    """2 x 2 batches ahead and 3 held, of 4 samples; 5 of 8 of an evaluation; on 2 ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    loader = train_loader(dataset, Pixels(), StepSampler(8, 4, 1, 0), 2)
    for free, said in ((135, True), (140, False)):
        monkeypatch.setattr(workers, "shm_free", lambda: free * 2**20)
        warning = shared_memory_warning(loader, 3, 8)
        assert bool(warning) == said, warning
    monkeypatch.setattr(workers, "shm_free", lambda: 0)
    assert "--num_workers 2 on 2 ranks may take 136: " in shared_memory_warning(loader, 3, 8)
    assert shared_memory_warning(train_loader(dataset, Pixels(), loader.sampler, 0), 3, 8) is None
    monkeypatch.setattr(workers, "SHM", Path("/nowhere"))
    assert small_shm(1, 100, 2) is None
