"""Record of what a run has written into its output folder, and of its data.

Only folders that are in the record are replaced or removed, and the names of unfinished ones hold
the run's id. Everything else in an output folder belongs to the user and stays as it is.
"""

import re
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rl_train.utils.io import DamagedFile, read_json, write_json

RECORD = ".rl_train_record.json"
CHECKPOINT_NAME = re.compile(r"checkpoint_step_(0|[1-9][0-9]*)")
BEST_CHECKPOINT = "checkpoint_best"
FINAL_MODEL = "final_model"  # written at the end of a run from the last checkpoint

# {"training", "evaluation"}: facts of these samples, see `rl_train.data.digest`
DataFacts = dict[str, dict[str, int | str]]


@dataclass
class RunRecord:
    """Record of the files that a run has written.

    Attributes:
        run_id: part of the names of its unfinished folders.
        folders: names of its checkpoints and of its exported model.
        num_ranks: the most ranks that it had, each of which writes a file of rollouts.
        data: that it was last trained and measured on.
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    folders: list[str] = field(default_factory=list)
    num_ranks: int = 1
    data: DataFacts = field(default_factory=dict)

    def write(self, output_dir: Path):
        """Write the record into an output folder. Raises CannotWrite."""
        write_json(output_dir / RECORD, asdict(self), indent=2)


def read_record(output_dir: Path) -> RunRecord | None:
    """Return the record of a run's output folder, None if there is none. Raises DamagedFile."""
    file = output_dir / RECORD
    if not file.is_file():
        return None
    try:
        return RunRecord(**read_json(file))
    except TypeError as error:
        raise DamagedFile(file, error) from error


def adopt(output_dir: Path) -> RunRecord:
    """Return the record of a run that an earlier version, which kept none, began."""
    folders = [
        path.name
        for path in sorted(output_dir.iterdir())
        if (path / "config.json").is_file()
        and (CHECKPOINT_NAME.fullmatch(path.name) or path.name in (BEST_CHECKPOINT, FINAL_MODEL))
    ]
    num_ranks = 1
    while (output_dir / "rollouts" / f"rank{num_ranks}.jsonl").is_file():
        num_ranks += 1
    return RunRecord(folders=folders, num_ranks=num_ranks)


def find_in_the_way(output_dir: Path, with_checkpoints: bool) -> str | None:
    """Return the name of something that a new run would write over, or None.

    Args:
        with_checkpoints: False if the run may go on from a checkpoint_step_N in the folder.
    """
    patterns = [
        "rollouts/rank*.jsonl",
        "evaluation/step_*.json",
        "train.log",
        "wandb.json",
        "starts.json",
    ]
    patterns += [BEST_CHECKPOINT, FINAL_MODEL]
    paths = [path for pattern in patterns for path in sorted(output_dir.glob(pattern))]
    in_the_way = [
        path
        for path in paths
        if path.suffix != ".jsonl" or path.stem.removeprefix("rank").isdecimal()
    ]
    if with_checkpoints:
        in_the_way += [p for p in output_dir.glob("*") if CHECKPOINT_NAME.fullmatch(p.name)]
    return in_the_way[0].relative_to(output_dir).as_posix() if in_the_way else None
