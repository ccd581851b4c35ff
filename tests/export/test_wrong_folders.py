"""A folder that holds another thing than its flag asks for: one sentence, before data are read."""

import json
import shlex
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from rl_train.export.load_policy import check_seg_state
from rl_train.run import start
from sa2va_hf import Sa2VAModel
from tests.policies.tiny_points import write_qwen, write_sam
from tests.runs import CHECKPOINT, complaint_of, flags, on_one_core
from tools import evaluate, export

one_core = pytest.fixture(autouse=True)(on_one_core)
POINTS = dict(tasks="point_segmentation", latent_std=None, image_size=56)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder}"""
    root = tmp_path_factory.mktemp("folders")
    pictures = root / "pictures"
    pictures.mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8)).save(pictures / f"{number}.png")
    qwen, sam = write_qwen(root / "qwen"), write_sam(root / "sam")
    return dict(sa2va=CHECKPOINT, qwen=qwen, sam=sam, pictures=pictures)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output folder of a run: two checkpoints."""
    output = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        checkpoint = output / f"checkpoint_step_{step}"
        checkpoint.mkdir()
        torch.save(dict(step=step), checkpoint / "training_state.pt")
        save_file({"x": torch.zeros(1)}, checkpoint / "trainables.safetensors")
        text = json.dumps(dict(model_path=str(CHECKPOINT)))
        for folder in (output, checkpoint):
            (folder / "config.json").write_text(text)
    return output


@pytest.fixture
def complaint(data, tmp_path, monkeypatch):
    """The sentence of a run with some flags changed, in which no data may be read."""

    def read(*args):
        raise AssertionError("data were read before the folders were looked at")

    monkeypatch.setattr(start, "open_data", read)

    def run(**changes):
        return complaint_of(flags(data, tmp_path / "run", **changes))

    yield run
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "model, sam, tasks, words",
    [
        ("qwen", None, "loops", "asks a model of the family sa2va, and --model_path {qwen} is"),
        ("sa2va", "sam", "points", "asks a model of the family qwen_vl, and --model_path {sa2v"),
        ("pictures", None, "loops", "--model_path {pictures}: holds no config.json, so it is no "),
        ("pictures", None, "loops", "found 0.png, 1.png, 2.png .. in it"),
        ("sam", None, "loops", "--model_path {sam}: config.json says model_type 'sam2_video'; k"),
        ("sam", "sam", "points", "known: sa2va_chat, qwen2_5_vl, qwen3_vl; a SAM2 is given as"),
        ("qwen", None, "points", "--model_path {qwen}: Qwen2.5-VL draws no mask, give a SAM2 as"),
        ("qwen", "qwen", "points", "--sam_path {qwen}: config.json says model_type 'qwen2_5_vl'"),
        ("qwen", "pictures", "points", "--sam_path {pictures}: holds no config.json, so it is no"),
        ("sa2va", "sam", "loops", "--sam_path: only with --tasks point_segmentation"),
    ],
)
def test_a_run_with_another_model(folders, complaint, model, sam, tasks, words):
    changes = POINTS if tasks == "points" else {}
    sam_path = {"sam_path": folders[sam]} if sam else {}
    sentence = complaint(model_path=folders[model], **sam_path, **changes)
    assert words.replace("{sa2v", "{sa2va}").format(**folders) in sentence


@pytest.mark.parametrize("name", ["qwen", "sam", "pictures"])
def test_other_models_are_no_sa2va(folders, name):
    with pytest.raises(ValueError, match="config.json: model_type is|config.json does not exist"):
        Sa2VAModel.from_pretrained(folders[name])


def test_a_sa2va_of_another_backbone(tmp_path):
    config = dict(model_type="sa2va_chat", text_config={}, vision_config={}, template="qwen")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no known family of Sa2VA .* has text_config and vision"):
        Sa2VAModel.from_pretrained(tmp_path)


def test_a_run_in_place_of_a_model(finished, complaint, tmp_path):
    """The sentence's own command names the checkpoint and a folder that it may write."""
    newest = finished / "checkpoint_step_2"
    for folder, kind in ((newest, "a checkpoint of a run"), (finished, "the output folder of a")):
        sentence = complaint(model_path=folder)
        assert f"--model_path {folder} is {kind}" in sentence
        words = shlex.split(sentence.partition("python -m tools.export ")[2])
        assert words == ["--checkpoint", str(newest), "--output", str(finished / "exported")]
        with pytest.raises(ValueError, match=f"^Sa2VAModel.from_pretrained: {folder} is {kind}"):
            Sa2VAModel.from_pretrained(folder)
    whole = shutil.copytree(finished, tmp_path / "whole")
    (whole / "final_model").mkdir()
    sentence = complaint(model_path=whole / "checkpoint_step_1")
    assert f"give the model that the run merged at its end, {whole / 'final_model'}, or" in sentence


def test_tools_and_the_output_folder_of_a_run(finished, data, tmp_path):
    how = ["--data_dir", str(data / "nowhere")]  # which is not looked for
    with pytest.raises(SystemExit, match="^evaluate: --model_path .* python -m tools.export --che"):
        evaluate.main(["--model_path", str(finished), *how])
    words = ["--checkpoint", str(finished / "checkpoint_step_2"), "--output", str(tmp_path / "x")]
    with pytest.raises(SystemExit, match="^export: --model_path .* is a checkpoint of a run, not"):
        export.main([*words, "--model_path", str(finished / "checkpoint_step_1")])


def test_a_run_of_another_seg_state_than_its_base_says():
    for same in ({}, dict(seg_state=None), dict(seg_state="after_norm")):
        check_seg_state(same, CHECKPOINT)
    with pytest.raises(ValueError, match='config.json: .* --seg_state before_norm, .* add "seg_'):
        check_seg_state(dict(seg_state="before_norm"), CHECKPOINT)
