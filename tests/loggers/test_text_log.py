"""train.log: what is printed, once, in order, and never cut."""

import pytest

from rl_train.distributed.process_group import print0
from rl_train.loggers.text_log import FILE, TextLog
from rl_train.utils.io import CannotWrite
from tests.checkpoint.test_disk import files_of_at_most


def test_lines_from_before_the_folder_is_known_come_first(tmp_path, capsys):
    with TextLog() as log:
        print0("device")
        log.open(tmp_path)
        print0("step 1")
        assert (tmp_path / FILE).read_text().endswith("\nstep 1\n")  # at once
    print0("after it")
    header, *lines = (tmp_path / FILE).read_text().splitlines()
    assert header.startswith("-- 20") and lines == ["device", "step 1"]
    assert capsys.readouterr().out == "device\nstep 1\nafter it\n"


def test_a_resumed_run_appends(tmp_path):
    for text in ("first", "second"):
        with TextLog() as log:
            log.open(tmp_path)
            print0(text)
    lines = (tmp_path / FILE).read_text().splitlines()
    assert lines[1::2] == ["first", "second"] and lines[2].startswith("-- 20")


def test_what_ends_the_run_is_written(tmp_path):
    with pytest.raises(SystemExit), TextLog() as log:
        log.open(tmp_path)
        raise SystemExit("rl_train: out of memory")
    assert (tmp_path / FILE).read_text().endswith("\nrl_train: out of memory\n")
    with pytest.raises(ZeroDivisionError), TextLog() as log:
        log.open(tmp_path)
        1 / 0
    lines = (tmp_path / FILE).read_text().splitlines()
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with TextLog():
        print0("device")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_and_does_not_hide_what_ended_the_run(tmp_path):
    with pytest.raises(CannotWrite, match=f"{FILE} cannot be written: .*File too large"):
        with TextLog() as log, files_of_at_most(200):
            log.open(tmp_path)
            for _ in range(100):
                print0("a line of a step")
    with pytest.raises(SystemExit, match="the sentence"), TextLog() as log:
        log.open(tmp_path)
        with files_of_at_most(1):
            log.pending += ["a line"] * 10_000
            with pytest.raises(CannotWrite):
                log.write("more")
            raise SystemExit("the sentence")
