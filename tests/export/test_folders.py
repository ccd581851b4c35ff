"""Folders that other versions of transformers wrote are read, and exported as they are.

`folders/VERSION` holds their files without weights, as `write_folders.py` wrote them in the
environments of `test_versions.py`; the index of weights names their keys.
"""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Sam2Config, Sam2Model

from rl_train.config.grpo_config import PolicyConfig
from rl_train.export.merge import copy_other_files
from rl_train.policies.qwen_vl_model import image_preprocessing, load_qwen, load_sam, module_key
from sa2va_hf.tokenizer import load_tokenizer
from tests.policies.tiny_points import tiny_policy, write_sam
from tests.runs import CHECKPOINT

FOLDERS = Path(__file__).parent / "folders"
VERSIONS = sorted(folder.name for folder in FOLDERS.iterdir())


def written_by(version, folder, prefix="") -> Path:
    """A copy with random weights, whose keys begin with `prefix` in place of the published ones."""
    shutil.copytree(FOLDERS / version / "qwen", folder)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    state = Qwen2_5_VLForConditionalGeneration(config).state_dict()
    index, files = folder / "model.safetensors.index.json", defaultdict(dict)
    keys = json.loads(index.read_text())["weight_map"]
    for key, file in keys.items():
        files[file][module_key(key) if prefix else key] = state[module_key(key)]
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {key: file for file, tensors in files.items() for key in tensors}
    index.write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_model_tokenizer_and_image_processor_are_read(version, tmp_path):
    folder = written_by(version, tmp_path / "qwen")
    rope = load_qwen(folder).config.text_config.rope_parameters
    assert rope["mrope_section"] == [2, 3, 3] and rope["rope_theta"] == 1e4
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("<|im_end|>Where?<|image_pad|>", add_special_tokens=False)
    config = json.loads((folder / "config.json").read_text())
    assert ids[-1] == config["image_token_id"] and tokenizer.decode(ids[1:-1]) == "Where?"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    sizes = image_preprocessing(folder, PolicyConfig(model_path=str(folder), image_size=0))
    assert (sizes.min_pixels, sizes.max_pixels) == (3136, 24 * 28**2)
    if (sam := FOLDERS / version / "sam").is_dir():
        Sam2Model(Sam2Config.from_pretrained(sam)).save_pretrained(tmp_path / "sam")
        shutil.copy(sam / "config.json", tmp_path / "sam")
        load_sam(tmp_path / "sam")


def test_other_forms_of_an_image_processor(tmp_path):
    """4.52 to 4.57 write `size` alone; another file has no limits, or there is none."""
    file = tmp_path / "preprocessor_config.json"
    published = json.loads((FOLDERS / "4.49.0/qwen/preprocessor_config.json").read_text())
    published |= dict(min_pixels=None, max_pixels=None)
    file.write_text(json.dumps(published | dict(size=dict(shortest_edge=784, longest_edge=7840))))
    config = PolicyConfig(model_path=str(tmp_path), image_size=0)
    sizes = image_preprocessing(tmp_path, config)
    assert (sizes.min_pixels, sizes.max_pixels) == (784, 7840)
    file.unlink()
    sentence = f"--model_path {tmp_path}: holds neither preprocessor_config.json nor processor_"
    with pytest.raises(ValueError, match=sentence):
        image_preprocessing(tmp_path, config)


def test_a_chat_template_in_the_tokenizer_s_config(tmp_path):
    """Published folders have it there."""
    folder = shutil.copytree(FOLDERS / "4.49.0/qwen", tmp_path / "qwen")
    file = folder / "tokenizer_config.json"
    template = json.loads((folder / "chat_template.json").read_text())
    file.write_text(json.dumps(json.loads(file.read_text()) | template))
    (folder / "chat_template.json").unlink()
    assert load_tokenizer(folder).chat_template == template["chat_template"]


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("version", VERSIONS)
def test_an_export_changes_the_weights_alone(version, prefix, tmp_path):
    """Keys and files of weights are the base's; every other file is a copy."""
    base, output = written_by(version, tmp_path / "base", prefix), tmp_path / "exported"
    policy = tiny_policy(base, write_sam(tmp_path / "sam"), std=0.5)
    policy.save_merged(output)
    copy_other_files(base, output, None)
    assert {file.name for file in output.iterdir()} == {file.name for file in base.iterdir()}
    moved = []
    for file in base.iterdir():
        exported = output / file.name
        if file.suffix != ".safetensors":
            assert exported.read_bytes() == file.read_bytes(), file.name
            continue
        before, after = load_file(file), load_file(exported)
        assert {k: (v.shape, v.dtype) for k, v in after.items()} == {
            k: (v.shape, v.dtype) for k, v in before.items()
        }
        moved += [key for key in before if not torch.equal(before[key], after[key])]
        assert exported.stat().st_mode == (base / "config.json").stat().st_mode
    projections = {module_key(key).split(".")[-2] for key in moved}
    assert len(moved) == 14 and len(projections) == 7, moved


def test_a_dtype_is_all_that_changes_in_a_config(tmp_path):
    """Its order, its indented lines and keys that nobody here reads stay, also in Sa2VA's."""
    base, output = shutil.copytree(CHECKPOINT, tmp_path / "base"), tmp_path / "exported"
    output.mkdir()
    text = '{"zebra":  "ü", "torch_dtype": "bfloat16", "llm_config": {"torch_dtype": "bfloat16"}}'
    (base / "config.json").write_text(text)
    copy_other_files(base, output, None)
    assert (output / "config.json").read_text() == text
    copy_other_files(base, output, torch.bfloat16)
    assert (output / "config.json").read_text() == text
    copy_other_files(base, output, torch.float32)
    written = (output / "config.json").read_text()
    assert json.loads(written) == json.loads(text) | dict(torch_dtype="float32")
    assert list(json.loads(written)) == ["zebra", "torch_dtype", "llm_config"] and "ü" in written


def test_what_a_model_was_trained_with_is_a_key_of_its_config(tmp_path):
    base, output = shutil.copytree(CHECKPOINT, tmp_path / "base"), tmp_path / "exported"
    output.mkdir()
    copy_other_files(base, output, None, dict(region_prompt="box"))
    before, after = (json.loads((f / "config.json").read_text()) for f in (base, output))
    assert after == before | dict(region_prompt="box") and "region_prompt" not in before
