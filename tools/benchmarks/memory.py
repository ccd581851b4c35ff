"""Peak GPU memory of each phase of a whole step, against what a run holds anyway and what three copies of the model would.

The goal: at most 1.6 times the bytes of the frozen base in bf16 and of one float32 copy of the trainables with Adam's two states and the
two banks of teacher and reference.
"""

import torch

from rl_train.distributed import Ranks
from rl_train.parts import standing_memory
from tools.benchmarks import work
from tools.benchmarks.common import device_name

GOAL = 1.6
GIB = 2**30


def measure(args) -> dict:
    """GiB: {"standing": by part, "first", "later": peaks by phase, "peak", "reserved", "base", "three_copies"}; "ratio" = peak / base."""
    w = work.build(args, Ranks(0, 1, torch.device(args.device)))
    standing = standing_memory(w.policy)
    trainable, frozen = standing["trainable weights"], standing["frozen base"]
    base = (
        2
        * sum(
            p.numel() for n, p in w.policy.model.named_parameters() if n not in w.policy.trainable
        )
        + 5 * trainable
    )
    laps = [
        w.step(number) for number in range(1 + args.rounds)
    ]  # the first also fuses weights and captures graphs
    first, later = (
        {
            phase: max(lap[2] for step in steps for lap in step if lap[0] == phase) / GIB
            for phase, _, _ in laps[0]
        }
        for steps in (laps[:1], laps[1:])
    )
    found = dict(
        device=device_name(args.device),
        flags=vars(w.args),
        standing={part: size / GIB for part, size in standing.items()},
        first=first,
        later=later,
        peak=max(later.values()),
        base=base / GIB,
        three_copies=three_copies(frozen, trainable) / GIB,
        reserved=torch.cuda.max_memory_reserved() / GIB if w.ranks.device.type == "cuda" else 0.0,
    )
    found["ratio"] = found["peak"] / found["base"]
    show(found)
    return found


def three_copies(frozen: int, trainable: int) -> int:
    """Bytes of policy, teacher and reference as models of their own, with the policy's gradients and Adam states."""
    return 3 * (frozen + trainable) + 3 * trainable


def show(found):
    print(
        "GiB; held whatever the batch: "
        + ", ".join(f"{part} {size:.2f}" for part, size in found["standing"].items())
    )
    print(f"{'phase':12} {'first step':>10} {'later':>8}")
    for phase, peak in found["later"].items():
        print(f"{phase:12} {found['first'][phase]:>10.2f} {peak:>8.2f}")
    print(
        f"{'peak':12} {max(found['first'].values()):>10.2f} {found['peak']:>8.2f}; reserved from the device {found['reserved']:.2f}"
    )
    print(
        f"bf16 base + 5 float32 sets of the trainables: {found['base']:.2f}; the peak is {found['ratio']:.2f} times that (goal {GOAL}); "
        f"three copies of the model, their optimizer and gradients alone: {found['three_copies']:.2f}"
    )


def add_arguments(parser):
    parser.add_argument("--rounds", type=int, default=2, help="steps after the first")
    work.add_arguments(parser)
