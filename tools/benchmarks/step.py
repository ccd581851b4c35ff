"""One whole step, from batch to EMA, by the training's own calls, and in TRL's way.

Random weights at published shapes and forced lengths: see `tools.benchmarks.workload` and
`tools.benchmarks.trl_style`. Of Sa2VA both loops: loop 2's teacher reads its questions in the phase
ask2 and writes its captions in rollout1, together with those of loop 1, whose teacher finds masks
in ask1; METEOR, which the CPU computes meanwhile, is in teacher2. Of Qwen2.5-VL its points: SAM2,
which draws the masks, is in teacher1. Data loading and logging are not in it.

`--alternatives trl` measures both on the same shapes, in turns: each step in TRL's way has steps of
ours before and behind it, by whose median it is divided. A step of the 4B in TRL's way takes over
20 s on an H200: transformers' `generate` launches thousands of kernels a token, and every sequence
is scored with its prompt. So that the comparison ends in about two minutes, TRL's way is warmed up
by one step and timed by one. `--alternative_rounds 5 --alternative_warmup 3` measures more.

The ceilings, by which the floor is computed, are measured before the steps, and again behind them:
the drifts are the last by the first.
"""

import gc
import statistics
from dataclasses import dataclass, replace

import torch

from rl_train.config.flags import COUNT, COUNT_OR_0, flag
from rl_train.run.memory_estimate import GIB
from tools.benchmarks import common, workload
from tools.benchmarks.memory import base_bytes
from tools.benchmarks.roofline import step_floor
from tools.benchmarks.trl_style import build_trl_style

WAYS = {"ours": workload.build, "trl": build_trl_style}
LOOP = ("rollout", "old", "reference", "ask")
PHASES = ["encode", *(f"{phase}{loop}" for loop in (2, 1) for phase in LOOP)]
PHASES += ["teacher2", "teacher1", "update"]


@dataclass(frozen=True, kw_only=True)
class Options(common.Ceilings, workload.Options):
    """the step"""

    alternatives: tuple = flag((), "what to measure beside ours", choices=["trl"], nargs="*")
    alternative_rounds: int = flag(
        1,
        "of these, on the same shapes: fewer than ours, since one of the 4B takes over 20 s; with "
        "1 their spread is not known",
        type=COUNT,
    )
    alternative_warmup: int = flag(
        1, "rounds before those, at most: they compile nothing, so few are enough", type=COUNT_OR_0
    )


def measure(options: Options) -> dict:
    """Return {"ours", alternatives: seconds by phase and in all; "floor"; "ratios" to ours, ..}."""
    if options.alternatives and options.budget_gib:
        raise ValueError("--budget_gib: not with --alternatives, whose models are there together")
    matmul, bandwidth, ceilings = common.ceilings(options)
    names, works, warmths = ("ours", *options.alternatives), {}, {}
    others = replace(options, rounds=options.alternative_rounds, warmup=options.alternative_warmup)
    for name in names:  # each has a model of its own, of the same weights
        works[name] = WAYS[name](options if name == "ours" else others)
        warmths[name] = works[name].warm_up()
    clocks, ratios = in_turns(works, options)
    bases = {name: base_bytes(work.state) / GIB for name, work in works.items()}
    wasted = {name: work.wasted() for name, work in works.items()}
    measured = dict(shapes=options.shapes, flags=works["ours"].config.flags, ratios=ratios)
    measured["floor"] = summary([step_floor(works["ours"], matmul, bandwidth)])
    standing = free(works, options.device)
    ceilings |= common.drifts(ceilings, common.ceilings(options)[2])
    measured |= ceilings
    for name in names:
        of_way = summary([clock.seconds for clock in clocks[name]]) | vars(warmths[name])
        peak = max(peak for clock in clocks[name] for peak in (0.0, *clock.peaks.values()))
        peak -= sum(gib for other, gib in standing.items() if other != name)
        base = bases[name]
        of_way |= dict(peak_gib=peak, base_gib=base, peak_ratio=peak / base)
        measured[name] = of_way | dict(wasted_tokens=wasted[name])
        phases = ", ".join(f"{p} {s:.3f}" for p, s in of_way["phases"].items())
        print(f"{name}: {of_way['total']:.3f} s a step, {warmths[name]}: {phases}", flush=True)
        print(f"{name}: peak {peak:.2f} GiB, {peak / base:.2f} x base {base:.2f}", flush=True)
    parts = ", ".join(f"{phase} {part:.1%}" for phase, part in wasted["ours"].items())
    print(f"ours: decoded and no answer's: {parts}", flush=True)
    totals, floor = measured["ours"]["totals"], measured["floor"]["total"]
    measured["ratio_to_floor"] = measured["ours"]["total"] / floor
    ways = [*names, "floor"]
    seen = [phase for phase in PHASES if any(phase in measured[way]["phases"] for way in ways)]
    phases_of = {way: measured[way]["phases"] | dict(step=measured[way]["total"]) for way in ways}
    rows = {phase: {way: phases_of[way].get(phase) for way in ways} for phase in [*seen, "step"]}
    for row in rows.values():
        row["ours / floor"] = row["ours"] / row["floor"] if row["ours"] and row["floor"] else None
    medians_of = {name: len(clocks[name]) for name in names}
    columns = dict.fromkeys(ways, ".3f") | {"ours / floor": ".2f"}
    common.print_table(columns, rows, **ceilings, medians_of=medians_of)
    for name, times in ratios.items():
        print(f"{times['ratio']:8.1f} times faster than {name}{spread_of(times)}")
    extremes = dict(lowest=min(totals) / floor, highest=max(totals) / floor)
    print(f"{measured['ratio_to_floor']:8.2f} times the floor{spread_of(extremes)}")
    return measured


def free(works: dict, device: str) -> dict[str, float]:
    """Empty `works`, and lift the limit of memory; return the GiB that each freed on a GPU."""
    freed, is_cuda = {}, torch.device(device).type == "cuda"
    for name in list(works):
        gc.collect()
        allocated = torch.cuda.memory_allocated(device) if is_cuda else 0
        del works[name]
        gc.collect()
        freed[name] = (allocated - torch.cuda.memory_allocated(device)) / GIB if is_cuda else 0.0
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, torch.device(device).index)
    return freed


def in_turns(works: dict, options: Options) -> tuple[dict, dict]:
    """Return ({way: clocks of its steps}, {alternative: its steps' ratios to ours}).

    Steps of ours, at least `rounds` in all, are before, between and behind the alternatives'.
    """
    alternatives = [name for name in works if name != "ours"]
    num_rounds = options.alternative_rounds if alternatives else 0
    steps_between = -(-options.rounds // (num_rounds + 1))
    clocks = {name: [] for name in works}
    for number in range(num_rounds + 1):
        clocks["ours"] += [works["ours"].step() for _ in range(steps_between)]
        for name in alternatives if number < num_rounds else ():
            clocks[name].append(works[name].step())
    totals = {name: [sum(c.seconds.values()) for c in of_way] for name, of_way in clocks.items()}
    # Of each alternative step the steps of ours before and behind it.
    neighbours = [
        statistics.median(totals["ours"][number * steps_between : (number + 2) * steps_between])
        for number in range(num_rounds)
    ]
    return clocks, {name: common.ratios(totals[name], neighbours) for name in alternatives}


def spread_of(extremes: dict[str, float]) -> str:
    """Return words for the lowest and the highest of a ratio."""
    return f" ({extremes['lowest']:.2f} to {extremes['highest']:.2f})"


def summary(phases: list[dict[str, float]]) -> dict:
    """Return medians by phase, "totals" of each step, "total", their median, and "spread".

    The spread is that of the totals, the longest less the shortest, relative to the median.
    """
    totals = [sum(seconds.values()) for seconds in phases]
    medians = {name: statistics.median(seconds[name] for seconds in phases) for name in phases[0]}
    total = statistics.median(totals)
    spread = (max(totals) - min(totals)) / total
    return dict(phases=medians, totals=totals, total=total, spread=spread)
