"""A folder as the original's converter writes it: its code is never run, and nobody is asked."""

import json
import os
import shutil
import sys
import time

import pytest
from PIL import Image

from sa2va_hf import Sa2VAModel
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT, on_one_core, run
from tools import evaluate, export

one_core = pytest.fixture(autouse=True)(on_one_core)
ANSWERS = b"y\n" * 100
CODE = """from pathlib import Path
Path(__file__).with_name("executed").touch()
raise RuntimeError("code of the folder was executed")
"""


@pytest.fixture
def folder(tmp_path):
    """The demo's checkpoint with code beside it, which both of its JSON files name."""
    folder = shutil.copytree(CHECKPOINT, tmp_path / "Sa2VA")
    names = dict(
        AutoConfig="configuration_sa2va_chat.Sa2VAChatConfig",
        AutoModel="modeling_sa2va_chat.Sa2VAChatModel",
        AutoModelForCausalLM="modeling_sa2va_chat.Sa2VAChatModel",
        AutoTokenizer=["configuration_sa2va_chat.Slow", "configuration_sa2va_chat.Fast"],
    )
    for file in ("config.json", "tokenizer_config.json"):
        fields = json.loads((folder / file).read_text()) | {"auto_map": names}
        (folder / file).write_text(json.dumps(fields))
    for file in ("configuration_sa2va_chat.py", "modeling_sa2va_chat.py"):
        (folder / file).write_text(CODE)
    return folder


@pytest.fixture
def eager(monkeypatch):
    """A pipe as stdin that says yes to all; what nobody has read of it comes from the function."""
    end, start = os.pipe()
    os.write(start, ANSWERS)
    os.close(start)
    with open(end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield lambda: os.read(end, len(ANSWERS) + 1)


def test_no_code_of_a_folder_runs(folder, data, eager, tmp_path, capfd):
    step = run(data, tmp_path / "run", model_path=folder, max_steps=1, save_steps=1)
    exported = tmp_path / "exported"
    export.main(["--checkpoint", f"{step}/checkpoint_step_1", "--output", str(exported)])
    flags = f"--data_dir {data}/heldout --num_samples 2 --num_workers 0 --max_completion_length 4"
    evaluate.main(["--model_path", str(exported), "--output", f"{tmp_path}/e.json", *flags.split()])
    for path in (folder, exported):
        model = Sa2VAModel.from_pretrained(path, trust_remote_code=True)
        model.preparing_for_generation(load_tokenizer(path), max_new_tokens=2)
        assert model.predict_forward(Image.new("RGB", (64, 64)), text="<image>Who?")["prediction"]
        Sa2VAModel.from_pretrained(path).require_tokenizer()
        assert (path / "configuration_sa2va_chat.py").read_text() == CODE
        assert not (path / "executed").exists()
    assert eager() == ANSWERS
    printed = "".join(capfd.readouterr())
    assert "custom code" not in printed and "[y/N]" not in printed


def test_a_silent_stdin_does_not_delay_the_start(folder, monkeypatch):
    """transformers waits 15 seconds for an answer."""
    end, start = os.pipe()
    with open(end) as stdin, open(start, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        before = time.monotonic()
        assert len(load_tokenizer(folder)) == len(load_tokenizer(CHECKPOINT))
        assert time.monotonic() - before < 14


def test_a_tokenizer_that_is_code_of_its_folder_is_refused(folder, eager):
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("PreTrainedTokenizerFast", "InternLM2Tokenizer"))
    with pytest.raises(ValueError, match=f"--model_path {folder}: no tokenizer could be loaded"):
        load_tokenizer(folder)
    assert eager() == ANSWERS and not (folder / "executed").exists()
