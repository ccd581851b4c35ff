"""How a run ends that cannot go on: by one sentence and a status, what the user can mend.

Faults of the program itself keep their traceback.
"""

import sys
import traceback

from rl_train import checkpoint, memory
from rl_train.config import Config, DataConfig
from rl_train.curves import Unreadable
from rl_train.data import BadData
from rl_train.data.workers import WorkerFailed
from rl_train.distributed import Ranks, lost_rank, once_a_machine, print0
from rl_train.files import CannotWrite, DamagedFile
from rl_train.rewards.custom import BadReward
from rl_train.rewards.judge import JudgeFailed
from rl_train.stops import STATUS, Stopped
from rl_train.tasks.cycle_measures import NotMeasured


class Endings:
    """A context that turns a run's end into SystemExit with a sentence, or with STATUS.

    Attributes:
        parts: `parts.Parts` once the run has begun; before it, every ValueError is the user's
            input.
    """

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks, self.parts = config, ranks, None

    def __enter__(self):
        return self

    def __exit__(self, _, error: BaseException | None, traceback):
        if isinstance(error, Stopped):
            print0(f"rl_train: stopped by {error}; {self._how_to_go_on()}")
            raise SystemExit(STATUS) from error
        exhausted = isinstance(error, RuntimeError) and memory.is_exhaustion(error)
        how = None if exhausted else lost_rank(error)
        if how:  # status 1: the rank that it lost says why, with its own
            print(f"rl_train: rank {self.ranks.rank} has lost another rank: {how}", file=sys.stderr)
            raise SystemExit(1) from error
        if sentence := self._sentence(error):
            raise SystemExit(sentence) from error

    def _sentence(self, error: BaseException | None) -> str | int | None:
        """What SystemExit takes of an error that the user can mend, else None."""
        flags = self.config
        places = {
            JudgeFailed: f"--llm_judge_base_url {flags.reward.llm_judge_base_url}: ",
            BadData: f"{read_from(error, flags.data)}: ",
        }
        if isinstance(error, RuntimeError) and memory.is_exhaustion(error):
            return f"rl_train: {memory.sentence(error, flags, self.ranks, self.parts)}"
        if isinstance(error, CannotWrite):
            return f"rl_train: {error}; {self._how_to_go_on()}"
        if isinstance(error, FloatingPointError):
            steps = f"after {self.parts.state.step if self.parts else 0} steps"
            again = "and diverges again: a lower --learning_rate takes another --output_dir"
            return f"rl_train: {error}, {steps}; {self._how_to_go_on()}, {again}"
        if self.parts is None:
            asked = isinstance(error, ValueError)
            return once_a_machine(f"rl_train: {error}") if asked else None
        known = (DamagedFile, BadReward, NotMeasured, Unreadable, WorkerFailed, *places)
        if isinstance(error, known):
            sentence = str(error).splitlines()[-1]  # from a worker it comes with its traceback
            return f"rl_train: {places.get(type(error), '')}{sentence}"

    def _how_to_go_on(self) -> str:
        return checkpoint.how_to_go_on(self.config.run.output_dir)


def read_from(error: BaseException | None, data: DataConfig) -> str:
    """The flags of the data that was read when an error arose."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    held_out = "evaluate" in {frame.f_code.co_name for frame, _ in frames}
    if held_out and data.eval_data_dir:
        return f"--eval_data_dir {data.eval_data_dir}"
    return " and ".join([f"--data_dir {data.data_dir}", *(f"--mix {one}" for one in data.mix)])
