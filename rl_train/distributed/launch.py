"""Start this machine's ranks under torchrun: what run_rl_train.sh runs.

    python -m rl_train.distributed.launch [--max_restarts N] [flags of rl_train.train]
    python -m rl_train.distributed.launch supervised [--max_restarts N] [flags of rl_train.sft]

One process without restarts needs no torchrun. --max_restarts implies --resume auto: torchrun
starts all ranks again, whatever they ended with, and they go on from the latest checkpoint.

Environment: NPROC (default: one process a GPU), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
Exit status: 0; 75 after a signal; else that of the rank that failed first, 128 + n by signal n.
"""

import argparse
import os
import signal
import sys

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from rl_train.distributed.process_group import COLLECTIVE_TIMEOUT

MODULE = "rl_train.train"
SUPERVISED = "rl_train.sft"


def torchrun_arguments(num_processes: int, max_restarts: int, command: list[str]) -> list[str]:
    """The command line of torchrun that starts this machine's ranks of `command`."""
    meeting = ["--standalone"]
    if os.environ.get("NNODES", "1") != "1":
        meeting = [
            f"--nnodes={os.environ['NNODES']}",
            f"--node_rank={os.environ.get('NODE_RANK', '0')}",
            f"--master_addr={os.environ.get('MASTER_ADDR', '127.0.0.1')}",
            f"--master_port={os.environ.get('MASTER_PORT', '29500')}",
        ]
    processes = [f"--nproc_per_node={num_processes}", f"--max_restarts={max_restarts}"]
    return [*meeting, *processes, *command]


def main():
    argv, module = sys.argv[1:], MODULE
    if argv[:1] == ["supervised"]:
        argv, module = argv[1:], SUPERVISED
    parser = argparse.ArgumentParser(
        "rl_train.distributed.launch", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--max_restarts", type=int, default=0)
    own, flags = parser.parse_known_args(argv)
    if own.max_restarts < 0:
        parser.error(f"--max_restarts {own.max_restarts}: must be at least 0")
    command = ["-m", module, *flags]
    num_processes = int(os.environ.get("NPROC") or torch.cuda.device_count() or 1)
    if num_processes == 1 and os.environ.get("NNODES", "1") == "1" and not own.max_restarts:
        os.execv(sys.executable, [sys.executable, *command])
    # After a signal torchrun kills ranks that take longer: they end a step and write a checkpoint.
    os.environ.setdefault(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(COLLECTIVE_TIMEOUT.total_seconds()))
    )
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))  # not torchrun's
    try:
        arguments = torchrun_arguments(num_processes, own.max_restarts, command)
        torchrun.run(torchrun.parse_args(arguments))
    except SignalException:
        sys.exit(os.EX_TEMPFAIL)  # 75
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        print(error, file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)


if __name__ == "__main__":
    main()
