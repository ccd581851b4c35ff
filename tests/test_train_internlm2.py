"""Both loops and supervised training of a tiny Sa2VA of InternLM2, and what they export."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rl_train.policies.sa2va import TRAINABLE
from sa2va_hf import Sa2VAModel
from tests import supervised
from tests.internlm2 import write_internlm2
from tests.runs import curve, rollouts, run, unmeasured, weights

one_core = pytest.fixture(autouse=True)(unmeasured)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_internlm2(tmp_path_factory.mktemp("internlm2"))


def assert_resumes(start, data, output, whole, **same):
    """A run that lost its last checkpoint goes on from the one before, to the same bits."""
    shutil.copytree(whole, output)
    (output / "checkpoint_step_10").rename(output.parent / "late")
    start(data, output, **same, resume="")
    a, b = weights(whole, 10), weights(output, 10)
    assert all(torch.equal(a[name], b[name]) for name in a)


def assert_gradients(output, groups):
    for group in groups:
        assert max(curve(output, f"grad_norm/{group}").values()) > 0, group


def test_both_loops(data, folder, tmp_path):
    """Rewards vary, every group has a gradient, a resumed run is the same to the bit."""
    same = dict(model_path=folder, num_generations=4, max_steps=10, save_steps=8)
    whole = run(data, tmp_path / "whole", **same)
    for loop in ("loop1", "loop2"):
        assert max(curve(whole, f"{loop}/reward_std").values()) > 0.05
        assert max(curve(whole, f"{loop}/sampler_gap").values()) < 1e-3
    assert_gradients(whole, TRAINABLE)
    projections = {name.split(".lora_")[0].split(".")[-1] for name in weights(whole, 10)}
    assert projections >= {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}
    assert any("[SEG]" in line["completion"] for line in rollouts(whole))
    assert_resumes(run, data, tmp_path / "again", whole, **same)
    assert rollouts(tmp_path / "again") == rollouts(whole)


def test_supervised_training(data, folder, tmp_path):
    """All groups; the merged model is in the original's layout and answers."""
    same = dict(model_path=folder, max_steps=10, save_steps=8, batch_size=4)
    same |= dict(trainable_modules=supervised.ALL)
    whole = supervised.run(data, tmp_path / "whole", **same)
    assert_gradients(whole, supervised.ALL)
    assert_exported(folder, whole / "final_model")
    same |= dict(merge_at_end="none")
    assert_resumes(supervised.run, data, tmp_path / "again", whole, **same)


def assert_exported(base, folder):
    """Files, keys and config.json of the base; saved again it is the same; it answers."""
    assert {file.name for file in base.iterdir()} <= {file.name for file in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (base / "config.json").read_text()
    )
    before, after = (load_file(f / "model.safetensors") for f in (base, folder))
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    fused = "language_model.model.layers.0.attention.wqkv.weight"
    assert not torch.equal(before[fused], after[fused])
    model = Sa2VAModel.from_pretrained(folder, dtype="bfloat16")
    model.save_pretrained(folder.parent / "saved")
    again = load_file(folder.parent / "saved" / "model.safetensors")
    assert again.keys() == after.keys()
    assert all(torch.equal(again[key], after[key]) for key in after)
    model = model.float()
    model.require_tokenizer()
    model.max_new_tokens = 8
    region = torch.zeros(1, 96, 128, dtype=torch.bool)
    region[:, 20:80, 30:90] = True
    for regions in (None, [region]):
        answer = model.predict_forward(
            Image.new("RGB", (128, 96), "red"), text="<image>What is it?", mask_prompts=regions
        )
        assert answer["prediction"]
