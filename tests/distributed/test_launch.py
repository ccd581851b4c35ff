"""The launcher as the parent of ranks that end in every way, and its ranks without it."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext

from rl_train.distributed import launch
from tests.ranks import wait_for_exit

RANK = """
import os, signal, sys, time
rank, folder, way = os.environ["RANK"], *sys.argv[1:]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
def stop(number, _):
    time.sleep(float(rank))  # one writes a checkpoint for longer
    os.write(1, b"stopped\\n")
    os._exit(75)
if way == "stopped":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
if way == "orphaned":
    from rl_train.distributed.process_group import end_with_launcher
    end_with_launcher()
if way == "waiting":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Python's handler in a call that does not end
open(f"{folder}/rank{rank}.{attempt}.{os.getpid()}", "w").close()
if way in ("crashed", "waiting", "sentence") and rank == "1":  # the other has begun
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
if attempt == "0" and way in ("crashed", "waiting") and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "sentence" and rank == "1":
    sys.exit(2)
if attempt == "0":
    time.sleep(600)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Function that forks a launcher of two ranks: (its id, file of its output, ranks' folder)."""
    script, ranks = tmp_path / "a_rank.py", tmp_path / "ranks"
    script.write_text(RANK)
    ranks.mkdir()
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("PYTHONPATH", f"{os.getcwd()}:{tmp_path}")
    monkeypatch.setattr(sys, "exit", lambda status: os._exit(status))
    launchers = []

    def fork(way, *argv):
        output = tmp_path / "output"
        monkeypatch.setattr(sys, "argv", ["launch", "-m", "a_rank", *argv, str(ranks), way])
        launchers.append(os.fork())
        if launchers[-1] == 0:
            signal.alarm(120)  # a hang is a failure
            with output.open("w") as file:
                os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
            sys.stderr = sys.stdout = os.fdopen(1, "w", buffering=1)
            launch.main()
            os._exit(0)
        return launchers[-1], output, ranks

    yield fork
    for file in ranks.iterdir():
        try:
            os.kill(int(file.suffix[1:]), signal.SIGKILL)
        except ProcessLookupError:
            pass


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(file) -> bool:
    """Return whether the rank that wrote the file lives."""
    try:
        return Path(f"/proc/{file.suffix[1:]}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def attempts(ranks) -> list[str]:
    return sorted(file.stem for file in ranks.iterdir())


def test_a_killed_rank_ends_the_others_and_is_named(start):
    launcher, output, ranks = start("crashed")
    assert wait_for_exit(launcher) == 128 + signal.SIGKILL
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 ", output.read_text())
    assert attempts(ranks) == ["rank0.0", "rank1.0"] and not any(map(alive, ranks.iterdir()))


def test_a_rank_that_waits_for_a_killed_one_is_ended(start, monkeypatch):
    """It may wait in gloo, see test_process_group.py. torchrun gives it 30 seconds."""
    close = PContext.close
    monkeypatch.setattr(PContext, "close", lambda ranks, *_: close(ranks, timeout=1))
    launcher, _, ranks = start("waiting")
    assert wait_for_exit(launcher) == 128 + signal.SIGKILL
    assert attempts(ranks) == ["rank0.0", "rank1.0"] and not any(map(alive, ranks.iterdir()))


def test_a_crashed_run_is_started_again(start):
    launcher, output, ranks = start("crashed", "--max_restarts", "2")
    assert wait_for_exit(launcher) == 0
    assert attempts(ranks) == ["rank0.0", "rank0.1", "rank1.0", "rank1.1"]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGUSR2,
        signal.SIGXCPU,
        signal.SIGHUP,
    ],
)
def test_a_run_that_a_signal_stops_is_not_started_again(start, number):
    """And the rank that needs longer is not cut off."""
    launcher, output, ranks = start("stopped", "--max_restarts", "2")
    wait_for(lambda: len(attempts(ranks)) == 2)
    os.kill(launcher, number)
    assert wait_for_exit(launcher) == 75
    assert attempts(ranks) == ["rank0.0", "rank1.0"]
    assert output.read_text().count("stopped\n") == 2


def test_a_launcher_under_nohup_stays(start):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launcher, output, ranks = start("stopped")
    signal.signal(signal.SIGHUP, before)
    wait_for(lambda: len(attempts(ranks)) == 2)
    os.kill(launcher, signal.SIGHUP)
    time.sleep(1)
    assert os.waitpid(launcher, os.WNOHANG) == (0, 0) and output.read_text() == ""
    os.kill(launcher, signal.SIGTERM)
    assert wait_for_exit(launcher) == 75


def test_the_status_is_that_of_the_rank_that_failed_first(start):
    launcher, output, ranks = start("sentence")
    assert wait_for_exit(launcher) == 2
    assert attempts(ranks) == ["rank0.0", "rank1.0"]


def test_bad_input_is_not_tried_again(start):
    launcher, output, ranks = start("sentence", "--max_restarts", "2")
    assert wait_for_exit(launcher) == 2
    assert attempts(ranks) == ["rank0.0", "rank1.0"]


def test_ranks_do_not_outlive_a_killed_launcher(start):
    launcher, _, ranks = start("orphaned")
    wait_for(lambda: len(attempts(ranks)) == 2)
    os.kill(launcher, signal.SIGKILL)
    wait_for_exit(launcher)
    wait_for(lambda: not any(map(alive, ranks.iterdir())))


def test_machines_meet_at_the_address(monkeypatch):
    for name, value in dict(NNODES=3, NODE_RANK=1, MASTER_ADDR="a", MASTER_PORT=7).items():
        monkeypatch.setenv(name, str(value))
    assert launch.rendezvous_options() == [
        *("--nnodes=3", "--node_rank=1", "--master_addr=a", "--master_port=7")
    ]
    monkeypatch.setenv("NNODES", "1")
    assert launch.rendezvous_options() == ["--standalone"]


def test_restarts_are_not_fewer_than_none(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "--max_restarts", "-1"])
    with pytest.raises(SystemExit, match="--max_restarts -1: must be an integer at least 0"):
        launch.main()
