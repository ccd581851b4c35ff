"""Report of what ends a run: one sentence and an exit status for what the user can mend.

Faults of the program itself keep their traceback.
"""

import sys
import traceback
from pathlib import Path
from types import TracebackType

from rl_train.checkpoint.save_load import resume_hint
from rl_train.config.grpo_config import Config
from rl_train.distributed.process_group import RankInfo, lost_rank, only_local_rank0, print0
from rl_train.run.build import Run
from rl_train.run.signals import EXIT_INTERRUPTED, Interrupted
from rl_train.utils.io import CannotWrite, UserFault


class ErrorReporter:
    """A context that turns an error that the user can mend into SystemExit with a sentence.

    Attributes:
        run: the run once it has begun; before that, every ValueError is the user's input.
    """

    def __init__(self, config: Config, ranks: RankInfo):
        self.config, self.ranks = config, ranks
        self.run: Run | None = None

    def __enter__(self):
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ):
        if isinstance(error, SystemExit):
            raise SystemExit(f"rl_train: {exit_sentence(error)}") from error
        if isinstance(error, Interrupted):
            print0(f"rl_train: stopped by {error}; {resume_hint(self.config.run.output_dir)}")
            raise SystemExit(EXIT_INTERRUPTED) from error
        if exit_value := self._exit_value(error):
            raise SystemExit(exit_value) from error
        if reason := lost_rank(error):  # status 1: the lost rank reports its own error and status
            print(
                f"rl_train: rank {self.ranks.rank} has lost another rank: {reason}", file=sys.stderr
            )
            raise SystemExit(1) from error

    def _exit_value(self, error: BaseException | None) -> str | int | None:
        """Return the argument of SystemExit for an error that the user can mend, else None."""
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            return f"rl_train: {out_of_memory_message(self.config, self.ranks, self.run)}"
        if isinstance(error, CannotWrite):
            return f"rl_train: {error}; {resume_hint(self.config.run.output_dir)}"
        if isinstance(error, FloatingPointError):
            num_steps = self.run.state.step if self.run else 0
            return (
                f"rl_train: {error}, after {num_steps} steps; "
                f"{resume_hint(self.config.run.output_dir)}, and diverges again: a lower "
                "--learning_rate takes another --output_dir"
            )
        if self.run is None and isinstance(error, ValueError):
            return only_local_rank0(f"rl_train: {error}")
        if isinstance(error, UserFault):
            return f"rl_train: {str(error).splitlines()[-1]}"  # a worker's has its traceback above
        return None


def exit_sentence(error: SystemExit) -> str:
    """Return where code has asked Python to exit: a run ends at its last step alone."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if "_sitebuiltins" not in frame.filename][-1]
    return (
        f"{place.filename}, line {place.lineno}, in {place.name}: sys.exit({error.code!r}) would "
        "end an unfinished run as if it were done; raise an exception there, or return a value"
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch or of a library says that a GPU's memory is used up."""
    message = str(error)  # OutOfMemoryError's own says "out of memory" too
    return "out of memory" in message or "ALLOC_FAILED" in message


def out_of_memory_message(config: Config, ranks: RankInfo, run: Run | None = None) -> str:
    """Return where memory ended, which flags to lower, and how to resume.

    Args:
        run: None while it is still being built.
    """
    phase, when = "calibration", "before the first step"
    if run is not None:
        phase = run.phases.phase
        when = f"in step {run.state.step + 1}, in {phase}"
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
