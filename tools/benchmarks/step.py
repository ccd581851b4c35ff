"""One whole step of both loops, from batch to EMA, by the training's own code, and by others on the same model object.

Random weights at Sa2VA-4B's shapes and forced lengths: see `tools.benchmarks.work` and `tools.benchmarks.alternatives`. Data loading and
logging are not in it; METEOR, which runs on the CPU, is, in the phase teacher2.
"""

import statistics
from collections import Counter
from contextlib import nullcontext

import torch

from rl_train.distributed import Ranks
from tools.benchmarks import alternatives, work
from tools.benchmarks.common import copy_bandwidth, device_name, matmul_rate
from tools.benchmarks.floor import step_floor

NAMES = {
    "naive": "(a) naive loop",
    "trl": "(b) TRL-style",
    "static": "(c) generate, static + compile",
}


def measure(args) -> dict:
    """{"ours", the chosen alternatives: seconds by phase and in all, peak memory; "floor"; "ratios" to ours; "ratio_to_floor"}."""
    ceilings = dict(matmul=matmul_rate(args), bandwidth=copy_bandwidth(args))
    w = work.build(args, Ranks(0, 1, torch.device(args.device)))
    found = dict(
        device=device_name(args.device),
        matmul_tflops=ceilings["matmul"] / 1e12,
        bandwidth_tb_per_second=ceilings["bandwidth"] / 1e12,
        flags=vars(w.args),
        rounds=args.rounds,
        floor=summary([step_floor(w, **ceilings)]),
    )
    ways = {
        "ours": nullcontext,
        "naive": lambda: alternatives.naive(w, args.naive_samples),
        "trl": lambda: alternatives.trl(w, args.trl_logits == "all"),
        "static": lambda: alternatives.static(w),
    }
    steps = iter(range(10**6))  # each its own random numbers
    for name in ["ours", *args.alternatives]:
        found[name] = rounds(w, ways[name], args.rounds, args.warmup, steps)
    if "naive" in found:
        found["naive"]["teacher_samples_measured"] = args.naive_samples
    if "static" in found:
        found["static"]["compiled"] = hasattr(
            w.policy.model.language_model, "_compiled_call"
        )  # transformers does it on a GPU
    found["ratios"] = {
        name: found[name]["total"] / found["ours"]["total"] for name in args.alternatives
    }
    found["ratio_to_floor"] = found["ours"]["total"] / found["floor"]["total"]
    show(found, args)
    return found


def rounds(w: work.Work, way, num_rounds: int, num_warmup: int, steps) -> dict:
    """Medians over `num_rounds` steps after `num_warmup` that do not count."""
    phases, peaks = [], Counter()
    for number in range(num_warmup + num_rounds):
        with way() as extra:
            laps = w.step(next(steps))
        if number >= num_warmup:
            phases.append(Counter({phase: seconds for phase, seconds, _ in laps}))
            phases[-1].update(extra or {})
            peaks |= Counter({phase: peak for phase, _, peak in laps})
    return summary(phases) | dict(
        totals=[sum(p.values()) for p in phases],
        peak_gib={phase: peak / 2**30 for phase, peak in peaks.items()},
    )


def summary(phases: list[dict[str, float]]) -> dict:
    """{"phases": median seconds of each, "total": median of the sums}."""
    return dict(
        phases={phase: statistics.median(p[phase] for p in phases) for phase in phases[0]},
        total=statistics.median(sum(p.values()) for p in phases),
    )


def show(found, args):
    ways = ["ours", *args.alternatives, "floor"]
    print(
        f"{found['device']}: matrix product {found['matmul_tflops']:.0f} TFLOP/s, copy {found['bandwidth_tb_per_second']:.2f} TB/s; "
        f"seconds, medians of {args.rounds}"
    )
    print(f"{'phase':12}" + "".join(f"{way:>10}" for way in ways))
    phases = [
        "encode",
        *(
            f"{phase}{loop}"
            for loop in (1, 2)
            for phase in ("rollout", "teacher", "old", "reference")
        ),
        "update",
    ]
    assert {phase for way in ways for phase in found[way]["phases"]} <= set(phases), (
        "a phase of the step is not in the table"
    )
    for phase in phases:
        cells = [found[way]["phases"].get(phase) for way in ways]
        if any(cell is not None for cell in cells):
            print(
                f"{phase:12}"
                + "".join(f"{'-' if cell is None else format(cell, '.3f'):>10}" for cell in cells)
            )
    print(f"{'step':12}" + "".join(f"{found[way]['total']:>10.3f}" for way in ways))
    for name in args.alternatives:
        measured = (
            f", the teacher measured on {args.naive_samples} samples a loop and scaled"
            if name == "naive"
            else ""
        )
        measured += (
            ", which was not compiled"
            if name == "static" and not found["static"]["compiled"]
            else ""
        )
        print(f"{found['ratios'][name]:8.1f} times faster than {NAMES[name]}{measured}")
    print(f"{found['ratio_to_floor']:8.2f} times the floor")


def add_arguments(parser):
    parser.add_argument(
        "--alternatives",
        nargs="*",
        choices=list(NAMES),
        default=["naive", "trl"],
        help="what to measure beside this project's step; static compiles for minutes",
    )
    parser.add_argument(
        "--naive_samples",
        type=int,
        default=2,
        help="of the naive loop's teacher, in each loop; scaled to all",
    )
    parser.add_argument(
        "--trl_logits",
        choices=("completion", "all"),
        default="completion",
        help="of TRL's forwards; all = for models "
        "without logits_to_keep, as the published Sa2VA code",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="of this project's step and of each alternative; the median counts",
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps of each before its rounds")
    parser.add_argument(
        "--matmul_size",
        type=int,
        default=8192,
        help="side of the square matrices whose product is the ceiling",
    )
    parser.add_argument(
        "--copy_mib", type=int, default=4096, help="size of the copy that measures the bandwidth"
    )
    work.add_arguments(parser)
