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
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rl_train import distributed
from rl_train.flags import COUNT, flag
from tools.benchmarks import common, work

# What a torchrun around this would hand down.
ALONE = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
COLUMNS = dict(seconds=".3f", efficiency=".1%", update=".3f", exchange_seconds=".4f")
HANDED_DOWN = ("rounds", "warmup", "sizes", "prompt_length", "answer_tokens", "device")


@dataclass(frozen=True, kw_only=True)
class Options(work.Options):
    """the step"""

    num_processes: tuple = flag(
        (), "one after the other; default 1, 2, 4, 8 while there are GPUs", type=COUNT, nargs="+"
    )
    worker: bool = flag(False, "used by the command itself, for each process")


def measure(options: Options) -> dict | None:
    """{"runs": those of `measure_rank`, "efficiency": {processes: the fewest's time / theirs}}."""
    if options.worker:
        return measure_rank(options)
    at_most = max(1, torch.cuda.device_count())
    counts = options.num_processes or [n for n in (1, 2, 4, 8) if n <= at_most]
    runs = [launch(options, count) for count in counts]
    efficiency = {run["num_processes"]: runs[0]["seconds"] / run["seconds"] for run in runs}
    rows = {}
    for run in runs:
        count = run["num_processes"]
        rows[f"{count} processes"] = run["phases"] | run | dict(efficiency=efficiency[count])
    common.print_table(COLUMNS, rows, gigabytes_exchanged=runs[0]["exchanged_gigabytes"])
    return dict(runs=runs, efficiency=efficiency)


def launch(options: Options, count: int) -> dict:
    """The figures of `count` processes, started anew."""
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    environment = {n: v for n, v in os.environ.items() if n not in ALONE} | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "scale.json"
        command = [sys.executable, *(runner if count > 1 else [])]
        command += ["-m", "tools.benchmark", "scale", "--worker", "--output", str(output)]
        for name in HANDED_DOWN:
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--flags", *options.flags]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def measure_rank(options: Options) -> dict | None:
    """On the first rank: seconds of a step by the slowest rank, and of the exchange; else None."""
    ranks = distributed.init()
    try:
        w = work.build(options, ranks)
        of_ranks = distributed.gather_objects([dict(clock.seconds) for clock in w.run()])
        steps = list(zip(*of_ranks))  # of each step the phases of all ranks
        slowest = [max(step, key=lambda phases: sum(phases.values())) for step in steps]
        gradients = torch.cat([torch.zeros_like(p).flatten() for p in w.policy.trainable.values()])
        exchange = dist.all_reduce if dist.is_initialized() else torch.Tensor.zero_
        exchange_seconds = common.seconds(lambda: exchange(gradients), options)
        if not ranks.is_main:
            return None
        return dict(
            num_processes=ranks.world_size,
            device=common.device_name(ranks.device),
            seconds=statistics.median(sum(p.values()) for p in slowest),
            rounds=[[sum(phases.values()) for phases in step] for step in steps],
            phases={phase: statistics.median(p[phase] for p in slowest) for phase in slowest[0]},
            exchange_seconds=exchange_seconds,
            exchanged_gigabytes=gradients.nbytes / 1e9,
        )
    finally:
        distributed.close()
