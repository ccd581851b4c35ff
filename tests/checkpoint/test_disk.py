"""A failed write ends a run with one sentence, and its last checkpoint is whole."""

import errno
import fcntl
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest

from rl_train import train
from rl_train.checkpoint import save_load
from rl_train.checkpoint.record import RECORD, RunRecord, read_record
from rl_train.data import GraspAnyRegionDataset
from rl_train.data.errors import DamagedSample, DamagedSamples
from rl_train.rewards.judge import FailureWindow, JudgeFailed
from rl_train.utils import io
from rl_train.utils.io import CannotWrite, lock, wrap_write_errors, write_json
from tests.campaigns.kill_campaign import RUN, differences
from tests.runs import (
    ENVIRONMENT,
    ROOT,
    complaint_of,
    curve,
    flags,
    run,
    run_unmeasured,
    unmeasured,
)

one_core = pytest.fixture(autouse=True)(unmeasured)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return run_unmeasured(data, tmp_path_factory.mktemp("run") / "whole", **RUN)


@contextmanager
def files_of_at_most(size: int):
    """A context in which this process cannot make a file larger than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def before_update(monkeypatch, number: int, action):
    """Call `action` before a run's n-th update."""
    clip_gradients, calls = train.clip_gradients, []

    def called(*args):
        calls.append(args)
        if len(calls) == number:
            action()
        clip_gradients(*args)

    monkeypatch.setattr(train, "clip_gradients", called)


def test_a_step_that_finds_no_room(data, whole, tmp_path, monkeypatch):
    output, room = tmp_path / "run", files_of_at_most(200_000)
    with monkeypatch.context() as context:
        before_update(context, 3, room.__enter__)
        with pytest.raises(SystemExit) as stopped:
            run(data, output, **RUN | dict(save_steps=1))
        room.__exit__(None, None, None)
    assert re.fullmatch(
        rf"rl_train: {output}/\S+ cannot be written: .*File too large.*; the last "
        rf"whole checkpoint is {output}/checkpoint_step_2, --resume goes on from it",
        str(stopped.value),
    )
    run(data, output, resume="", **RUN)
    assert differences(whole, output) == []


def test_a_folder_that_is_removed_is_not_made_again(data, tmp_path, monkeypatch):
    output = tmp_path / "run"
    before_update(monkeypatch, 2, lambda: shutil.rmtree(output))
    with pytest.raises(SystemExit) as stopped:
        run(data, output, **RUN)
    assert re.fullmatch(
        rf"rl_train: {output}/\S+ cannot be written: .*No such file or directory.*; {output} holds "
        "no checkpoint yet, --resume auto begins anew",
        str(stopped.value),
    )
    assert not output.exists()


def test_what_is_appended_is_there_or_named(tmp_path):
    file = (tmp_path / "lines").open("ab")
    with files_of_at_most(10), pytest.raises(CannotWrite, match="lines cannot be written: .*File"):
        with wrap_write_errors(file.name):
            file.write(b"two\n" * 4)
            file.flush()
    file.close()


def test_json_is_replaced_whole_or_not(tmp_path):
    write_json(tmp_path / "a.json", [1])
    with files_of_at_most(10), pytest.raises(CannotWrite, match="a.json cannot be written: .*File"):
        write_json(tmp_path / "a.json", list(range(100)))
    assert (tmp_path / "a.json").read_text() == "[1]\n"
    with pytest.raises(CannotWrite, match="No such file"):
        write_json(tmp_path / "gone" / "evaluation" / "a.json", [1])


def test_one_run_in_a_folder(data, tmp_path):
    """Refused before anything is read; the lock goes with its process, however that ends."""
    (tmp_path / "config.json").write_text("{}")
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom rl_train.utils.io import lock\n"
        f"held = lock(Path({str(tmp_path)!r}))\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    how = dict(cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen([sys.executable, "-c", script], **how)
    assert other.stdout.readline() == "held\n"
    said = complaint_of(flags(data, tmp_path, resume="", **RUN))
    assert said == f"rl_train: --output_dir {tmp_path}: another run is writing into it"
    other.kill()
    other.communicate(timeout=60)
    lock(tmp_path).close()


def test_a_resume_from_an_earlier_checkpoint_takes_another_folder(data, tmp_path):
    """Else the later ones, and not what it computes, were what the next --resume goes on from."""
    output = run(data, tmp_path / "run", **RUN | dict(save_steps=1, save_total_limit=0))
    before = sorted(output.rglob("*"))
    argv = flags(data, output, resume=output / "checkpoint_step_1", **RUN | dict(save_steps=1))
    assert complaint_of(argv) == (
        f"rl_train: --resume: goes on from step 1, and --output_dir {output} holds "
        "checkpoint_step_4: give another --output_dir"
    )
    assert sorted(output.rglob("*")) == before


@pytest.mark.parametrize(
    "left, expected",
    [
        (
            [".checkpoint_best.ID.1.unfinished", ".checkpoint_best.ID.0.replaced"],
            ["checkpoint_best"],
        ),
        (["checkpoint_best", ".checkpoint_best.ID.0.replaced"], ["checkpoint_best"]),
        ([".checkpoint_step_3.ID.0.unfinished", "checkpoint_step_2"], ["checkpoint_step_2"]),
        (["checkpoint_step_1", "checkpoint_step_2"], ["checkpoint_step_2"]),
        # the user's
        (["checkpoint_best.old"], ["checkpoint_best.old"]),
        (["checkpoint_mine.tmp"], ["checkpoint_mine.tmp"]),
        ([".checkpoint_best.unfinished"], [".checkpoint_best.unfinished"]),
        ([".checkpoint_best.replaced"], [".checkpoint_best.replaced"]),
        ([".checkpoint_best.0badcafe.0.replaced"], [".checkpoint_best.0badcafe.0.replaced"]),
        (["checkpoint_step_0", "checkpoint_step_2"], ["checkpoint_step_0", "checkpoint_step_2"]),
        (["checkpoint_step_abc"], ["checkpoint_step_abc"]),
    ],
)
def test_what_a_kill_left_half_done_is_ended(tmp_path, left, expected):
    """Only checkpoints of the run are ended; checkpoint_step_0 is none of them."""
    own = ["checkpoint_step_1", "checkpoint_step_2", "checkpoint_step_3", "checkpoint_best"]
    record = RunRecord(folders=own)
    record.write(tmp_path)
    for name in left:
        (tmp_path / name.replace("ID", record.run_id) / "adapter").mkdir(parents=True)
    save_load.clean_output_dir(tmp_path, 2, total_limit=1)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != RECORD) == expected
    assert set(read_record(tmp_path).folders) == set(expected) & set(own)


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EBUSY])
def test_a_removal_that_fails_is_a_warning(data, whole, tmp_path, monkeypatch, capsys, number):
    """It fails on a network disk while somebody reads a file; the next resume removes it."""

    def fails(folder):
        raise OSError(number, os.strerror(number), str(folder))

    output = tmp_path / "run"
    with monkeypatch.context() as context:
        context.setattr(shutil, "rmtree", fails)
        run(data, output, **RUN | dict(save_steps=1))
        run(data, output, resume="", **RUN)
    said = capsys.readouterr().err
    assert f"{os.strerror(number)}: '{output}/.checkpoint_step_1." in said
    assert "the next --resume removes it" in said
    left = [path for path in output.iterdir() if path.name.endswith((".unfinished", ".replaced"))]
    assert len(left) >= 3
    run(data, output, resume="", **RUN)
    assert differences(whole, output) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_a_warning(tmp_path, monkeypatch, capsys, number):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(io, "_warned", set())
    monkeypatch.setattr(fcntl, "lockf", fails)
    for _ in range(2):
        lock(tmp_path).close()
    said = capsys.readouterr().err
    assert said.count(f"--output_dir {tmp_path} has no locks ({os.strerror(number)})") == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_disk_whose_folders_cannot_be_synced_is_a_warning(tmp_path, monkeypatch, capsys, number):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(io, "_warned", set())
    monkeypatch.setattr(os, "fsync", fsync)
    write_json(tmp_path / "a.json", [1])
    with save_load.replacing(tmp_path / "folder") as folder:
        (folder / "file").write_text("new")
    assert (tmp_path / "folder" / "file").read_text() == "new"
    assert capsys.readouterr().err.count(f"(fsync: {os.strerror(number)})") == 1


def test_another_fault_of_a_disk_still_ends_a_run(tmp_path, monkeypatch):
    def fails(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CannotWrite, match="a.json cannot be written: .*Input/output error"):
        write_json(tmp_path / "a.json", [1])


def test_the_judge_s_window_survives_a_resume():
    window, resumed = FailureWindow(0.2, 10), FailureWindow(0.2, 10)
    for _ in range(4):
        window.add(0.5, 2)
    resumed.load_state_dict(window.state_dict())
    with pytest.raises(JudgeFailed, match="3 of the last 10 captions"):
        resumed.add(1, 2)


def test_damaged_samples_survive_a_resume(data, tmp_path, monkeypatch, capsys):
    """They count on, and are not told of again."""
    read = GraspAnyRegionDataset.__getitem__

    def damaged(dataset, i):
        if i % 2 == 1 and len(dataset) > 30:
            raise DamagedSample(f"region{i}", "damaged image")
        return read(dataset, i)

    monkeypatch.setattr(GraspAnyRegionDataset, "__getitem__", damaged)
    how = RUN | dict(max_bad_fraction=1, batch_size=4)
    whole = run(data, tmp_path / "whole", **how | dict(save_total_limit=0))
    told = capsys.readouterr().out.count("left out, another sample in its place")
    counts = curve(whole, "data/damaged")
    assert 0 < counts[2] <= counts[4] == told
    before = whole / "checkpoint_step_2"
    output = run(data, tmp_path / "resumed", **how, resume=before)
    again = capsys.readouterr().out.count("left out, another sample in its place")
    assert curve(output, "data/damaged") == {step: counts[step] for step in (3, 4)}
    assert again == counts[4] - counts[2]
    kept = DamagedSamples(dict(kept=9, skipped={}), 1.0)
    kept.load_state_dict(save_load.read_state(before)["counters"]["damaged"])
    assert len(kept.names) == counts[2]
