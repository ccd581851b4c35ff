"""TensorBoard's files: what TensorBoard reads of them, cut at a resume, and never a point twice."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard.summary import scalar

from rl_train.events import Events
from rl_train.files import CannotWrite


def read(folder, tag) -> list[tuple[int, float]]:
    """All points of a tag, also those that TensorBoard would take for void."""
    log = EventAccumulator(str(folder), {"scalars": 0}, purge_orphaned_data=False).Reload()
    return [(e.step, e.value) for e in log.Scalars(tag)]


def write(folder, start: int, steps, value: float):
    """A session that goes on from `start`; several may be in one second."""
    events = Events(folder, start)
    for step in steps:
        events.add([scalar("a", value), scalar("b", -value)], step)
    events.file.close()
    return events.file.path


def test_a_resumed_run_has_every_point_once(tmp_path):
    first = write(tmp_path, 0, range(6), 1.0)
    second = write(tmp_path, 3, (0, 3, 4, 5), 2.0)  # 0 and 3 are measured again
    assert first.name < second.name
    expected = [(step, 1.0 if step <= 3 else 2.0) for step in range(6)]
    assert read(tmp_path, "a") == expected and read(tmp_path, "b") == [(s, -v) for s, v in expected]
    write(tmp_path, 4, (5,), 3.0)
    assert read(tmp_path, "a") == [*expected[:5], (5, 3.0)]


def test_a_run_that_begins_anew_has_no_points(tmp_path):
    write(tmp_path, 0, (0, 1), 1.0)
    write(tmp_path, 0, (0,), 2.0)
    assert read(tmp_path, "a") == [(0, 2.0)] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("lost", [1, 10, 20])
def test_a_torn_record_is_cut_off(tmp_path, lost):
    path = write(tmp_path, 0, (0, 1, 2), 1.0)
    path.write_bytes(path.read_bytes()[:-lost])
    write(tmp_path, 2, (3,), 2.0)
    assert read(tmp_path, "a") == [(0, 1.0), (1, 1.0), (3, 2.0)]


def test_zeros_that_a_loss_of_power_left_are_cut_off(tmp_path):
    path = write(tmp_path, 0, (0, 1, 2), 1.0)
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(5000))
    write(tmp_path, 2, (), 2.0)
    assert path.read_bytes() == whole


def test_a_folder_that_is_gone_is_named(tmp_path):
    events = Events(tmp_path, 0)
    events.file.path.unlink()
    with pytest.raises(CannotWrite, match="tfevents.* cannot be written: No such file"):
        events.add([scalar("a", 1.0)], 1)
    events.file.close()
