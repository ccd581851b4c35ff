"""tools/benchmarks/compare_revisions.py: a worker process per tree, runs in turns, an interval."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tools.benchmarks import compare_revisions
from tools.benchmarks.compare_revisions import Comparison, Worker, median_interval

ROOT = Path(__file__).parents[3]


def test_figures_of_pairs():
    comparison = Comparison("step", a=[1.0, 2.0, 4.0], b=[1.1, 2.0, 3.6], peak_gib=(3.0, 2.0))
    figures = comparison.figures()
    assert (figures["median_a"], figures["median_b"]) == (2.0, 2.0)
    assert figures["ratio"] == 1.0 and figures["peak_gib"] == (3.0, 2.0)
    assert figures["interval"] == pytest.approx((0.9, 1.1))


def test_interval_covers_the_median_and_narrows():
    wide = [1.0 + 0.01 * (i % 7 - 3) for i in range(10)]
    low, high = median_interval(wide)
    assert 0.97 <= low <= statistics.median(wide) <= high <= 1.03
    narrow = median_interval(wide * 10)
    assert narrow[1] - narrow[0] < high - low


def test_two_trees_take_turns(tmp_path, capsys):
    """Two workers of this tree sample; what they print does not disturb the figures."""
    output = tmp_path / "figures.json"
    options = "--device cpu --sizes tiny --works decode --pairs 2 --warmup 1".split()
    compare_revisions.main([str(ROOT), str(ROOT), *options, "--output", str(output)])
    figures = json.loads(output.read_text())["decode"]
    assert len(figures["seconds_a"]) == len(figures["seconds_b"]) == 2
    assert min(figures["seconds_a"] + figures["seconds_b"]) > 0
    assert "decode: A" in capsys.readouterr().out


def test_a_folder_that_is_no_tree(tmp_path):
    with pytest.raises(ValueError, match="holds no folder rl_train"):
        compare_revisions.main([str(tmp_path), str(ROOT), "--device", "cpu"])


def test_a_worker_that_ends_is_reported():
    """A device that does not exist ends the worker: the tool ends too, with its status."""
    options = "--device nowhere --sizes tiny --works decode --pairs 2".split()
    with pytest.raises(RuntimeError, match="ended with status 1"):
        compare_revisions.main([str(ROOT), str(ROOT), *options])


@pytest.fixture
def silent(monkeypatch):
    """A worker that neither replies nor ends; no wait for it is longer than a second."""
    monkeypatch.setattr(compare_revisions, "REPLY_SECONDS", 0.1)
    monkeypatch.setattr(compare_revisions, "EXIT_SECONDS", 0.1)

    def start(script):
        worker = Worker.__new__(Worker)
        worker.tree = ROOT
        command = [sys.executable, "-c", script]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        worker.process = subprocess.Popen(command, **pipes)
        return worker

    return start


def test_a_worker_that_does_not_reply_is_not_waited_for_without_limit(silent):
    worker = silent("import time; time.sleep(600)")
    try:
        with pytest.raises(TimeoutError, match="no reply after"):
            worker.reply()
    finally:
        worker.close()


def test_a_worker_that_does_not_exit_is_not_waited_for_without_limit(silent, monkeypatch):
    worker = silent("import os, time; os.close(1); time.sleep(600)")
    monkeypatch.setattr(compare_revisions, "REPLY_SECONDS", 60)
    try:
        with pytest.raises(RuntimeError, match="closed its output and did not exit"):
            worker.reply()
    finally:
        worker.close()
