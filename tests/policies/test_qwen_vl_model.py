"""Qwen2.5-VL's and SAM2's folders: the published layouts, every weight, and what is refused."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.models.sam2.modeling_sam2 import Sam2MultiScaleAttention

from rl_train.config.grpo_config import PolicyConfig
from rl_train.engine.fused_weights import unsupported
from rl_train.policies import registry
from rl_train.policies.qwen_vl import LINEARS
from rl_train.policies.qwen_vl_model import TextModel, image_preprocessing, load_qwen, load_sam
from sa2va_hf.sam2_attention import MultiScaleAttention
from tests.policies.tiny_points import SAM_SIDE

CPU = torch.device("cpu")
# What the published config.json files say of the parts whose shapes differ.
PUBLISHED = {
    "3B": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28),
}
PUBLISHED["3B"] |= dict(num_attention_heads=16, num_key_value_heads=2, vocab_size=151936)
PUBLISHED["7B"] |= dict(num_attention_heads=28, num_key_value_heads=4, vocab_size=152064)
SIZES = {"3B": 3_754_622_976, "7B": 8_292_166_656}  # parameters, as their model cards count them


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_published_layouts(size):
    """Built without weights: as many as published, known to the engine, LoRA where it belongs."""
    text = PUBLISHED[size] | dict(rms_norm_eps=1e-6, max_position_embeddings=128000)
    text |= dict(rope_theta=1e6, use_sliding_window=False, max_window_layers=28)
    text |= dict(rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]))
    vision = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16)
    vision |= dict(out_hidden_size=text["hidden_size"], window_size=112, model_type="qwen2_5_vl")
    vision |= dict(fullatt_block_indexes=[7, 15, 23, 31], patch_size=14, spatial_patch_size=14)
    config = Qwen2_5_VLConfig(**text, vision_config=vision, tie_word_embeddings=size == "3B")
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config).requires_grad_(False)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == SIZES[size]
    assert unsupported(TextModel(model.model.language_model, model.lm_head)) is None
    names = [name for name, _ in model.named_modules()]
    adapted = [name for name in names if re.fullmatch(LINEARS, name)]
    assert len(adapted) == 7 * text["num_hidden_layers"]
    assert not any("visual" in name for name in adapted)


def copied(source, folder):
    shutil.copytree(source, folder)
    return folder


def test_loads_every_weight_or_says_which_not(qwen, tmp_path):
    folder = copied(qwen, tmp_path / "less")
    weights = load_file(folder / "model.safetensors")
    assert "visual.patch_embed.proj.weight" in weights  # the published layout
    gone, wide = "model.layers.0.mlp.up_proj.weight", "visual.merger.mlp.0.weight"
    del weights[gone]
    weights |= {wide: weights[wide][:-1].clone(), "model.odd": torch.zeros(1)}
    save_file(weights, folder / "model.safetensors", dict(format="pt"))
    with pytest.raises(ValueError) as error:
        load_qwen(folder)
    words = str(error.value)
    assert f"--model_path {folder}" in words and "1 missing_keys" in words
    assert "layers.0.mlp.up_proj" in words and "odd" in words and "merger.mlp.0" in words


def test_sam_is_that_of_the_published_folder(sam, tmp_path, caplog):
    """It is the model for videos, of whose file one of two copies of a matrix may be missing."""
    whole = load_sam(sam)
    attentions = [m for m in whole.modules() if isinstance(m, Sam2MultiScaleAttention)]
    assert attentions and {type(m) for m in attentions} == {MultiScaleAttention}
    assert "sam2_video" not in caplog.text  # transformers' warning of another type of model
    folder = copied(sam, tmp_path / "once")
    weights = load_file(folder / "model.safetensors")
    assert "memory_encoder.projection.weight" in weights
    del weights["prompt_encoder.shared_embedding.positional_embedding"]
    save_file(weights, folder / "model.safetensors", dict(format="pt"))
    once = load_sam(folder)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, once.state_dict()[name]), name
    weights.pop("mask_decoder.iou_token.weight")
    save_file(weights, folder / "model.safetensors", dict(format="pt"))
    with pytest.raises(ValueError, match=f"--sam_path {folder}.*1 missing_keys.*iou_token"):
        load_sam(folder)


def refused(words, qwen, sam, **changes):
    config = PolicyConfig(
        model_path=str(qwen), sam_path=sam and str(sam), dtype="float32", **changes
    )
    with pytest.raises(ValueError, match=words):
        registry.build_policy(config, {}, ["lora"], 8, CPU)


def test_wrong_folders_end_with_a_sentence(qwen, sam, tmp_path):
    refused("Qwen2.5-VL draws no mask, give a SAM2 as --sam_path", qwen, None)
    refused(f"--sam_path {qwen}: config.json says model_type 'qwen2_5_vl'", qwen, qwen)
    folder = copied(qwen, tmp_path / "cut")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:5000])
    refused(f"{folder}/model.safetensors is damaged or truncated", folder, sam)


def test_wrong_sizes_end_with_a_sentence(qwen, sam, tmp_path):
    refused("--image_size 850: must be 0 or a multiple of 28", qwen, sam, image_size=850)
    refused("--image_size 28: .* from 3136 to 12845056", qwen, sam, image_size=28)
    refused("--max_completion_length 8: with 900 tokens of an image", qwen, sam)
    folder = copied(qwen, tmp_path / "other")
    (folder / "config.json").write_text('{"model_type": "qwen2_vl"}')
    refused("says model_type 'qwen2_vl'; known: sa2va_chat, qwen2_5_vl, qwen3_vl", folder, sam)


def test_a_task_asks_its_own_family(qwen, sam):
    config = PolicyConfig(model_path=str(qwen), sam_path=str(sam), dtype="float32", image_size=56)
    with pytest.raises(ValueError, match="--tasks loop: asks a model of the family sa2va, and"):
        registry.build_policy(config, dict(loop="sa2va"), ["lora"], 8, CPU)
    tasks = dict(points="qwen_vl")
    policy = registry.build_policy(config, tasks, ["lora"], 8, CPU)
    assert (
        policy.preprocessor(8).preprocessing.max_tokens == 4
        and policy.preprocessor(8).sam_size == SAM_SIDE
    )


def test_qwen3_is_told_by_its_model_type(qwens, sam, tmp_path):
    """It has its own class and keys, cells of 32 pixels, and coordinates of 0 to 1000."""
    folder = qwens["qwen3_vl"]
    keys = load_file(folder / "model.safetensors").keys()
    assert "model.visual.pos_embed.weight" in keys  # the published layout
    policy = registry.build_policy(
        PolicyConfig(model_path=str(folder), sam_path=str(sam), dtype="float32", max_image_tokens=9,
                     image_size=0), dict(points="qwen_vl"), ["lora"], 8, CPU
    )  # fmt: skip
    assert type(policy.model.vlm).__name__ == "Qwen3VLForConditionalGeneration"
    assert policy.coordinates == "thousand" and policy.preprocessing.factor == 32
    assert policy.preprocessing.resized(300, 300) == (96, 96)
    # Without --image_size a side that its cells divide.
    sizes = [image_preprocessing(qwens[n], PolicyConfig(model_path="")).side for n in qwens]
    assert sizes == [840, 832]
    refused("--image_size 840: must be 0 or a multiple of 32", folder, sam, image_size=840)
    refused("Qwen3-VL draws no mask, give a SAM2 as --sam_path", folder, None)
    policy.save_merged(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == keys


def test_larger_images_are_reduced(qwen):
    config = PolicyConfig(model_path=str(qwen), image_size=0, max_image_tokens=24)
    sizes = image_preprocessing(qwen, config)
    assert sizes.resized(1000, 1500) == (28 * 4, 28 * 6)
    whole = json.loads((qwen / "preprocessor_config.json").read_text())
    published = Qwen2VLImageProcessorPil.from_pretrained(qwen)
    assert [*sizes.mean, *sizes.std] == [*published.image_mean, *published.image_std]
    assert published.size["longest_edge"] == whole["max_pixels"] and sizes.frames == 2
    many = PolicyConfig(model_path=str(qwen), image_size=0, max_image_tokens=10**6)
    assert image_preprocessing(qwen, many).max_pixels == whole["max_pixels"]
