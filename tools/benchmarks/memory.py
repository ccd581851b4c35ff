"""Peak GPU memory of each phase of a whole step, against what a run holds anyway.

The goal: at most 1.6 times the bytes of the frozen base in bf16 and of one float32 copy of the
trainables with Adam's two states and the two banks of teacher and reference. For comparison, what
three copies of the model would hold.
"""

from dataclasses import dataclass

import torch

from rl_train.config import COUNT, flag
from rl_train.distributed import Ranks
from rl_train.parts import GIB, standing_memory
from tools.benchmarks import work
from tools.benchmarks.common import device_name

GOAL = 1.6


@dataclass(frozen=True, kw_only=True)
class Options(work.Options):
    """the step"""

    rounds: int = flag(2, "steps after the first", type=COUNT)


def measure(options: Options) -> dict:
    """GiB: {"standing": by part, "first", "later": peaks by phase, "peak", "base", ..; "ratio"}."""
    w = work.build(options, Ranks(0, 1, torch.device(options.device)))
    standing, trains = standing_memory(w.policy), w.policy.trainable
    trainable, frozen = standing["trainable weights"], standing["frozen base"]
    base = sum(p.numel() for n, p in w.policy.model.named_parameters() if n not in trains)
    first, *later = w.run(1 + options.rounds)  # the first also fuses weights and captures graphs
    of_later = {p: max(clock.peaks.get(p, 0.0) for clock in later) for p in first.seconds}
    measured = dict(
        device=device_name(options.device),
        flags=w.parts.flags,
        standing={part: size / GIB for part, size in standing.items()},
        first={phase: first.peaks.get(phase, 0.0) for phase in first.seconds},
        later=of_later,
        peak=max(of_later.values()),
        base=(2 * base + 5 * trainable) / GIB,
        three_copies=three_copies(frozen, trainable) / GIB,
        reserved=torch.cuda.max_memory_reserved() / GIB if w.policy.device.type == "cuda" else 0.0,
    )
    measured["ratio"] = measured["peak"] / measured["base"]
    show(measured)
    return measured


def three_copies(frozen: int, trainable: int) -> int:
    """Bytes of policy, teacher and reference as three models, with gradients and Adam states."""
    return 3 * (frozen + trainable) + 3 * trainable


def show(measured):
    held = ", ".join(f"{part} {size:.2f}" for part, size in measured["standing"].items())
    print(f"GiB; held whatever the batch: {held}")
    print(f"{'phase':12} {'first step':>10} {'later':>8}")
    for phase, peak in measured["later"].items():
        print(f"{phase:12} {measured['first'][phase]:>10.2f} {peak:>8.2f}")
    print(
        f"{'peak':12} {max(measured['first'].values()):>10.2f} {measured['peak']:>8.2f}; reserved "
        f"from the device {measured['reserved']:.2f}"
    )
    print(
        f"bf16 base + 5 float32 sets of the trainables: {measured['base']:.2f}; the peak is "
        f"{measured['ratio']:.2f} times that (goal {GOAL}); three copies of the model, their "
        f"optimizer and gradients alone: {measured['three_copies']:.2f}"
    )
