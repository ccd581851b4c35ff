"""tools/check_checkpoint.py and tools/record_original.py: which line names which fault."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sa2va_hf import Sa2VAModel, processing_sa2va
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT, ROOT, on_one_core
from tools import check_checkpoint, record_original
from tools.record_original import decode_mask, encode_mask, file_digests, questions, record_answers

one_core = pytest.fixture(autouse=True)(on_one_core)
TOKENS = 64  # longer than each of the demo's answers to the drawn pictures
SHORT = ("--batch_size", "2", "--num_generations", "2", "--max_completion_length", "8")


@pytest.fixture
def folder(tmp_path):
    """A copy of the demo's checkpoint."""
    return shutil.copytree(CHECKPOINT, tmp_path / "model")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Answers of the demo's checkpoint, as record_original writes them."""
    file = tmp_path_factory.mktemp("recorded") / "recorded.json"
    loaded = load(CHECKPOINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_original, "load_original", lambda *_: loaded)
        words = ["--model_path", CHECKPOINT, "--output", file, "--max_new_tokens", TOKENS]
        record_original.main([str(word) for word in words] + ["--device", "cpu"])
    return file


def load(folder):
    """Return the model in a folder and the arguments that its predict_forward needs."""
    model = Sa2VAModel.from_pretrained(folder).eval()
    return model, dict(tokenizer=load_tokenizer(folder))


def check(capsys, *words) -> tuple[dict[str, str], int]:
    """Return ({check: its line}, the exit status)."""
    status = 0
    try:
        check_checkpoint.main([str(word) for word in words])
    except SystemExit as ending:
        status = ending.code
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if ": " in line]
    return {line[12:].split(": ")[0]: line for line in lines}, status


def compare(recorded, folder) -> str:
    """Return what `check_recorded` says of a folder's model; "" if all is as recorded."""
    record = json.loads(recorded.read_text())
    model, others = load(folder)
    answers = record_answers(model, questions(True), TOKENS, **others)
    try:
        check_checkpoint.check_recorded(record, folder, answers, "float32")
    except check_checkpoint.CheckFailed as failed:
        return str(failed)
    return ""


def test_a_sound_checkpoint(recorded, tmp_path, capsys):
    report = tmp_path / "report"
    words = ("--model_path", CHECKPOINT, "--recorded", recorded, "--output_dir", report)
    lines, status = check(capsys, *words, *SHORT)
    verdicts = json.loads((report / "report.json").read_text())["checks"]
    made = {line["name"]: line["verdict"] for line in verdicts}
    assert len(made) == 9 and set(made.values()) == {"ok"} and status == 0, lines
    assert "change" in lines["training steps"] and "s, peak memory" in lines["training steps"]
    assert Image.open(report / "phrase.png").size == (640, 480)


def test_an_answer_without_an_end():
    model, others = load(CHECKPOINT)
    with pytest.raises(check_checkpoint.CheckFailed, match="no end of the answer to the region"):
        check_checkpoint.check_answers(model, others["tokenizer"], 3)


def test_a_weight_that_changed(recorded, folder):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "layers.0.mlp.down_proj" in name)
    weights[name][0, 0] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert compare(recorded, folder) == "not the recorded files: model.safetensors"
    weights[name] += 0.05
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "logits differ by" in compare(recorded, folder)


def test_another_normalisation(recorded, monkeypatch):
    assert compare(recorded, CHECKPOINT) == ""
    monkeypatch.setattr(processing_sa2va, "IMAGENET_MEAN", processing_sa2va.IMAGENET_STD)
    assert "phrase: logits differ by" in compare(recorded, CHECKPOINT)


def test_another_tokenizer(folder, capsys):
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("[SEG]", "[GES]"))
    lines, status = check(capsys, "--model_path", folder)
    assert status == 1 and lines["tokenizer"].startswith("FAILED") and "[SEG]" in lines["tokenizer"]
    assert "a changed weight or another normalisation is not seen" in lines["as recorded"]
    assert lines["training steps"].startswith("not checked")


def test_a_missing_weight(folder, capsys):
    weights = load_file(folder / "model.safetensors")
    weights.pop("mlp1.1.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    lines, status = check(capsys, "--model_path", folder)
    assert status == 1 and "mlp1.1.weight" in lines["weights"]


def test_masks_survive_the_file():
    mask = torch.rand(2, 5, 7).numpy() > 0.5
    assert np.array_equal(decode_mask(json.loads(json.dumps(encode_mask(mask)))), mask)


STAND_IN = """
import numpy as np
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, PreTrainedModel

class StandIn(PreTrainedModel):
    config_class = Qwen2Config
    def __init__(self, config):
        super().__init__(config)
        self.language_model = Qwen2ForCausalLM(config)
        self.post_init()
    def predict_forward(self, image=None, video=None, text=None, mask_prompts=None, tokenizer=None):
        ids = tokenizer(text, return_tensors="pt").input_ids
        embeds = self.language_model.get_input_embeddings()(ids)
        output = self.language_model.generate(
            inputs_embeds=embeds, generation_config=GenerationConfig(max_new_tokens=2048),
            output_hidden_states=True, return_dict_in_generate=True)
        assert len(output.hidden_states) == len(output.sequences[0])
        mask = np.zeros((len(video or [0]), 480, 640), bool)
        mask[:, 100:200] = True
        text = tokenizer.decode(output.sequences[0])
        return dict(prediction=text, prediction_masks=[mask])
"""


def test_the_recorder_runs_without_this_project(tmp_path):
    """The stand-in has the original's calling interface and lies in a folder with its code."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "modeling_stand_in.py").write_text(STAND_IN)
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=481)
    config = dict(model_type="qwen2", num_hidden_layers=1, num_key_value_heads=1, **sizes)
    config |= dict(auto_map={"AutoModel": "modeling_stand_in.StandIn"}, llm_config={})
    (folder / "config.json").write_text(json.dumps(config))
    for file in CHECKPOINT.glob("*token*"):
        shutil.copy(file, folder)
    weights = load_file(CHECKPOINT / "model.safetensors")
    save_file({"unused": weights["mlp1.0.weight"]}, folder / "model.safetensors", {"format": "pt"})
    script = shutil.copy(ROOT / "tools" / "record_original.py", tmp_path)
    command = (
        "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__'); "
        "assert not {'tools', 'rl_train', 'sa2va_hf'} & set(sys.modules)"
    )
    words = ["--model_path", folder, "--output", tmp_path / "r.json", "--max_new_tokens", 5]
    own = dict(PYTHONPATH="", HF_HOME=str(tmp_path / "hub"), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-c", command, script, *map(str, words), "--device", "cpu"],
        cwd=tmp_path,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["answers"].keys() == {"phrase", "region", "video"}
    for name, answer in record["answers"].items():
        assert len(answer["ids"]) == len(answer["logits"]) == 5
        assert decode_mask(answer["masks"][0]).sum() == 64_000 * (3 if name == "video" else 1)
    assert record["files"] == file_digests(folder) and "model.safetensors" in record["files"]
