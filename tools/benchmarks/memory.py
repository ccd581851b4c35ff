"""Peak GPU memory of each phase of a whole step, against what a run holds anyway.

The goal: at most 1.6 times the bytes of the frozen base in bf16 and of five float32 sets of the
trainables: themselves, Adam's two states, the banks of teacher and reference.
"""

from dataclasses import dataclass

import torch

from rl_train.config import COUNT, COUNT_OR_0, flag
from rl_train.parts import GIB, standing_memory
from tools.benchmarks import work
from tools.benchmarks.common import device_name, print_table

GOAL = 1.6


@dataclass(frozen=True, kw_only=True)
class Options(work.Options):
    """the step"""

    rounds: int = flag(2, "steps after the first", type=COUNT)
    warmup: int = flag(0, "steps between those", type=COUNT_OR_0)


def measure(options: Options) -> dict:
    """GiB: {"standing": by part, "first", "later": peaks by phase, "peak", "base", ..; "ratio"}."""
    w = work.build(options)
    standing, trains = standing_memory(w.policy), w.policy.trainable
    frozen = sum(p.numel() for n, p in w.policy.model.named_parameters() if n not in trains)
    base = 2 * frozen + 5 * standing["trainable weights"]
    first = w.step()  # also fuses weights and captures graphs
    clocks = w.run()
    later = {phase: max(c.peaks.get(phase, 0.0) for c in clocks) for phase in first.seconds}
    measured = dict(
        device=device_name(options.device),
        flags=w.config.flags,
        standing={part: size / GIB for part, size in standing.items()},
        first={phase: first.peaks.get(phase, 0.0) for phase in first.seconds},
        later=later,
        peak=max(later.values()),
        base=base / GIB,
        reserved=torch.cuda.max_memory_reserved() / GIB if w.policy.device.type == "cuda" else 0.0,
    )
    measured["ratio"] = measured["peak"] / measured["base"]
    held = ", ".join(f"{part} {size:.2f}" for part, size in measured["standing"].items())
    rows = {p: dict(first_step=measured["first"][p], later=later[p]) for p in later}
    print_table(f"GiB; held whatever the batch: {held}", dict(first_step=".2f", later=".2f"), rows)
    print(
        f"bf16 base + 5 float32 sets of the trainables: {measured['base']:.2f}; the peak is "
        f"{measured['ratio']:.2f} times that (goal {GOAL}); reserved from the device "
        f"{measured['reserved']:.2f}"
    )
    return measured
