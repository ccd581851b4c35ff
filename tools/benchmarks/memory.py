"""Peak GPU memory of each phase of a whole step, against what a run holds anyway.

The goal: at most 1.6 times (Qwen2.5-VL: 1.7) the bytes of the frozen base in bf16 and of the
float32 sets of the trainables: themselves, Adam's two states, the banks of teacher and reference,
of which Qwen2.5-VL has no teacher.

With --worst of the step that a run tries before its first: the longest that its flags allow.
"""

from dataclasses import dataclass

import torch

from rl_train import cli
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
class Options(work.Options):
    """the step"""

    worst: bool = flag(
        False, "the worst step that --flags allow, in place of one of forced lengths"
    )
    rounds: int = flag(2, "steps whose peaks count", type=COUNT)
    warmup: int = flag(1, "steps before them: they also capture graphs", type=COUNT_OR_0)


def base_bytes(w: work.Work) -> int:
    """Bytes of the frozen base in bf16, and of what the trainables need beside gradients."""
    banks, trains = w.state.roles.banks, w.policy.trainable
    frozen = sum(p.numel() for n, p in w.policy.model.named_parameters() if n not in trains)
    sets = 1 + 2 + len(banks)  # themselves, Adam's two states, the copies of other roles
    return 2 * frozen + sets * standing_memory(w.policy, banks)["trainable weights"]


def measure(options: Options) -> dict:
    """GiB: {"standing": by part, "later": peaks by phase, "peak", "base", ..; "ratio"}."""
    if options.worst:
        return measure_worst(options)
    w = work.build(options)
    standing, base = standing_memory(w.policy, w.state.roles.banks), base_bytes(w)
    clocks = w.run()
    later = {p: max(clock.peaks.get(p, 0.0) for clock in clocks) for p in clocks[0].seconds}
    measured = dict(
        device=device_name(options.device),
        flags=w.config.flags,
        standing={part: size / GIB for part, size in standing.items()},
        later=later,
        peak=max(later.values()),
        base=base / GIB,
        reserved=torch.cuda.max_memory_reserved() / GIB if w.policy.device.type == "cuda" else 0.0,
    )
    measured["ratio"] = measured["peak"] / measured["base"]
    rows = {phase: dict(peak=peak) for phase, peak in later.items()}
    print_table(dict(peak=".2f"), rows, unit="GiB", **measured["standing"])
    goal = POINTS_GOAL if options.sizes in SHAPES else GOAL
    print(f"{measured['reserved']:.2f} reserved; peak {measured['ratio']:.2f} x base (goal {goal})")
    return measured


def measure_worst(options: Options) -> dict:
    """GiB: {"standing": by part, "worst": peaks by phase, "peak"; "reserved"}."""
    config = cli.parse([*work.given(options), *options.flags])
    state = work.random_state(config, options)
    ranks = Ranks(0, 1, torch.device(options.device))
    worst = worst_step(Parts(config, config.flags, ranks, state, *[None] * 6, max_steps=1), train)
    reserved = torch.cuda.max_memory_reserved() if ranks.device.type == "cuda" else 0
    standing = standing_memory(state.policy, state.roles.banks)
    measured = dict(
        device=device_name(options.device),
        flags=config.flags,
        standing={part: size / GIB for part, size in standing.items()},
        worst=worst,
        peak=max(worst.values()),
        reserved=reserved / GIB,
    )
    rows = {phase: dict(peak=peak) for phase, peak in worst.items()}
    print_table(dict(peak=".2f"), rows, unit="GiB", **measured["standing"])
    print(f"{measured['peak']:.2f} at most, {measured['reserved']:.2f} reserved")
    return measured
