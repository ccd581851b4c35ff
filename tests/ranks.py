"""Two ranks of one machine: what the tests of several processes share."""

import os
import signal
import sys
import traceback
from pathlib import Path

import torch

from rl_train import cli
from rl_train.launch import free_port

TIMEOUT = 240  # seconds, of 40 on two idle cores: a deadlock is a failure


def rank_environments() -> list[dict[str, str]]:
    """What torchrun sets for two processes of one machine."""
    where = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
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
    sys.stdout.flush(), sys.stderr.flush()
    outputs = [folder / f"output{rank}" for rank in range(2)]
    children = []
    for environment, output, job in zip(rank_environments(), outputs, jobs, strict=True):
        children.append(os.fork())
        if children[-1] == 0:
            _become_rank(environment, output, job)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [(status, output.read_text()) for status, output in zip(statuses, outputs)]


def _become_rank(environment, output, job):
    """End this process as the rank that does the job."""
    status = 1
    try:
        signal.alarm(TIMEOUT)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        os.environ.update(environment)
        torch.cuda.is_available = lambda: False
        cli.run_program(job)
        status = 0
    except SystemExit as stopped:
        status = stopped.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
