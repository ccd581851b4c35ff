"""Weak scaling: the same step on each of 1, 2, 4 .. processes of this host, one a GPU (gloo without one), and the gradients' exchange.

One process runs alone, as the launcher starts it; several under torchrun. A step is as long as its slowest rank.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from rl_train import distributed
from tools.benchmarks import work
from tools.benchmarks.common import device_name, synchronize

ALONE = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # what a torchrun around this would hand down
EXCHANGES = 10


def measure(args) -> dict | None:
    """{"runs": what `measure_rank` gives for each number of processes, "efficiency": {processes: time of the fewest / time of these}}."""
    if args.worker:
        return measure_rank(args)
    counts = args.num_processes or [
        n for n in (1, 2, 4, 8) if n <= max(1, torch.cuda.device_count())
    ]
    runs = [launch(args, count) for count in counts]
    found = dict(
        runs=runs,
        efficiency={run["num_processes"]: runs[0]["seconds"] / run["seconds"] for run in runs},
    )
    show(found)
    return found


def launch(args, count: int) -> dict:
    """The figures of `count` processes, started anew."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "scale.json"
        options = ["--worker", "--output", str(output)]
        for name in ("rounds", "warmup", "sizes", "prompt_length", "answer_tokens", "device"):
            options += [f"--{name}", str(getattr(args, name))]
        runner = (
            []
            if count == 1
            else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        )
        environment = {name: value for name, value in os.environ.items() if name not in ALONE}
        subprocess.run(
            [
                sys.executable,
                *runner,
                "-m",
                "tools.benchmark",
                "scale",
                *options,
                "--flags",
                *args.flags,
            ],
            check=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        return json.loads(output.read_text())


def measure_rank(args) -> dict | None:
    """On the first rank: seconds of a step by the slowest rank, by phase, and of the exchange; None on the others."""
    ranks = distributed.init()
    try:
        w = work.build(args, ranks)
        steps = []
        for number in range(args.warmup + args.rounds):
            if dist.is_initialized():
                dist.barrier()
            laps = w.step(number)
            steps.append(distributed.gather_objects({phase: seconds for phase, seconds, _ in laps}))
        steps = steps[args.warmup :]
        exchange = exchange_seconds(w)
        size = sum(p.nbytes for p in w.policy.trainable.values())
        slowest = [
            max(steps_of_ranks, key=lambda phases: sum(phases.values())) for steps_of_ranks in steps
        ]
        found = dict(
            num_processes=ranks.world_size,
            device=device_name(ranks.device),
            seconds=statistics.median(sum(p.values()) for p in slowest),
            rounds=[[sum(p.values()) for p in of_ranks] for of_ranks in steps],
            phases={phase: statistics.median(p[phase] for p in slowest) for phase in slowest[0]},
            exchange_seconds=exchange,
            exchanged_gigabytes=size / 1e9,
        )
        return found if ranks.is_main else None
    finally:
        distributed.close()


def exchange_seconds(w: work.Work) -> float:
    """Median seconds of `average_gradients` on gradients of every trainable."""
    parameters, times = list(w.policy.trainable.values()), []
    for _ in range(EXCHANGES + 1):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if dist.is_initialized():
            dist.barrier()
        synchronize(w.ranks.device)
        start = time.perf_counter()
        distributed.average_gradients(parameters)
        synchronize(w.ranks.device)
        times.append(time.perf_counter() - start)
    assert all((parameter.grad == 1).all() for parameter in parameters), "the mean of ones"
    return statistics.median(times[1:])


def show(found):
    print(
        f"{'processes':>9} {'step s':>8} {'efficiency':>10} {'update s':>9} {'exchange s':>10}   "
        f"{found['runs'][0]['exchanged_gigabytes']:.2f} GB exchanged"
    )
    for run in found["runs"]:
        count = run["num_processes"]
        print(
            f"{count:>9} {run['seconds']:>8.3f} {found['efficiency'][count]:>10.1%} {run['phases']['update']:>9.3f} "
            f"{run['exchange_seconds']:>10.4f}"
        )
    first, last = found["runs"][0]["phases"], found["runs"][-1]["phases"]
    slower = Counter({phase: last[phase] - first[phase] for phase in first}).most_common(3)
    print(
        "what gets slower from the fewest to the most, s: "
        + ", ".join(f"{phase} {seconds:+.3f}" for phase, seconds in slower)
    )


def add_arguments(parser):
    parser.add_argument(
        "--num_processes",
        type=int,
        nargs="+",
        help="numbers of processes, one after the other; default 1, 2, 4, 8 as far "
        "as there are GPUs",
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps; the median counts")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument(
        "--worker", action="store_true", help="used by the command itself, for each process"
    )
    work.add_arguments(parser)
