"""The one definition of a decoder layer: its parts, and a whole layer of each family."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    Qwen2_5_VLTextConfig,
    Qwen2Config,
    Qwen3VLTextConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextDecoderLayer,
    Qwen3VLTextRotaryEmbedding,
)

from rl_train.engine import layers
from rl_train.engine.families import FAMILIES, family_of, interleaved, joined
from rl_train.engine.fused_weights import FusedLayer, FusedLinears
from tests.engine.tiny import SIZES, make, tiny_llm

# The parts


def test_norm():
    x, weight = make(5, 8, seed=1), make(8, seed=2)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    found = layers.norm(x, layers.Norm(weight, 1e-6))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("lora", ["live", "copied"])
def test_linears(lora):
    """q, k and v together: base, bias and LoRA."""
    attention = tiny_llm().model.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = make(5, 64, dtype=torch.float32)
    for module in modules:
        module.base_layer.bias.data.normal_()
    expected = torch.cat([module(x) for module in modules], dim=1)
    found = layers.linear(x, getattr(FusedLinears(modules), lora))
    torch.testing.assert_close(torch.cat(found, dim=1), expected)


def test_heads_are_turned():
    """q and k by their angle, as complex numbers; v stays."""
    angle, projected = make(3, 3, seed=2), make(3, 30, seed=1)
    rotation = layers.Rotation(angle.cos()[:, None], angle.sin()[:, None])
    q, k, v = layers.heads(projected.split([18, 6, 6], 1), (), rotation)
    heads = projected.view(3, 5, 6)
    plane = torch.view_as_complex(torch.stack(heads[:, :4].chunk(2, -1), -1))
    turned = plane * torch.exp(1j * angle[:, None])
    torch.testing.assert_close(torch.cat([q, k], 1), torch.cat([turned.real, turned.imag], -1))
    torch.testing.assert_close(v, heads[:, 4:])


def test_axes_of_frequencies():
    """Joined: sections behind each other. Interleaved: by turns, and time has the rest."""
    assert joined([1, 2, 1], 4) == [0, 1, 1, 2]
    assert interleaved([4, 2, 2], 8) == [0, 1, 2, 0, 1, 2, 0, 0]
    angles = torch.arange(3.0)[:, None].expand(3, 64)
    rotary = type("Rotary", (), dict(mrope_section=[24, 20, 20]))
    of_transformers = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(rotary, angles.clone())
    assert interleaved([24, 20, 20], 64) == of_transformers[:64].tolist()


# The whole

MODULES = {
    LlamaDecoderLayer: LlamaConfig,
    Qwen2DecoderLayer: Qwen2Config,
    Qwen2_5_VLDecoderLayer: Qwen2_5_VLTextConfig,
    Qwen3VLTextDecoderLayer: Qwen3VLTextConfig,
}


@pytest.mark.parametrize("layer_class", MODULES)
def test_a_layer_of_each_family(layer_class):
    """It computes what transformers' own does, on one causal sequence."""
    torch.manual_seed(0)
    config = MODULES[layer_class](**SIZES | dict(head_dim=16), attn_implementation="eager")
    module = layer_class(config, layer_idx=0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, angle = make(5, 64, dtype=torch.float32), make(5, 8, dtype=torch.float32, seed=1)
    causal = torch.full((5, 5), float("-inf")).triu(1)
    turned = torch.cat([angle, angle], 1)[None]
    expected = module(
        x[None], attention_mask=causal[None, None], position_embeddings=(turned.cos(), turned.sin())
    )

    def attention(q, k, v):
        heads = (part.transpose(0, 1) for part in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(0, 1).flatten(1)

    family = family_of(module)
    layer = FusedLayer(module, family).copied
    rotation = layers.Rotation(angle.cos()[:, None], angle.sin()[:, None])
    found = layers.decoder_layer(x, layer, rotation, attention)
    torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=1e-5)


def test_all_families_are_tested():
    assert {family.layer for family in FAMILIES} == set(MODULES)
