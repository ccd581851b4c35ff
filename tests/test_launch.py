"""The launcher as the parent of ranks that end in every way, and its ranks without it."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_train import cli, distributed, launch

RANK = """
import os, signal, sys, time
rank, attempt, folder, way = os.environ["RANK"], os.environ["RL_TRAIN_RESTARTS"], *sys.argv[1:]
def stop(number, _):
    time.sleep(float(rank))  # one writes a checkpoint for longer
    os._exit(75)
if way == "stopped":
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, stop)
if way == "orphaned":
    from rl_train.distributed import end_with_launcher
    end_with_launcher()
open(f"{folder}/rank{rank}.{attempt}.{os.getpid()}", "w").close()
if attempt == "0" and way == "crashed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "sentence" and rank == "1":
    sys.exit(2)
if attempt == "0":
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Function that forks a launcher of two ranks: (its id, file of its output, ranks' folder)."""
    script, ranks = tmp_path / "rank.py", tmp_path / "ranks"
    script.write_text(RANK)
    ranks.mkdir()
    monkeypatch.setattr(launch, "PROGRAM", [str(script)])
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setattr(sys, "exit", lambda status: os._exit(status))
    launchers = []

    def fork(way, *argv):
        output = tmp_path / "output"
        monkeypatch.setattr(sys, "argv", ["launch", *argv, str(ranks), way])
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


def status_of(launcher) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])


def alive(file) -> bool:
    """Whether the rank that wrote the file lives."""
    try:
        return Path(f"/proc/{file.suffix[1:]}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def attempts(ranks) -> list[str]:
    return sorted(file.stem for file in ranks.iterdir())


def test_a_killed_rank_ends_the_others_and_is_named(start):
    launcher, output, ranks = start("crashed")
    assert status_of(launcher) == 128 + signal.SIGKILL
    last = output.read_text().strip().splitlines()[-1]
    assert last == "rl_train: rank 1 was killed by signal 9 (out of memory?)"
    assert attempts(ranks) == ["rank0.0", "rank1.0"] and not any(map(alive, ranks.iterdir()))


def test_a_crashed_run_is_started_again(start):
    launcher, output, ranks = start("crashed", "--max_restarts", "2")
    assert status_of(launcher) == 0
    assert "killed by signal 9 (out of memory?); restart 1 of 2\n" in output.read_text()
    assert attempts(ranks) == ["rank0.0", "rank0.1", "rank1.0", "rank1.1"]


def test_a_run_that_a_signal_stops_is_not_started_again(start):
    """And the rank that needs longer is not cut off."""
    launcher, output, ranks = start("stopped", "--max_restarts", "2")
    wait_for(lambda: len(attempts(ranks)) == 2)
    os.kill(launcher, signal.SIGUSR1)
    assert status_of(launcher) == 75
    assert attempts(ranks) == ["rank0.0", "rank1.0"] and "rl_train:" not in output.read_text()


def test_a_run_that_ends_with_a_sentence_is_not_started_again(start):
    launcher, output, ranks = start("sentence", "--max_restarts", "2")
    assert status_of(launcher) == 2
    assert attempts(ranks) == ["rank0.0", "rank1.0"] and "rl_train:" not in output.read_text()


def test_ranks_do_not_outlive_a_killed_launcher(start):
    launcher, _, ranks = start("orphaned")
    wait_for(lambda: len(attempts(ranks)) == 2)
    os.kill(launcher, signal.SIGKILL)
    status_of(launcher)
    wait_for(lambda: not any(map(alive, ranks.iterdir())), seconds=5)


@pytest.mark.parametrize(
    "ends, status, said",
    [
        ({0: (1, 5), 1: (-9, 5), 2: (-15, 6)}, -9, "rank 1 was killed by signal 9 .out"),
        ({0: (-15, 6), 1: (1, 6), 2: (1, 5)}, 1, "rank 2 ended with status 1, for"),
        ({0: (1, 5), 1: (-9, 36)}, 1, "rank 0 ended .* above; rank 1 hung and was killed$"),
        ({0: (-6, 5), 1: (-9, 36)}, -6, "rank 0 .* within 0:30:00 h.; rank 1 hung and was killed$"),
        ({0: (-15, 5), 1: (75, 5)}, 75, "rank 1 "),
        ({0: (-6, 5), 1: (2, 6)}, 2, "rank 1 "),
        # torchrun's SIGTERM found rank 0 while it loaded the model, which it left for
        ({0: (75, 5), 1: (-9, 6)}, -9, "rank 1 was killed by signal 9"),
        ({0: (75, 5), 1: (1, 6)}, 1, "rank 1 "),
    ],
)
def test_the_rank_that_explains_the_end(ends, status, said):
    """By hand: {rank: (exit status, second of its end)}."""
    failures = {
        rank: SimpleNamespace(exitcode=code, timestamp=second)
        for rank, (code, second) in ends.items()
    }
    found, sentence = launch.explain(failures)
    assert found == status
    assert re.search(rf"^rl_train: {said}", sentence), sentence


def test_a_signal_to_the_launcher_explains_a_75():
    ends = {
        0: SimpleNamespace(exitcode=75, timestamp=5),
        1: SimpleNamespace(exitcode=1, timestamp=4),
    }
    assert launch.explain(ends, signalled=True)[0] == 75 and launch.explain(ends)[0] == 1


def test_machines_meet_at_the_address_and_at_another_port_each_time(monkeypatch):
    for name, value in dict(NODE_RANK=1, MASTER_ADDR="a", MASTER_PORT=7).items():
        monkeypatch.setenv(name, str(value))
    line = launch.arguments(2, 8, 3, [*launch.PROGRAM, "--seed", "1"])
    assert line == [
        *("--nproc_per_node=8", "--nnodes=3", "--node_rank=1", "--master_addr=a"),
        *("--master_port=9", *launch.PROGRAM, "--seed", "1"),
    ]
    assert "--master_port=9" not in launch.arguments(2, 8, 1, [])


def test_restarts_are_not_fewer_than_none(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch", "--max_restarts", "-1"])
    with pytest.raises(SystemExit) as stopped:
        launch.main()
    assert stopped.value.code == 2 and "--max_restarts -1: must be" in capsys.readouterr().err


def test_a_rank_started_again_says_so(monkeypatch):
    assert not distributed.restarted()
    for name in distributed.RESTARTS:
        monkeypatch.setenv(name, "0")
        assert not distributed.restarted()
        monkeypatch.setenv(name, "1")
        assert distributed.restarted()
        monkeypatch.delenv(name)


def test_only_a_run_that_this_launch_began_is_gone_on_with(tmp_path, monkeypatch):
    """Else a restart would pass over what the user has asked for."""
    assert not cli.has_begun(tmp_path)
    monkeypatch.setenv(distributed.RESTARTS[0], "1")
    monkeypatch.setenv(distributed.LAUNCHED, "1000")
    assert not cli.has_begun(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert cli.has_begun(tmp_path)
    os.utime(config, (999, 999))
    assert not cli.has_begun(tmp_path)
