"""One whole step, from batch to EMA, by the training's own calls, and in TRL's way.

Random weights at published shapes and forced lengths: see `tools.benchmarks.workload` and
`tools.benchmarks.trl_style`. Of Sa2VA both loops: loop 2's teacher reads its questions in the phase
ask2 and writes its captions in rollout1, together with those of loop 1; METEOR, which runs on the
CPU, is in teacher2. Of Qwen2.5-VL its points: SAM2, which draws the masks, is in teacher1. Data
loading and logging are not in it.

`--alternatives trl` measures both on the same shapes. A step of the 4B in TRL's way takes over 20 s
on an H200: transformers' `generate` launches thousands of kernels a token, and every sequence is
scored with its prompt. So that the comparison ends in about two minutes, TRL's way is warmed up by
one step and timed by one; the ratio is that step to the median of ours.
`--alternative_rounds 5 --alternative_warmup 3` measures more.
"""

import gc
import statistics
from dataclasses import dataclass, replace

from rl_train.config.flags import COUNT, COUNT_OR_0, flag
from rl_train.run.memory_estimate import GIB
from tools.benchmarks import common, workload
from tools.benchmarks.memory import base_bytes
from tools.benchmarks.roofline import step_floor
from tools.benchmarks.trl_style import build_trl_style

WAYS = {"ours": workload.build, "trl": build_trl_style}
LOOP = ("rollout", "old", "reference", "ask")
PHASES = ["encode", *(f"{phase}{loop}" for loop in (2, 1) for phase in LOOP)]
PHASES += ["teacher1", "teacher2", "update"]


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
    matmul, bandwidth, ceilings = common.ceilings(options)
    others = options.alternative_rounds
    as_others = replace(options, rounds=others, warmup=options.alternative_warmup)
    measured = ceilings | dict(
        shapes=options.shapes, rounds=options.rounds, alternative_rounds=others
    )
    for name in ("ours", *options.alternatives):
        w = WAYS[name](options if name == "ours" else as_others)
        clocks, warmth = w.run()
        measured[name] = summary([clock.seconds for clock in clocks]) | vars(warmth)
        peak = max(peak for clock in clocks for peak in (0.0, *clock.peaks.values()))
        base = base_bytes(w.state) / GIB
        measured[name] |= dict(peak_gib=peak, base_gib=base, peak_ratio=peak / base)
        measured[name] |= dict(wasted_tokens=w.wasted())
        phases = ", ".join(f"{p} {s:.3f}" for p, s in measured[name]["phases"].items())
        print(f"{name}: {measured[name]['total']:.3f} s a step, {warmth}: {phases}", flush=True)
        print(f"{name}: peak {peak:.2f} GiB, {peak / base:.2f} x base {base:.2f}", flush=True)
        if name == "ours":
            measured["flags"] = w.config.flags
            measured["floor"] = summary([step_floor(w, matmul, bandwidth)])
            wasted = ", ".join(f"{phase} {wasted:.1%}" for phase, wasted in w.wasted().items())
            print(f"{name}: decoded and no answer's: {wasted}", flush=True)
        del w  # each way has a model of its own, of the same weights
        gc.collect()
    ours = measured["ours"]["total"]
    measured["ratios"] = {name: measured[name]["total"] / ours for name in options.alternatives}
    measured["ratio_to_floor"] = ours / measured["floor"]["total"]
    ways = ["ours", *options.alternatives, "floor"]
    seen = [phase for phase in PHASES if any(phase in measured[way]["phases"] for way in ways)]
    phases_of = {way: measured[way]["phases"] | dict(step=measured[way]["total"]) for way in ways}
    rows = {phase: {way: phases_of[way].get(phase) for way in ways} for phase in [*seen, "step"]}
    for row in rows.values():
        row["ours / floor"] = row["ours"] / row["floor"] if row["ours"] and row["floor"] else None
    medians_of = dict(ours=options.rounds) | dict.fromkeys(options.alternatives, others)
    columns = dict.fromkeys(ways, ".3f") | {"ours / floor": ".2f"}
    common.print_table(columns, rows, **ceilings, medians_of=medians_of)
    for name, ratio in measured["ratios"].items():
        print(f"{ratio:8.1f} times faster than {name}")
    print(f"{measured['ratio_to_floor']:8.2f} times the floor")
    return measured


def summary(phases: list[dict[str, float]]) -> dict:
    """Return medians by phase, "totals" of each step, "total", their median, and "spread".

    The spread is that of the totals, the longest less the shortest, relative to the median.
    """
    totals = [sum(seconds.values()) for seconds in phases]
    medians = {name: statistics.median(seconds[name] for seconds in phases) for name in phases[0]}
    total = statistics.median(totals)
    spread = (max(totals) - min(totals)) / total
    return dict(phases=medians, totals=totals, total=total, spread=spread)
