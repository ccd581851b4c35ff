"""--wandb and --merge_at_end: a run of two steps that has both, and the same resumed."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from rl_train import cli
from rl_train.checkpoint import save_load
from rl_train.checkpoint.record import FINAL_MODEL, RECORD, RunRecord, read_record
from rl_train.distributed.process_group import RankInfo
from rl_train.export.merge import export
from rl_train.loggers.text_log import TextLog
from rl_train.loggers.wandb import start_wandb
from rl_train.run.start import claim_output_dir
from tests.runs import ROOT, complaint_of, events, flags, run, unmeasured

WANDB = """
from pathlib import Path

class errors:
    class Error(Exception):
        pass

class Settings:
    def __init__(self, **settings):
        self.settings = settings

runs = []

def init(**arguments):
    if arguments["project"] == "refused":
        raise errors.Error("No API key configured.\\nLog in.")
    events = list(Path(arguments["dir"]).glob("tensorboard/*"))
    runs.append(arguments | dict(events_before=len(events)))
"""
RUN = dict(save_steps=1, wandb="cycles", merge_at_end="teacher", eval_samples=2)


@pytest.fixture(scope="module", autouse=True)
def one_core():
    monkeypatch = pytest.MonkeyPatch()
    yield from unmeasured(monkeypatch)
    monkeypatch.undo()


@pytest.fixture(scope="module", autouse=True)
def wandb(tmp_path_factory):
    """A module of this name that keeps in `runs` how they were started."""
    folder, monkeypatch = tmp_path_factory.mktemp("packages"), pytest.MonkeyPatch()
    (folder / "wandb.py").write_text(WANDB)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(folder)
    import wandb

    yield wandb
    del sys.modules["wandb"]
    monkeypatch.undo()


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory, wandb):
    return run(data, tmp_path_factory.mktemp("whole") / "run", **RUN)


@pytest.fixture(scope="module")
def resumed(data, whole, tmp_path_factory, wandb):
    """The run as a kill in its last export leaves it, gone on from its first step."""
    output = shutil.copytree(whole, tmp_path_factory.mktemp("resumed") / "run")
    shutil.rmtree(output / "checkpoint_step_2")
    final, run_id = output / FINAL_MODEL, read_record(output).run_id
    final.rename(save_load._beside(final, run_id, save_load.UNFINISHED))
    return run(data, output, resume="", **RUN)


def test_wandb_mirrors_tensorboard(whole, wandb):
    """It reads what is written by SummaryWriters that are made after its start."""
    (started,) = [run for run in wandb.runs if run["dir"] == str(whole)]
    assert started["sync_tensorboard"] and started["events_before"] == 0
    assert started["config"] == json.loads((whole / "config.json").read_text())
    assert (started["project"], started["name"]) == ("cycles", "run")
    assert len(events(whole).Tags()["scalars"]) > 60 and events(whole).Tags()["images"]


def test_a_resume_goes_on_in_the_same_run(resumed, wandb):
    first, second = wandb.runs[:2]
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert (second["dir"], second["events_before"]) == (str(resumed), 1)


def test_only_the_first_rank_starts_it(tmp_path, wandb):
    number = len(wandb.runs)
    config = SimpleNamespace(run=SimpleNamespace(output_dir=str(tmp_path), wandb="cycles"))
    claim_output_dir(
        SimpleNamespace(config=config, ranks=RankInfo(1, 2, "cpu"), state=SimpleNamespace(step=0)),
        TextLog(),
    )
    assert len(wandb.runs) == number and not list(tmp_path.iterdir())


def test_what_wandb_refuses_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="^--wandb refused: No API key configured. Log in.$"):
        start_wandb(tmp_path, "refused", {})
    assert not list(tmp_path.iterdir())


def test_a_project_by_default(data, tmp_path):
    assert cli.parse(flags(data, tmp_path / "run", wandb="")).run.wandb == "rl-sa2va"
    assert cli.parse(flags(data, tmp_path / "run")).run.wandb is None


def test_the_document_names_curves_that_are(whole):
    """Each curve beside which docs/your_checkpoint_and_data.md gives the names of others."""
    there = set(events(whole).Tags()["scalars"]) | {"loop1/judge"}  # which needs one
    there |= {"eval/caption_words"}  # not among the measures of `unmeasured`
    page = (ROOT / "docs" / "your_checkpoint_and_data.md").read_text()
    curves = page.split("## Coming from TRL")[1].split("\n## ")[0]
    names = re.findall(r"^\| `([^`]+)`", curves, re.MULTILINE)
    assert len(names) >= 8
    for name in names:
        assert {name.replace("*", "1"), name.replace("*", "2")} <= there, name


# --merge_at_end


def test_the_last_checkpoint_is_exported(whole, tmp_path):
    """tools.export does it the same way."""
    final = whole / FINAL_MODEL
    export(whole / "checkpoint_step_2", tmp_path / "exported", "teacher")
    files = {file.name: file.read_bytes() for file in final.iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "exported").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(files)
    assert not list(whole.glob(f"*{save_load.UNFINISHED}*"))


def test_after_a_resume_too(whole, resumed):
    first, second = (load_file(at / FINAL_MODEL / "model.safetensors") for at in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not list(resumed.glob(f"*{save_load.UNFINISHED}*"))


def test_what_is_there_stays_until_another_is_whole(tmp_path):
    final = tmp_path / FINAL_MODEL
    RunRecord(folders=[FINAL_MODEL]).write(tmp_path)
    final.mkdir()
    (final / "file").write_text("old")
    with pytest.raises(KeyError):
        with save_load.replacing(final) as folder:
            (folder / "file").write_text("half")
            raise KeyError
    assert (final / "file").read_text() == "old"
    with save_load.replacing(final) as folder:
        (folder / "file").write_text("new")
    assert (final / "file").read_text() == "new"
    assert sorted(file.name for file in tmp_path.rglob("*")) == [RECORD, "file", "final_model"]


TASK = """
from rl_train.tasks import MaskCaptionMask

class Alone(MaskCaptionMask):
    asks_teacher = False
"""


def test_a_teacher_that_is_not_there(data, tmp_path, monkeypatch):
    (tmp_path / "teacherless.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    how = dict(tasks="teacherless:Alone", merge_at_end="teacher")
    said = complaint_of(flags(data, tmp_path / "run", **how))
    assert "--merge_at_end teacher: no task of --tasks has a teacher" in said
    assert "--merge_at_end" in complaint_of(flags(data, tmp_path / "run", merge_at_end="best"))
