"""Weak scaling: the same step on each of 1, 2, 4 .. processes of this host, one a GPU.

One process runs alone, as the launcher starts it; several under torchrun (gloo without a GPU). A
step is as long as its slowest rank.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rl_train import distributed
from rl_train.config import COUNT, flag
from tools.benchmarks import common, work

# What a torchrun around this would hand down.
ALONE = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HANDED_DOWN = ("rounds", "warmup", "sizes", "prompt_length", "answer_tokens", "device")


@dataclass(frozen=True, kw_only=True)
class Options(work.Options):
    """the step"""

    num_processes: tuple[int, ...] = flag(
        (),
        "one after the other; default 1, 2, 4, 8, as far as there are GPUs",
        type=COUNT,
        nargs="+",
    )
    worker: bool = flag(False, "used by the command itself, for each process")


def measure(options: Options) -> dict | None:
    """{"runs": those of `measure_rank`, "efficiency": {processes: the fewest's time / theirs}}."""
    if options.worker:
        return measure_rank(options)
    at_most = max(1, torch.cuda.device_count())
    counts = options.num_processes or [n for n in (1, 2, 4, 8) if n <= at_most]
    runs = [launch(options, count) for count in counts]
    alone = runs[0]["seconds"]
    efficiency = {run["num_processes"]: alone / run["seconds"] for run in runs}
    measured = dict(runs=runs, efficiency=efficiency)
    show(measured)
    return measured


def launch(options: Options, count: int) -> dict:
    """The figures of `count` processes, started anew."""
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    environment = {name: value for name, value in os.environ.items() if name not in ALONE}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "scale.json"
        command = [sys.executable, *(runner if count > 1 else [])]
        command += ["-m", "tools.benchmark", "scale", "--worker", "--output", str(output)]
        for name in HANDED_DOWN:
            command += [f"--{name}", str(getattr(options, name))]
        subprocess.run(
            [*command, "--flags", *options.flags],
            check=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        return json.loads(output.read_text())


def measure_rank(options: Options) -> dict | None:
    """On the first rank: seconds of a step by the slowest rank, and of the exchange; else None."""
    ranks = distributed.init()
    try:
        w = work.build(options, ranks)
        clocks = w.run(options.warmup + options.rounds)[options.warmup :]
        of_ranks = distributed.gather_objects([dict(clock.seconds) for clock in clocks])
        steps = list(zip(*of_ranks))  # of each step the phases of all ranks
        slowest = [max(step, key=lambda phases: sum(phases.values())) for step in steps]
        exchange = exchange_seconds(w, options)
        if not ranks.is_main:
            return None
        return dict(
            num_processes=ranks.world_size,
            device=common.device_name(ranks.device),
            seconds=statistics.median(sum(p.values()) for p in slowest),
            rounds=[[sum(phases.values()) for phases in step] for step in steps],
            phases={phase: statistics.median(p[phase] for p in slowest) for phase in slowest[0]},
            exchange_seconds=exchange,
            exchanged_gigabytes=sum(p.nbytes for p in w.policy.trainable.values()) / 1e9,
        )
    finally:
        distributed.close()


def exchange_seconds(w: work.Work, options: Options) -> float:
    """Median seconds in which the ranks add up as many numbers as the gradients are."""
    size = sum(p.numel() for p in w.policy.trainable.values())
    gradients = torch.zeros(size, device=w.policy.device)

    def exchange():
        if dist.is_initialized():
            dist.all_reduce(gradients)

    return common.seconds(exchange, options)


def show(measured):
    first, last = measured["runs"][0], measured["runs"][-1]
    print(
        f"{'processes':>9} {'step s':>8} {'efficiency':>10} {'update s':>9} {'exchange s':>10}   "
        f"{first['exchanged_gigabytes']:.2f} GB exchanged"
    )
    for run in measured["runs"]:
        count = run["num_processes"]
        print(
            f"{count:>9} {run['seconds']:>8.3f} {measured['efficiency'][count]:>10.1%} "
            f"{run['phases']['update']:>9.3f} {run['exchange_seconds']:>10.4f}"
        )
    slower = {phase: last["phases"][phase] - first["phases"][phase] for phase in first["phases"]}
    most = Counter(slower).most_common(3)
    print(
        "what gets slower from the fewest to the most, s: "
        + ", ".join(f"{phase} {seconds:+.3f}" for phase, seconds in most)
    )
