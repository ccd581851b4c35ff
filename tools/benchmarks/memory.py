"""Peak GPU memory of each phase of a whole step, against what a run holds anyway.

The goal: at most 1.6 times (Qwen2.5-VL: 1.7) the bytes of the frozen base in bf16 and of the
float32 sets of the trainables: themselves, Adam's two states, the banks of teacher and reference,
of which Qwen2.5-VL has no teacher.
"""

from dataclasses import dataclass

import torch

from rl_train.checkpoint.save_load import RunState
from rl_train.config.flags import COUNT, COUNT_OR_0, flag
from rl_train.run.memory_estimate import GIB, standing_memory
from tools.benchmarks import workload
from tools.benchmarks.common import device_name, print_table
from tools.benchmarks.qwen import SHAPES

GOAL, POINTS_GOAL = 1.6, 1.7


@dataclass(frozen=True, kw_only=True)
class Options(workload.Options):
    """the step"""

    rounds: int = flag(2, "steps whose peaks count", type=COUNT)
    warmup: int = flag(1, "steps before them, at most: they capture graphs", type=COUNT_OR_0)


def base_bytes(state: RunState) -> int:
    """Count bytes of the frozen base in bf16, or as quantised, and of trainables but gradients."""
    policy, banks = state.policy, state.roles.copies
    frozen = 0
    for name, parameter in policy.model.named_parameters():
        if name not in policy.trainable:
            packed = not parameter.is_floating_point()
            frozen += parameter.nbytes if packed else 2 * parameter.numel()
    sets = 1 + 2 + len(banks)  # themselves, Adam's two states, the copies of other roles
    return frozen + sets * standing_memory(policy, banks)["trainable weights"]


def measure(options: Options) -> dict:
    """Return GiB as {"standing": by part, "later": peaks by phase, "peak", "base", .., "ratio"}."""
    w = workload.build(options)
    standing = standing_memory(w.policy, w.state.roles.copies, w.config.optim.low_memory)
    base = base_bytes(w.state)
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
    return measured


def print_peaks(peaks: dict[str, float], measured: dict):
    """Print the peak of each phase, and how many times base and states it is."""
    base = measured["base"]
    rows = {
        p: {"peak": peak, "x base": peak / base} for p, peak in (peaks | dict(base=base)).items()
    }
    columns = {"peak": ".2f", "x base": ".2f"}
    print_table(columns, rows, unit="GiB", **measured["standing"])
