"""Two ranks of one machine: what the tests of several processes share."""

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

from rl_train.utils.command_line import run_program

TIMEOUT = 240  # seconds, of 40 on two idle cores: a deadlock is a failure


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environments() -> list[dict[str, str]]:
    """Variables that torchrun sets for two processes of one machine."""
    where = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    where |= dict(LOCAL_WORLD_SIZE="2")
    return [where | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def finish(processes, timeout=TIMEOUT) -> list[str]:
    """Their output; kills what has not ended in time, so that a hang is a failure."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def forked(folder: Path, *jobs) -> list[tuple[int, str]]:
    """[(exit status, output)] of two ranks, each a fork of this process that does its job.

    A process of its own would import for longer than most jobs take. Files of the outputs are left
    in `folder`.
    """
    places = zip(rank_environments(), jobs, strict=True)
    children = [start_fork(folder / f"output{rank}", *place) for rank, place in enumerate(places)]
    return [child() for child in children]


def fork(folder: Path, job) -> tuple[int, str]:
    """(exit status, output) of a fork of this process that does the job."""
    return start_fork(folder / "output", {}, job)()


def start_fork(output: Path, environment: dict[str, str], job):
    """Start a fork of this process that does the job; return a function that waits for its end."""
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _do(environment, output, job)

    def wait() -> tuple[int, str]:
        return wait_for_exit(child), output.read_text() if output.exists() else ""

    wait.pid = child
    return wait


def wait_for_exit(child: int, timeout: float = TIMEOUT + 30) -> int:
    """Exit status of a child process, minus a signal's number; kills it after `timeout` seconds.

    Its own alarm is not enough: a fork may hang before it is set.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _do(environment, output, job):
    """End this process with the job's exit status."""
    status = 1
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        faulthandler.register(signal.SIGALRM, file=2, chain=True)  # where it hangs, then its end
        signal.alarm(TIMEOUT)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        os.environ.update(environment)
        torch.cuda.is_available = lambda: False
        run_program(job)
        status = 0
    except SystemExit as stopped:
        status = stopped.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
