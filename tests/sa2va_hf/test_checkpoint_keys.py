"""Each native tensor's place in the original layout, by name and by values."""

from collections import Counter

import pytest
import torch
from transformers import LlamaConfig

from sa2va_hf import Sa2VAModel
from sa2va_hf.checkpoint_keys import native_tensor, original_keys, to_original
from tools.demo.make_demo import SHIPPED_CHECKPOINT


@pytest.fixture(scope="module")
def model():
    return Sa2VAModel.from_pretrained(SHIPPED_CHECKPOINT)


@pytest.mark.parametrize(
    "native, original, part",
    [
        ("vision_model.embeddings.cls_token", "vision_model.embeddings.class_embedding", None),
        ("vision_model.encoder.layer.3.lambda_2", "vision_model.encoder.layers.3.ls2", None),
        (
            "vision_model.encoder.layer.0.attention.q_proj.weight",
            "vision_model.encoder.layers.0.attn.qkv.weight",
            0,
        ),
        (
            "vision_model.encoder.layer.0.attention.k_proj.bias",
            "vision_model.encoder.layers.0.attn.qkv.bias",
            1,
        ),
        (
            "vision_model.encoder.layer.0.attention.v_proj.weight",
            "vision_model.encoder.layers.0.attn.qkv.weight",
            2,
        ),
        (
            "language_model.model.layers.0.self_attn.o_proj.weight",
            "language_model.model.layers.0.self_attn.o_proj.weight",
            None,
        ),
        ("mlp1.1.weight", "mlp1.1.weight", None),
        (
            "grounding_encoder.no_memory_embedding",
            "grounding_encoder.sam2_model.no_mem_embed",
            None,
        ),
        (
            "grounding_encoder.mask_decoder.iou_prediction_head.proj_in.weight",
            "grounding_encoder.sam2_model.sam_mask_decoder.iou_prediction_head.layers.0.weight",
            None,
        ),
        (
            "grounding_encoder.mask_decoder.iou_prediction_head.layers.0.weight",
            "grounding_encoder.sam2_model.sam_mask_decoder.iou_prediction_head.layers.1.weight",
            None,
        ),
        (
            "grounding_encoder.mask_decoder.iou_prediction_head.proj_out.weight",
            "grounding_encoder.sam2_model.sam_mask_decoder.iou_prediction_head.layers.2.weight",
            None,
        ),
        (
            "grounding_encoder.mask_decoder.transformer.layers.1.mlp.proj_out.bias",
            "grounding_encoder.sam2_model.sam_mask_decoder.transformer.layers.1.mlp.layers.1.bias",
            None,
        ),
        (
            "grounding_encoder.mask_decoder.transformer.layers.0.self_attn.o_proj.weight",
            "grounding_encoder.sam2_model.sam_mask_decoder.transformer.layers.0.self_attn.out_proj.weight",
            None,
        ),
    ],
)
def test_names(native, original, part):
    assert original_keys(native) == ([original], part)


def test_point_embeddings_are_four_keys():
    keys, part = original_keys("grounding_encoder.prompt_encoder.point_embed.weight")
    assert part is None and keys == [
        f"grounding_encoder.sam2_model.sam_prompt_encoder.point_embeddings.{i}.weight"
        for i in range(4)
    ]


def test_one_gaussian_matrix_feeds_two_buffers(model):
    holders = [
        n
        for n in model.state_dict()
        if original_keys(n)[0][0].endswith("positional_encoding_gaussian_matrix")
    ]
    assert len(holders) == 2
    assert (
        model.grounding_encoder.prompt_encoder.shared_embedding
        is model.grounding_encoder.shared_image_embedding
    )


def test_every_native_name_has_its_own_place(model):
    """Each original key feeds one native tensor, but for thirds of qkv and the shared matrix."""
    places = Counter(
        (key, original_keys(name)[1])
        for name in model.state_dict()
        for key in original_keys(name)[0]
    )
    assert [key for (key, _), n in places.items() if n > 1] == [
        "grounding_encoder.sam2_model.sam_prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"
    ]


def test_qkv_splits_in_thirds():
    fused = torch.arange(12.0).view(6, 2)

    def third(x):
        return native_tensor(
            f"vision_model.encoder.layer.0.attention.{x}_proj.weight", lambda key: fused
        )

    assert (
        third("q").tolist() == [[0, 1], [2, 3]]
        and third("k").tolist() == [[4, 5], [6, 7]]
        and third("v").tolist() == [[8, 9], [10, 11]]
    )
    state = {
        f"vision_model.encoder.layer.0.attention.{x}_proj.weight": third(x) for x in "vqk"
    }  # in any order
    ((key, joined),) = to_original(state).items()
    assert key == "vision_model.encoder.layers.0.attn.qkv.weight" and torch.equal(joined, fused)


def test_wqkv_has_a_block_for_each_key_value_head():
    """InternLM2: of each of 2 key-value heads its 3 query heads, its key, its value; D = 2."""
    llm = LlamaConfig(num_attention_heads=6, num_key_value_heads=2, hidden_size=12)
    names = [f"language_model.model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    assert original_keys(names[1], llm) == (
        ["language_model.model.layers.0.attention.wqkv.weight"],
        1,
    )
    fused = torch.arange(20.0)[:, None]  # (2 blocks, 3 + 2 heads, D), 1 column
    q, k, v = (native_tensor(name, lambda key: fused, llm)[:, 0].tolist() for name in names)
    assert q == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert k == [6, 7, 16, 17] and v == [8, 9, 18, 19]
    state = {name: torch.tensor(rows)[:, None] for name, rows in zip(names[::-1], (v, k, q))}
    ((_, joined),) = to_original(state, llm).items()
    assert torch.equal(joined, fused)
