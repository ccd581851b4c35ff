"""Start this machine's ranks of a module under torchrun: what run_rl_train.sh runs.

    python -m rl_train.distributed.launch -m rl_train.train [--max_restarts N] [its flags]

One process without restarts needs no torchrun. --max_restarts implies --resume auto: torchrun
starts all ranks again, and they go on from the latest checkpoint. Bad input (status 2) is not tried
again: it would be as bad.

Environment: NPROC (default: one process a GPU), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
Exit status: 0; 75 after a signal; else that of the rank that failed first, 128 + n by signal n.
"""

import os
import signal
import sys
from collections.abc import Callable

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from rl_train.config.flags import COUNT_OR_0
from rl_train.distributed.process_group import COLLECTIVE_TIMEOUT
from rl_train.utils.command_line import EXIT_BAD_INPUT, FlagParser, run_program

# `LocalElasticAgent._monitor_workers`
MonitorWorkers = Callable[[LocalElasticAgent, WorkerGroup], RunResult]
RENDEZVOUS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun has the defaults


def rendezvous_options() -> list[str]:
    """Return torchrun's options by which the machines of a run meet."""
    if os.environ.get("NNODES", "1") == "1":
        return ["--standalone"]
    return [f"--{name.lower()}={os.environ[name]}" for name in RENDEZVOUS if name in os.environ]


def restart_unless_bad_input(monitor_workers: MonitorWorkers) -> MonitorWorkers:
    """Wrap `LocalElasticAgent._monitor_workers`: bad input on a rank leaves no restart.

    torchrun restarts after any exit status and has no option that says after which.
    """

    def monitor(agent: LocalElasticAgent, worker_group: WorkerGroup) -> RunResult:
        result = monitor_workers(agent, worker_group)
        if any(failure.exitcode == EXIT_BAD_INPUT for failure in result.failures.values()):
            agent._remaining_restarts = 0
        return result

    return monitor


def main():
    """Start the ranks, wait for them, and exit with the status that the module's docstring says."""
    parser = FlagParser("rl_train.distributed.launch", add_help=False)
    parser.add_argument("--max_restarts", type=COUNT_OR_0, default=0)
    args, command = parser.parse_known_args()
    num_processes = int(os.environ.get("NPROC") or torch.cuda.device_count() or 1)
    options = rendezvous_options()
    if num_processes == 1 and options == ["--standalone"] and not args.max_restarts:
        # Becomes the training process itself: signals and status need no passing on.
        os.execv(sys.executable, [sys.executable, *command])
    options += [f"--nproc_per_node={num_processes}", f"--max_restarts={args.max_restarts}"]
    # After a signal torchrun kills ranks that take longer: they end a step and write a checkpoint.
    os.environ.setdefault(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(COLLECTIVE_TIMEOUT.total_seconds()))
    )
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):  # torchrun has no handler
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup, which torchrun would undo
        options.append("--signals_to_handle=SIGTERM,SIGINT,SIGQUIT")
    agent = LocalElasticAgent
    agent._monitor_workers = restart_unless_bad_input(agent._monitor_workers)
    try:
        torchrun.run(torchrun.parse_args([*options, *command]))
    except SignalException:
        sys.exit(os.EX_TEMPFAIL)  # 75
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode != EXIT_BAD_INPUT:  # then the rank has said it in a sentence
            print(error, file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)


if __name__ == "__main__":
    run_program(main)
