"""The random checkpoint: the published 4B's shapes and ids, and a small folder that loads."""

import copy
import json
import math

import pytest
import torch
from PIL import Image
from transformers.initialization import no_init_weights

from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.checkpoint_keys import original_shapes
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import ROOT
from tools.benchmarks import random_checkpoint
from tools.benchmarks.families import CONFIG_4B, CONFIGS
from tools.benchmarks.random_checkpoint import SEG_LOGIT_STD


def test_layout_is_that_of_the_published_4b():
    layout = json.loads((ROOT / "tests/reference/sa2va_4b_layout.json").read_text())
    with torch.device("meta"):
        assert original_shapes(Sa2VAModel(Sa2VAConfig(**CONFIG_4B)).state_dict()) == {
            key: tuple(shape) for key, shape in layout.items()
        }


def test_small_one_loads(tmp_path, monkeypatch):
    """Written by the command of docs/, but with narrow layers, one of each kind."""
    config = copy.deepcopy(CONFIG_4B)
    config["vision_config"] |= dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config["llm_config"] |= dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config["sam2_config"] = json.loads((ROOT / "tools/demo/checkpoint/config.json").read_text())[
        "sam2_config"
    ]
    monkeypatch.setitem(CONFIGS, "4b", config)
    random_checkpoint.main(["--output", str(tmp_path), "--device", "cpu"])
    model, tokenizer = Sa2VAModel.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    model.bind_tokenizer(tokenizer)
    assert (model.img_context_id, model.seg_id, len(tokenizer)) == (151667, 151674, 151679)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert abs(model.language_model.lm_head.weight[model.seg_id].norm() - SEG_LOGIT_STD) < 0.05
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"  # known to transformers 4 too
    written = json.loads((tmp_path / "config.json").read_text())
    recorded = json.loads((ROOT / "tests/reference/sa2va_4b_config.json").read_text())
    for key in ("architectures", "qk_normalization", "norm_type", "qkv_bias"):
        assert written["vision_config"][key] == recorded["vision_config"][key]
    # Without it transformers 5.17 warns of a wrong regex.
    assert written["transformers_version"] == recorded["llm_config"]["transformers_version"]
    ids = list(range(300, 151643, 1000))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@pytest.mark.parametrize(
    "sizes, weights",
    [
        ("8b", 8_317_666_866),
        ("26b", 25_778_005_938),
        ("internvl3-8b", 8_182_606_386),
        ("sa2va-qwen3-4b", 5_057_072_690),
        ("sa2va-qwen-7b", 8_527_539_250),
    ],
)
def test_weights_of_the_published_sizes(sizes, weights):
    """They are as many as the recorded manifests have."""
    with torch.device("meta"), no_init_weights():
        shapes = original_shapes(Sa2VAModel(Sa2VAConfig(**CONFIGS[sizes])).state_dict())
    assert sum(map(math.prod, shapes.values())) == weights


def test_a_tiny_qwen_loads_and_answers(tmp_path):
    random_checkpoint.main(f"--output {tmp_path} --sizes sa2va-qwen3-tiny --device cpu".split())
    model = Sa2VAModel.from_pretrained(tmp_path, dtype=torch.float32)
    model.require_tokenizer()
    model.max_new_tokens = 4
    answer = model.predict_forward(image=Image.new("RGB", (64, 64)), text="<image>What is it?")
    assert answer["prediction"]
