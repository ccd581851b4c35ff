"""Weak scaling: the same step on each of 1, 2, 4 .. processes of this host, one a GPU.

One process runs alone, as the launcher starts it; several under torchrun (gloo without a GPU). A
step is as long as its slowest rank. Ranks wait for each other twice: before the update, when they
first meet, and in it, for gradients; the fraction of a step that passes in the first of these is
`waiting`, what the second costs is the update's time beside that of one process.

`steps` has the phases of each round and rank, `gc_seconds` the garbage collection in them; of the
slowest round it is printed which phase of which rank is late.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

from rl_train.config.flags import COUNT, flag
from rl_train.distributed import process_group
from tools.benchmarks import common, workload
from tools.benchmarks.roofline import step_floor
from tools.benchmarks.step import summary

# What a torchrun around this would hand down.
ALONE = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LIMIT_SECONDS = 3600  # most that the processes of one count may take
COLUMNS = dict(seconds=".3f", spread=".1%", efficiency=".1%", ratio_to_floor=".2f", update=".3f")
COLUMNS |= dict(
    exchange_seconds=".4f", waiting=".1%", peak_gib=".1f", warmup_rounds="d", settled=""
)


@dataclass(frozen=True, kw_only=True)
class Step(common.Ceilings, workload.Options):
    """the step"""

    rounds: int = flag(15, "steps, whose median counts", type=COUNT)


@dataclass(frozen=True, kw_only=True)
class Options(Step):
    """the step"""

    num_processes: tuple = flag(
        (), "one after the other; default 1, 2, 4, 8 while there are GPUs", type=COUNT
    )
    worker: bool = flag(False, "used by the command itself, for each process")


def measure(options: Options) -> dict | None:
    """Return {"runs": `measure_rank`, "efficiency": {processes: the fewest's time / theirs}}."""
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
    rows["floor"] = dict(seconds=runs[0]["floor"])
    common.print_table(
        COLUMNS,
        rows,
        gigabytes_exchanged=runs[0]["exchanged_gigabytes"],
        medians_of=options.rounds,
    )
    for run in runs:
        late = late_phase(run["steps"])
        paused = run["gc_seconds"][late["round"]][late["rank"]][late["phase"]]
        print(
            f"{run['num_processes']} processes, slowest round {late['seconds']:.3f} s: "
            f"{late['phase']} of rank {late['rank']} {late['late']:+.3f} s beside its median, "
            f"garbage collection {paused:.3f} s"
        )
    return dict(shapes=options.shapes, runs=runs, efficiency=efficiency)


def handed_down(options: Options) -> list[str]:
    """Return the flags that each process gets: those of the step."""
    step_flags = {f.name: getattr(options, f.name) for f in fields(Step)}
    flags, last = [], ["--flags", *step_flags.pop("flags")]
    for name, value in step_flags.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if values and value is not None:  # else as by default
            flags += [f"--{name}", *map(str, values)]
    return flags + last


def launch(options: Options, count: int) -> dict:
    """Start `count` processes and return their figures."""
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    # Else the new processes would join the group of a torchrun around this one.
    environment = {n: v for n, v in os.environ.items() if n not in ALONE} | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "scale.json"
        command = [sys.executable, *(runner if count > 1 else [])]
        command += ["-m", "tools.benchmarks.__main__", "scale", "--worker", "--output", str(output)]
        command += handed_down(options)
        subprocess.run(
            command,
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_SECONDS,
        )
        return json.loads(output.read_text())


def measure_rank(options: Options) -> dict | None:
    """Return a step's seconds by the slowest rank, and the exchange's; None but on rank 0."""
    ranks = process_group.init()
    try:
        matmul, bandwidth, ceilings = common.ceilings(options)
        w = workload.build(options, ranks)
        with w.garbage:
            clocks, warmth = w.run()
        phases = [dict(clock.seconds) for clock in clocks]
        of_ranks = process_group.gather_objects((phases, w.pauses[-len(clocks) :]))
        # Of each step the phases of all ranks.
        steps, pauses = (list(zip(*values)) for values in zip(*of_ranks))
        # Ranks meet in every step, so it is as long as its slowest rank.
        slowest = [max(step, key=lambda phases: sum(phases.values())) for step in steps]
        # As many float32 numbers as DDP reduces, in one call.
        gradients = torch.cat([torch.zeros_like(p).flatten() for p in w.policy.trainable.values()])
        exchange = dist.all_reduce if dist.is_initialized() else torch.Tensor.zero_
        exchanged = common.timing(lambda: exchange(gradients), options)
        floor = sum(step_floor(w, matmul, bandwidth).values())
        process_group.gather_objects(None)
        if not ranks.is_main:
            return None
        summarised = summary(slowest)
        return dict(
            num_processes=ranks.world_size,
            seconds=summarised["total"],
            spread=summarised["spread"],
            floor=floor,
            ratio_to_floor=summarised["total"] / floor,
            waiting=waiting(steps),
            peak_gib=w.peak,
            # GiB on the first rank
            peaks={p: max(c.peaks.get(p, 0.0) for c in clocks) for p in clocks[0].seconds},
            # {phase: seconds} of each rank of each round
            steps=steps,
            gc_seconds=pauses,
            phases=summarised["phases"],
            exchange_seconds=exchanged.seconds,
            exchange_settled=exchanged.settled,
            exchanged_gigabytes=gradients.nbytes / 1e9,
            **vars(warmth),
            **ceilings,
        )
    finally:
        process_group.close()


def late_phase(steps: Sequence[Sequence[dict[str, float]]]) -> dict:
    """Return what is late in the slowest round: {round, seconds, rank, phase, late}.

    `late` are a phase's seconds beyond its median on that rank. It is the first phase with at least
    half of the most: in later ones the other ranks wait for it.

    Args:
        steps: see `waiting`.
    """
    totals = [max(sum(phases.values()) for phases in step) for step in steps]
    number = totals.index(max(totals))
    late = {
        (phase, rank): seconds - statistics.median(step[rank][phase] for step in steps)
        for phase in steps[number][0]
        for rank, seconds in enumerate(phases[phase] for phases in steps[number])
    }
    most = max(late.values())
    phase, rank = next(key for key, value in late.items() if value >= min(most, most / 2))
    return dict(
        round=number, seconds=totals[number], rank=rank, phase=phase, late=late[phase, rank]
    )


def waiting(steps: list[tuple[dict[str, float], ...]]) -> float:
    """Return the fraction of a step that ranks wait for the last one to come to the update.

    Args:
        steps: of each the {phase: seconds} of all ranks, which begin together.
    """
    waited = total = 0.0
    for step in steps:
        arrivals = [sum(phases.values()) - phases["update"] for phases in step]
        waited += max(arrivals) - statistics.mean(arrivals)
        total += max(sum(phases.values()) for phases in step)
    return waited / total
