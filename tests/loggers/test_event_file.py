"""TensorBoard's files of a run that is resumed: TensorBoard shows every point once."""

from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_train.cli import check_output_dir
from rl_train.distributed.process_group import RankInfo
from rl_train.loggers.tensorboard import RunLogger
from rl_train.utils.io import CannotWrite
from tests.checkpoint.test_disk import files_of_at_most


def read(folder, tag) -> list[tuple[int, float]]:
    """The points of a tag that TensorBoard shows."""
    log = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0}).Reload()
    return [(e.step, e.value) for e in log.Scalars(tag)]


def open_log(folder, start: int) -> RunLogger:
    return RunLogger(folder, RankInfo(0, 1, torch.device("cpu")), start)


def write(folder, start: int, steps, value: float):
    """A session that goes on from `start`; returns its file."""
    before = set((folder / "tensorboard").glob("*"))
    log = open_log(folder, start)
    for step in steps:
        log.scalars({"a": value, "b": -value}, step)
    log.close()
    (path,) = set((folder / "tensorboard").glob("*")) - before
    # Sessions of one second are not in order by name, as those of processes one after the other.
    return path.rename(path.with_name(f"events.out.tfevents.{len(before):010d}"))


def test_a_resumed_run_has_every_point_once(tmp_path):
    write(tmp_path, 0, range(6), 1.0)
    write(tmp_path, 3, (0, 4, 5), 2.0)  # 0 is measured again
    expected = [(step, 1.0 if step <= 3 else 2.0) for step in range(6)]
    assert read(tmp_path, "a") == expected and read(tmp_path, "b") == [(s, -v) for s, v in expected]
    write(tmp_path, 4, (5,), 3.0)
    assert read(tmp_path, "a") == [*expected[:5], (5, 3.0)]


def test_a_run_that_begins_anew_shows_no_earlier_points(tmp_path):
    write(tmp_path, 0, (0, 1), 1.0)
    write(tmp_path, 0, (0,), 2.0)
    assert read(tmp_path, "a") == [(0, 2.0)]


@pytest.mark.parametrize("lost", [1, 10, 20])
def test_a_torn_record_is_not_read(tmp_path, lost):
    path = write(tmp_path, 0, (0, 1, 2), 1.0)
    path.write_bytes(path.read_bytes()[:-lost])
    write(tmp_path, 2, (3,), 2.0)
    assert read(tmp_path, "b") == [(0, -1.0), (1, -1.0), (3, -2.0)]


def test_zeros_that_a_loss_of_power_left_are_not_read(tmp_path):
    path = write(tmp_path, 0, (0, 1, 2), 1.0)
    path.write_bytes(path.read_bytes() + bytes(5000))
    write(tmp_path, 2, (3,), 2.0)
    assert read(tmp_path, "a") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


def test_files_of_the_user_stay_as_they_are(tmp_path):
    """A copied file and one that is no event file neither change nor stop a resume."""
    path = write(tmp_path, 0, (0, 1, 2), 1.0)
    lines = tmp_path / "rollouts"
    lines.mkdir()
    kept = {
        path: path.read_bytes(),
        path.with_name("events.out.tfevents.backup"): b"no record",
        lines / "rank0_old.jsonl": b"no line of a run",
    }
    for file, content in kept.items():
        file.write_bytes(content)
    write(tmp_path, 1, (2,), 2.0)
    write(tmp_path, 0, (0,), 3.0)
    assert {file: file.read_bytes() for file in kept} == kept


def test_rollouts_without_their_run_are_not_written_over(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "rank0.jsonl").write_text("{}\n")
    config = SimpleNamespace(run=SimpleNamespace(output_dir=str(tmp_path), resume=None))
    with pytest.raises(
        ValueError, match="--output_dir .* holds rollouts/rank0.jsonl and no config.json of a run"
    ):
        check_output_dir(config, {})


def test_points_are_in_the_file_at_once(tmp_path):
    log = open_log(tmp_path, 0)
    log.scalars({"a": 1.0}, 1)
    assert read(tmp_path, "a") == [(1, 1.0)]
    log.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_is_named(tmp_path):
    log = open_log(tmp_path, 0)
    with pytest.raises(CannotWrite, match="tensorboard cannot be written: .*File too large"):
        with files_of_at_most(100):
            for step in range(100):
                log.scalars({"a": 1.0}, step)
    with pytest.raises(CannotWrite, match="tensorboard cannot be written: .*File too large"):
        log.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(CannotWrite, match="tensorboard cannot be written: .*File exists"):
        open_log(tmp_path, 0)
