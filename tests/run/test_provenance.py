"""starts.json: how a run was made, by its folder alone."""

import shutil
import subprocess
import sys

import pytest
import torch

from rl_train.run import provenance
from rl_train.run.provenance import git_state
from rl_train.utils.io import read_json
from tests.runs import REGIONS, complaint_of, flags, run, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)


def test_each_start_is_an_entry(data, tmp_path, monkeypatch):
    """With the flags of that start: those of config.json are the last start's."""
    monkeypatch.setattr(provenance, "git_state", lambda root: dict(commit="c", changed_files=["f"]))
    output = run(data, tmp_path / "run", max_steps=1)
    run(data, output, max_steps=2, resume="")
    first, second = read_json(output / "starts.json")["starts"]
    assert (first["from_step"], second["from_step"]) == (0, 1)
    assert (first["flags"]["max_steps"], second["flags"]["max_steps"]) == (1, 2)
    assert second["flags"] == read_json(output / "config.json")
    assert first["time"] <= second["time"] and first["time"].endswith("+00:00")
    assert first["packages"]["torch"] == torch.__version__ and "peft" in first["packages"]
    assert first["machine"].startswith("device: CPU, 1 thread; 1 process; ")
    assert first["code"] == dict(commit="c", changed_files=["f"])
    assert first["command"].startswith(sys.executable)
    assert first["data"]["training"]["rows"] == REGIONS and first["data"] == second["data"]
    assert first["base"] == second["base"] and len(first["base"]) > 8
    # A file that the user has damaged is not written over.
    (output / "starts.json").write_text("{")
    said = complaint_of(flags(data, output, max_steps=3, resume=""))
    assert "starts.json is missing or damaged" in said
    assert (output / "starts.json").read_text() == "{"


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_the_commit_and_what_was_changed(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    assert git_state(tmp_path) == dict(commit=None, changed_files=None)
    (tmp_path / "a.py").write_text("1")
    git("init")
    git("add", "a.py")
    git("commit", "-m", "m")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["changed_files"] == []
    (tmp_path / "a.py").write_text("2")
    (tmp_path / "b.py").write_text("3")
    assert git_state(tmp_path) == dict(commit=state["commit"], changed_files=["a.py", "b.py"])
    (tmp_path / "sub").mkdir()
    assert git_state(tmp_path / "sub")["commit"] is None
