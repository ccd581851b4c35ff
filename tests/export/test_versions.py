"""Folders between this package and the versions of transformers that others use.

Each version runs in an environment of its own, which `make_versions.sh` makes. Skipped unless
VERSIONS_DIR names the folder of these environments.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rl_train.export.merge import copy_other_files
from rl_train.policies.qwen_vl_model import load_qwen, load_sam
from sa2va_hf.tokenizer import load_tokenizer
from tests.export.run_folder import image
from tests.policies.tiny_points import tiny_policy, write_sam

HERE, VERSIONS_DIR = Path(__file__).parent, os.environ.get("VERSIONS_DIR")
VERSIONS = ["4.49.0", "4.51.3", "4.57.1", "5.17.0"]
TOLERANCE = 5e-6  # of the largest logit; CPUs round differently (3.02e-6 seen on one)
pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(not VERSIONS_DIR, reason="VERSIONS_DIR is not set"),
]


def run_in(version: str, script: str, *arguments: Path):
    python = Path(VERSIONS_DIR) / version / "bin" / "python"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    words = [python, HERE / script, *arguments]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=HERE)
    assert run.returncode == 0, f"transformers {version}, {script}:\n{run.stderr[-3000:]}"


@pytest.fixture(scope="module", params=VERSIONS)
def written(request, tmp_path_factory):
    """(version, the folders that it wrote)"""
    folder = tmp_path_factory.mktemp("written")
    run_in(request.param, "write_folders.py", folder)
    return request.param, folder


@pytest.fixture(scope="module")
def sam(tmp_path_factory):
    return write_sam(tmp_path_factory.mktemp("sam"))


def our_logits(model, folder, ids):
    """Logits (L, V) of the model for the prompt and image of `run_folder`."""
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    inputs = processor(images=[image()], return_tensors="pt")
    is_image = (ids == model.config.image_token_id).int()[None]
    with torch.no_grad():
        return model(input_ids=ids[None], mm_token_type_ids=is_image, **inputs).logits[0]


def largest_difference(a, b):
    assert a.shape == b.shape and b.abs().max() > 0.3
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("name", ["qwen", "resaved"])
def test_what_a_version_writes_is_read_here(written, name):
    version, folder = written
    theirs = load_file(folder / "logits.safetensors")
    tokenizer, ids = load_tokenizer(folder / name), theirs["prompt"]
    # An image stands in the prompt as 6 tokens, for which the text has one.
    text = tokenizer.decode(ids).replace("<|image_pad|>" * 6, "<|image_pad|>" * 6)
    assert tokenizer.encode(text, add_special_tokens=False) == ids.tolist()
    model = load_qwen(folder / name)
    difference = largest_difference(our_logits(model, folder / name, ids), theirs["logits"])
    print(f"transformers {version}, {name}: logits differ by {difference:.1e}")
    assert difference < TOLERANCE
    if (folder / "sam").is_dir():
        sam, stored = load_sam(folder / "sam"), load_file(folder / "sam" / "model.safetensors")
        state = sam.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in stored.items())


@pytest.mark.parametrize("name", ["qwen", "resaved"])
def test_an_export_runs_in_the_version_of_its_base_and_later_ones(written, name, sam, tmp_path):
    version, folder = written
    base, output = folder / name, tmp_path / "exported"
    policy = tiny_policy(base, sam, std=0.5)
    policy.save_merged(output)
    copy_other_files(base, output, None)
    files = {file.name: file for file in base.iterdir()}
    assert {file.name for file in output.iterdir()} == set(files)
    for file_name, file in files.items():
        exported = output / file_name
        if file_name.endswith(".safetensors"):
            with safe_open(file, "pt") as a, safe_open(exported, "pt") as b:
                assert a.keys() == b.keys() and a.metadata() == b.metadata()
        else:
            assert exported.read_bytes() == file.read_bytes(), file_name
    before = load_file(folder / "logits.safetensors")
    ours = our_logits(load_qwen(output), output, before["prompt"])
    assert largest_difference(ours, before["logits"]) > 0.01  # it was trained
    for other in VERSIONS[VERSIONS.index(version) :]:
        run_in(other, "run_folder.py", output, tmp_path / "there.safetensors")
        there = load_file(tmp_path / "there.safetensors")
        assert torch.equal(there["prompt"], before["prompt"]) and len(there["generated"])
        difference = largest_difference(ours, there["logits"])
        print(f"base of {version} ({name}), run by {other}: logits differ by {difference:.1e}")
        assert difference < TOLERANCE
        assert there["generated"][0] == ours[-1].argmax()
