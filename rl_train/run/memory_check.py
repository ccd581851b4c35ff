"""GPU memory: bytes that a run holds at its start, and the message when there is none left."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rl_train.checkpoint.save_load import resume_hint
from rl_train.config.grpo_config import Config
from rl_train.distributed.process_group import Ranks
from rl_train.roles import COPIES

if TYPE_CHECKING:
    from rl_train.policies.base import Policy
    from rl_train.run.build import Run

GIB = 2**30


def standing_memory(policy: "Policy", copies: Iterable[str] = COPIES) -> dict[str, int]:
    """Return {part: bytes} that a run holds on each GPU at any batch size."""
    weights = sum(parameter.nbytes for parameter in policy.trainable.values())
    base = sum(parameter.nbytes for parameter in policy.model.parameters()) - weights
    trained = {"trainable weights": 1} | ({" and ".join(copies): len(copies)} if copies else {})
    trained |= {"optimizer": 2, "gradients": 1}
    return {"frozen base": base} | {part: n * weights for part, n in trained.items()}


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch or of a library says that a GPU's memory is used up."""
    message = str(error)  # OutOfMemoryError's own says "out of memory" too
    return "out of memory" in message or "ALLOC_FAILED" in message


def out_of_memory_message(config: Config, ranks: Ranks, run: "Run | None" = None) -> str:
    """Return where memory ended, which flags to lower, and how to resume.

    Args:
        run: None while it is still being built.
    """
    phase, when = "calibration", "before the first step"
    if run is not None:
        phase, when = run.phase, f"in step {run.state.step + 1}, in {run.phase}"
    return (
        f"out of GPU memory on rank {ranks.rank}, {when}; {remedy(phase, config)}; "
        f"{resume_hint(config.run.output_dir)}"
    )


def remedy(phase: str, config: Config) -> str:
    """Return what to change to save memory in a phase; a run that has begun can resume with it."""
    has_begun = (Path(config.run.output_dir) / "config.json").is_file()
    phases_of_flag = config.flags_with("lowers_memory_of")
    free_on_resume = config.flags_with("free_on_resume")
    flags = [
        flag
        for flag, phases in phases_of_flag.items()
        if phase in phases and (flag in free_on_resume or not has_begun)
    ]
    flags.sort(key=lambda flag: flag not in free_on_resume)  # first those that change the run least
    advice = f"lower {' or '.join(f'--{flag}' for flag in flags)}"
    if "batch_size" in flags:
        advice += " (and raise --gradient_accumulation_steps)"
    return advice
