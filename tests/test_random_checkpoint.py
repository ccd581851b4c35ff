"""The random checkpoint: the published 4B's shapes and ids, and a folder that loads (here at a small size)."""

import copy
import json
from pathlib import Path

import pytest
import torch

from rl_train.policies.sa2va import load_tokenizer
from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.checkpoint_keys import original_shapes
from tools.random_checkpoint import CONFIG_4B, SEG_LOGIT_STD, write

REFERENCE = Path(__file__).parents[2] / "shared" / "reference"


@pytest.mark.skipif(
    not REFERENCE.is_dir(), reason="the recorded layout is not beside this checkout"
)
def test_reference_layout():
    manifest = json.loads((REFERENCE / "sa2va_4b_manifest.json").read_text())
    with torch.device("meta"):
        assert original_shapes(Sa2VAModel(Sa2VAConfig(**CONFIG_4B)).state_dict()) == {
            k: tuple(v) for k, v in manifest.items()
        }


def test_small_one_loads(tmp_path):
    config = copy.deepcopy(CONFIG_4B)
    config["vision_config"] |= dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config["llm_config"] |= dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config["sam2_config"] = json.loads(
        (Path(__file__).parents[1] / "tools/demo_checkpoint/config.json").read_text()
    )["sam2_config"]
    write(tmp_path, config)
    model, tokenizer = Sa2VAModel.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    model.bind_tokenizer(tokenizer)
    assert (model.img_context_id, model.seg_id, len(tokenizer)) == (151667, 151674, 151679)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert abs(model.language_model.lm_head.weight[model.seg_id].norm() - SEG_LOGIT_STD) < 0.05
    ids = list(range(300, 151643, 1000))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
