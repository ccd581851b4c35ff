"""Peak GPU memory of each phase of a whole step, against what a run holds anyway.

The goal: at most 1.6 times (Qwen2.5-VL: 1.7) the bytes of the frozen base in bf16 and of the
float32 sets of the trainables: themselves, Adam's two states, the banks of teacher and reference,
of which Qwen2.5-VL has no teacher.

With --worst of the step that a run tries before its first: the longest that its flags allow.
"""

from dataclasses import dataclass

import torch

from rl_train import cli
from rl_train.checkpoint import RunState
from rl_train.distributed import Ranks
from rl_train.flags import COUNT, COUNT_OR_0, flag
from rl_train.memory import GIB, standing_memory, worst_step
from rl_train.parts import Parts
from rl_train.train import train
from tools.benchmarks import work
from tools.benchmarks.common import device_name, print_table
from tools.benchmarks.qwen import SHAPES

GOAL, POINTS_GOAL = 1.6, 1.7


@dataclass(frozen=True, kw_only=True)
class Announced(work.Options):
    """the step"""

    announce: bool = flag(
        True, "on a GPU: first try the worst step, as a run does, and compare its peak"
    )


@dataclass(frozen=True, kw_only=True)
class Options(Announced):
    """the step"""

    worst: bool = flag(
        False, "the worst step that --flags allow, in place of one of forced lengths"
    )
    rounds: int = flag(2, "steps whose peaks count", type=COUNT)
    warmup: int = flag(1, "steps before them, at most: they capture graphs", type=COUNT_OR_0)


def base_bytes(state: RunState) -> int:
    """Bytes of the frozen base in bf16, and of what the trainables need beside gradients."""
    policy, banks = state.policy, state.roles.banks
    named = policy.model.named_parameters()
    frozen = sum(p.numel() for name, p in named if name not in policy.trainable)
    sets = 1 + 2 + len(banks)  # themselves, Adam's two states, the copies of other roles
    return 2 * frozen + sets * standing_memory(policy, banks)["trainable weights"]


def measure(options: Options) -> dict:
    """GiB: {"standing": by part, "later": peaks by phase, "peak", "base", ..; "ratio"}."""
    if options.worst:
        return measure_worst(options)
    w = work.build(options)
    standing, base = standing_memory(w.policy, w.state.roles.banks), base_bytes(w.state)
    at_most = announced(w)
    clocks, _ = w.run()
    later = {p: max(clock.peaks.get(p, 0.0) for clock in clocks) for p in clocks[0].seconds}
    measured = dict(
        device=device_name(options.device),
        shapes=options.shapes,
        flags=w.config.flags,
        standing={part: size / GIB for part, size in standing.items()},
        later=later,
        peak=max(later.values()),
        base=base / GIB,
        reserved=torch.cuda.max_memory_reserved() / GIB if w.policy.device.type == "cuda" else 0.0,
    )
    measured["ratio"] = measured["peak"] / measured["base"]
    print_peaks(later, measured)
    goal = POINTS_GOAL if options.sizes in SHAPES else GOAL
    print(f"{measured['reserved']:.2f} reserved; peak {measured['ratio']:.2f} x base (goal {goal})")
    return measured | exceeded(at_most, w.peak)


def print_peaks(peaks: dict[str, float], measured: dict):
    """Print the peak of each phase, and how many times base and states it is."""
    base = measured["base"]
    rows = {
        p: {"peak": peak, "x base": peak / base} for p, peak in (peaks | dict(base=base)).items()
    }
    columns = {"peak": ".2f", "x base": ".2f"}
    print_table(columns, rows, unit="GiB", **measured["standing"])


def announced(w: work.Work) -> float | None:
    """GiB that a run of these flags announces before its first step; None where it does not."""
    if not w.options.announce or w.policy.device.type != "cuda":
        return None
    return max(worst_peaks(w.config, w.ranks, w.state).values())


def worst_peaks(config, ranks: Ranks, state) -> dict[str, float]:
    """{phase: GiB} of the worst step that the flags allow, as a run tries it."""
    return worst_step(Parts(config, config.flags, ranks, state, *[None] * 6, max_steps=1), train)


def exceeded(at_most: float | None, peak: float) -> dict:
    """{"announced_gib", "within_announced"}, printed; empty if nothing was announced."""
    if at_most is None:
        return {}
    within = peak <= at_most
    holds = "holds" if within else "DOES NOT HOLD"
    print(f"no step exceeds what the start announced: {holds} ({peak:.2f} of {at_most:.2f} GiB)")
    return dict(announced_gib=at_most, within_announced=within)


def measure_worst(options: Options) -> dict:
    """GiB: {"standing": by part, "worst": peaks by phase, "peak"; "reserved"}."""
    config = cli.parse([*work.given(options), *options.flags])
    ranks = Ranks(0, 1, torch.device(options.device))
    work.hold_to(options.budget_gib, ranks.device)
    state = work.random_state(config, options)
    worst = worst_peaks(config, ranks, state)
    reserved = torch.cuda.max_memory_reserved() if ranks.device.type == "cuda" else 0
    standing = standing_memory(state.policy, state.roles.banks)
    measured = dict(
        device=device_name(options.device),
        flags=config.flags,
        standing={part: size / GIB for part, size in standing.items()},
        worst=worst,
        peak=max(worst.values()),
        base=base_bytes(state) / GIB,
        reserved=reserved / GIB,
    )
    print_peaks(worst, measured)
    print(f"{measured['peak']:.2f} at most, {measured['reserved']:.2f} reserved")
    return measured
