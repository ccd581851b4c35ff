"""Start this machine's ranks and stay until they have ended: what run_rl_train.sh runs.

    python -m rl_train.launch [--max_restarts N] [flags of rl_train.train]
    python -m rl_train.launch supervised [--max_restarts N] [flags of tools.train_supervised]

torchrun's agent starts the ranks, and ends the others when one fails. Here is what it lacks: a
signal reaches the ranks, which have the time that they need for a checkpoint; a run that crashed
is started again, N times at most, and goes on from the latest checkpoint of its --output_dir; the
last line says which rank ended how.

The exit status is 0; 75 if a signal stopped the run, which can go on; 2 if it ended with a
sentence, of which starting it again changes nothing; else that of the rank that failed first.
Environment: NPROC, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
"""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rl_train.distributed import LAUNCHED, PATIENCE, RESTARTS, SENTENCE

FINAL = (os.EX_TEMPFAIL, SENTENCE)  # 75, 2
PROGRAM = ["-m", "rl_train.train"]
PROGRAMS = {"supervised": ["-m", "tools.train_supervised"]}  # by the first word
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TOGETHER = 20  # seconds in which ranks end by the fault of one; torchrun kills the rest after 30
HINTS = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGABRT: f" (NCCL ends so when a rank did not come within {PATIENCE} h)",
    signal.SIGBUS: " (shared memory full? --num_workers 0 needs none)",
}


class Agent(threading.Thread):
    """torchrun's agent in a thread, so that signals remain the launcher's."""

    def __init__(self, arguments: list[str]):
        super().__init__(daemon=True)
        self.arguments, self.error = arguments, None

    def run(self):
        try:
            torchrun.run(torchrun.parse_args(self.arguments))
        except BaseException as error:  # for `failures`
            self.error = error

    def failures(self) -> dict[int, ProcessFailure]:
        """{rank: how it ended} of this machine's ranks that failed, when all have ended."""
        self.join()
        if self.error and not isinstance(self.error, ChildFailedError):
            raise self.error
        return self.error.failures if self.error else {}


def arguments(attempt: int, nproc: int, nnodes: int, command: list[str]) -> list[str]:
    """torchrun's command line of one attempt, each of which meets at a port of its own."""
    port = free_port() if nnodes == 1 else int(os.environ.get("MASTER_PORT", 29500)) + attempt
    where = dict(nproc_per_node=nproc, nnodes=nnodes, node_rank=os.environ.get("NODE_RANK", 0))
    where |= dict(master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"), master_port=port)
    return [f"--{n}={value}" for n, value in where.items()] + command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children() -> list[int]:
    """The ids of this process's children: the ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        if int(parent) == os.getpid():
            found.append(int(folder.name))
    return found


def explain(failures: dict[int, ProcessFailure], signalled: bool = False) -> tuple[int, str]:
    """(exit status of the rank whose end explains that of the others, a sentence about it).

    It is one that ended on purpose, else one that was killed, else the first. torchrun ends the
    others by SIGTERM, which they take for a stop, and by SIGKILL who does not heed it.

    Args:
        signalled: whether the launcher itself got a signal.
    """
    ends = {failure.exitcode for failure in failures.values()}
    stopped = signalled or ends <= {os.EX_TEMPFAIL, -signal.SIGTERM}
    begin = min(failure.timestamp for failure in failures.values())
    late = [r for r, failure in failures.items() if failure.timestamp - begin > TOGETHER]

    def order(rank):
        status = failures[rank].exitcode
        by_signal, killed = status == os.EX_TEMPFAIL, status < 0 and status != -signal.SIGTERM
        on_purpose = status == SENTENCE or (by_signal and stopped)
        when = failures[rank].timestamp
        return rank in late, not on_purpose, not killed, by_signal, when, status < 0, rank

    rank = min(failures, key=order)
    status = failures[rank].exitcode
    how = f"ended with status {status}, for the reason that it gives above"
    if status < 0:
        how = f"was killed by signal {-status}{HINTS.get(-status, '')}"
    hung = f"; rank {', '.join(map(str, late))} hung and was killed" if late else ""
    return status, f"rl_train: rank {rank} {how}{hung}"


def main():
    parser = argparse.ArgumentParser("rl_train.launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--max_restarts", type=int, default=0)
    argv = sys.argv[1:]
    program = PROGRAMS.get(argv[0], PROGRAM) if argv else PROGRAM
    own, argv = parser.parse_known_args(argv[program is not PROGRAM :])
    command = [*program, *argv]
    if own.max_restarts < 0:
        parser.error(f"--max_restarts {own.max_restarts}: must be at least 0")
    nproc = int(os.environ.get("NPROC") or torch.cuda.device_count() or 1)
    nnodes = int(os.environ.get("NNODES", 1))
    if nproc == nnodes == 1 and not own.max_restarts:
        os.execv(sys.executable, [sys.executable, *command])
    os.environ.setdefault(LAUNCHED, str(time.time()))
    signals = []  # received so far

    def forward(number, _):
        signals.append(number)
        ranks = children()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(rank, number)
        if not ranks and len(signals) == 1:  # between two attempts, or other machines awaited
            sys.exit(os.EX_TEMPFAIL)

    # It warns that it has no signal handlers, and repeats what `explain` says.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    for number in FORWARDED:
        signal.signal(number, forward)
    for attempt in range(own.max_restarts + 1):
        os.environ[RESTARTS[0]] = str(attempt)
        agent = Agent(arguments(attempt, nproc, nnodes, command))
        agent.start()
        failures = agent.failures()
        if not failures:
            return
        status, sentence = explain(failures, bool(signals))
        if len(signals) == 1 and -status in FORWARDED:  # before the ranks could take note of it
            status = os.EX_TEMPFAIL
        if status in FINAL:
            sys.exit(status)
        if signals or attempt == own.max_restarts:
            print(sentence, file=sys.stderr)
            sys.exit(status if status > 0 else 128 - status)
        print(f"{sentence}; restart {attempt + 1} of {own.max_restarts}", file=sys.stderr)


if __name__ == "__main__":
    main()
