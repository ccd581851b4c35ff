"""How a run ends that cannot go on: by one sentence and a status, what the user can mend.

Faults of the program itself keep their traceback.
"""

import sys
from types import TracebackType

from rl_train.checkpoint import save_load
from rl_train.config.grpo_config import Config
from rl_train.distributed.process_group import Ranks, lost_rank, only_local_rank0, print0
from rl_train.run import memory_check
from rl_train.run.signals import EXIT_INTERRUPTED, Interrupted
from rl_train.utils.io import CannotWrite, UserFault


class ErrorReporter:
    """A context that turns a run's end into SystemExit with a sentence, or with STATUS.

    Attributes:
        parts: `run.build.Parts` once the run has begun; before it, every ValueError is the user's
            input.
    """

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks, self.parts = config, ranks, None

    def __enter__(self):
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ):
        if isinstance(error, Interrupted):
            print0(f"rl_train: stopped by {error}; {self._how_to_go_on()}")
            raise SystemExit(EXIT_INTERRUPTED) from error
        if sentence := self._sentence(error):
            raise SystemExit(sentence) from error
        if how := lost_rank(error):  # status 1: the rank that it lost says why, with its own
            print(f"rl_train: rank {self.ranks.rank} has lost another rank: {how}", file=sys.stderr)
            raise SystemExit(1) from error

    def _sentence(self, error: BaseException | None) -> str | int | None:
        """What SystemExit takes of an error that the user can mend, else None."""
        if isinstance(error, RuntimeError) and memory_check.is_out_of_memory(error):
            message = memory_check.out_of_memory_message(self.config, self.ranks, self.parts)
            return f"rl_train: {message}"
        if isinstance(error, CannotWrite):
            return f"rl_train: {error}; {self._how_to_go_on()}"
        if isinstance(error, FloatingPointError):
            steps = f"after {self.parts.state.step if self.parts else 0} steps"
            again = "and diverges again: a lower --learning_rate takes another --output_dir"
            return f"rl_train: {error}, {steps}; {self._how_to_go_on()}, {again}"
        if self.parts is None:
            asked = isinstance(error, ValueError)
            return only_local_rank0(f"rl_train: {error}") if asked else None
        if isinstance(error, UserFault):
            return f"rl_train: {str(error).splitlines()[-1]}"  # a worker's has its traceback above
        return None

    def _how_to_go_on(self) -> str:
        return save_load.resume_hint(self.config.run.output_dir)
