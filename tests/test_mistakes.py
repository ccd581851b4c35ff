"""Ten mistakes of a first day: each ends with status 2, one sentence and its remedy.

In the process, by the command line's own `run_program`; the last one is the launcher's.
"""

import subprocess

import nltk
import pytest
from PIL import Image

from rl_train import train
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.rewards.meteor import _CACHED_WORDNET
from rl_train.utils.command_line import run_program
from tests.runs import ROOT, flags, on_one_core, run, unmeasured
from tools.demo.make_points_demo import SHIPPED as POINTS
from tools.gar_writer import write_gar

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture
def said(data, tmp_path, capsys, monkeypatch):
    """Function of changed flags and more words: the last line of the run that they end."""

    def start(*more: str, **changes) -> str:
        argv = [*flags(data, tmp_path / "run", **changes), *more]
        with pytest.raises(SystemExit) as ended:
            run_program(lambda: train.main(argv))
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        sentences = [line for line in error.splitlines() if line.startswith("rl_train: ")]
        assert "usage:" not in error
        assert len(sentences) == 1, error
        return sentences[0]

    return start


def with_blank_captions(data, folder, num_blank: int):
    """The training data with the captions of some regions taken away."""
    samples = list(GraspAnyRegionDataset(data / "train"))
    for sample in samples[:num_blank]:
        sample["caption"] = " "
    write_gar(samples, folder)
    return folder


def test_a_misspelt_flag(said):
    sentence = said("--lerning_rate", "1e-5")
    assert "--lerning_rate" in sentence and "did you mean --learning_rate" in sentence


def test_a_missing_path(said):
    assert "--data_dir /nowhere/data: no such folder" in said(data_dir="/nowhere/data")


def test_a_folder_of_pictures(said, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.new("RGB", (20, 20)).save(pictures / "photo.jpg")
    assert f"--data_dir {pictures}" in said(data_dir=pictures)


def test_the_wrong_family(said):
    sentence = said(model_path=POINTS / "qwen")
    assert f"--model_path {POINTS / 'qwen'}" in sentence and "--tasks" in sentence


def test_some_captions_are_blank(said, data, tmp_path):
    sentence = said(data_dir=with_blank_captions(data, tmp_path / "some", 5))
    assert "5 of 84 regions" in sentence and "--max_bad_fraction" in sentence
    assert (
        "blank caption: 5 (Fine-Grained-Dataset-Part1/data-00000-of-00001.arrow row 0" in sentence
    )


def test_all_captions_are_blank(said, data, tmp_path):
    folder = with_blank_captions(data, tmp_path / "all", 84)
    sentence = said(data_dir=folder)
    assert f"--data_dir {folder} holds no usable region: blank caption: 84 (" in sentence
    assert "data-00000-of-00001.arrow row 2, ..)" in sentence
    assert "every region needs an image, a mask that is not empty and a caption" in sentence


def test_too_few_samples(said):
    sentence = said(batch_size=85)
    assert "--data_dir" in sentence and "--batch_size 85" in sentence


def test_an_existing_folder(said, data, tmp_path, monkeypatch):
    for _ in unmeasured(monkeypatch):
        run(data, tmp_path / "run", max_steps=1)
    sentence = said()
    assert f"--output_dir {tmp_path / 'run'}" in sentence and "--resume" in sentence


@pytest.fixture
def no_wordnet(monkeypatch, tmp_path):
    nltk.corpus.wordnet._unload()
    _CACHED_WORDNET.synsets.cache_clear()
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    yield
    nltk.corpus.wordnet._unload()
    _CACHED_WORDNET.synsets.cache_clear()


def test_no_wordnet(said, no_wordnet):
    assert "run `python -m tools.fetch_wordnet`" in said()


def test_a_checkpoint_folder_as_a_model(said, data, tmp_path, monkeypatch):
    """It is taken, or answered with the command that exports it."""
    for _ in unmeasured(monkeypatch):
        run(data, tmp_path / "first", max_steps=1)
    checkpoint = tmp_path / "first" / "checkpoint_step_1"
    assert "tools.export" in said(model_path=checkpoint)


def test_an_old_python(tmp_path):
    old = tmp_path / "python3"
    old.write_text(
        '#!/bin/bash\ncase "$*" in *python_version*) echo 3.10.12 ;; *) exit 1 ;; esac\n'
    )
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", "run_rl_train.sh"],
        cwd=ROOT,
        env=dict(PYTHON=str(old), VENV="", PATH="/usr/bin:/bin"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"Python 3.10.12 ({old}) is too old: 3.11 or newer is needed; set PYTHON=" in done.stderr
