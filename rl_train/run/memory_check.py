"""GPU memory: what a run holds at its start, and the sentence when there is none left."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

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


# When there is none left


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a GPU's memory is used up, by torch's error or that of a library."""
    words = str(error)
    by_library = "out of memory" in words or "ALLOC_FAILED" in words
    return isinstance(error, torch.OutOfMemoryError) or by_library


def out_of_memory_message(config: Config, ranks: Ranks, run: "Run | None" = None) -> str:
    """Return where memory ended, which flags to lower, and how to resume.

    Args:
        run: None while it is still being built.
    """
    phase, when = "calibration", "before the first step"
    if run is not None:
        phase, when = run.phase, f"in step {run.state.step + 1}, in {run.phase}"
    sentences = [
        f"out of GPU memory on rank {ranks.rank}, {when}",
        remedy(phase, config),
        resume_hint(config.run.output_dir),
    ]
    return "; ".join(sentences)


def remedy(phase: str, config: Config) -> str:
    """Return what to change to save memory in a phase; a run that has begun can resume with it."""
    has_begun = (Path(config.run.output_dir) / "config.json").is_file()
    lower, free = config.flags_with("lowers_memory_of"), config.flags_with("free_on_resume")
    flags = [f for f, phases in lower.items() if phase in phases and (f in free or not has_begun)]
    flags.sort(key=lambda flag: flag not in free)  # first those that change the run least
    words = f"lower {' or '.join(f'--{flag}' for flag in flags)}"
    if "batch_size" in flags:
        words += " (and raise --gradient_accumulation_steps)"
    if phase == "update" and not config.policy.gradient_checkpointing:
        words += ", or switch --gradient_checkpointing on"
    if phase == "calibration":
        words += ", or take a GPU with more memory if the model itself does not fit"
    return words
