"""Attention in windows against transformers' own module, which calls it once a window."""

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionAttention,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from sa2va_hf import window_attention
from sa2va_hf.window_attention import WindowAttention, batch_windows

GRIDS = torch.tensor([[1, 18, 26], [1, 8, 8], [1, 4, 30]])  # windows of several sizes


def encoder() -> Qwen2_5_VisionTransformerPretrainedModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=24)
    config = Qwen2_5_VLVisionConfig(depth=3, fullatt_block_indexes=[1], **sizes)
    config._attn_implementation = "sdpa"
    return Qwen2_5_VisionTransformerPretrainedModel(config)


def outcome(vision) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of three images, and the gradient of a weight of attention."""
    patches = torch.randn(
        int(GRIDS.prod(1).sum()), 1176, generator=torch.Generator().manual_seed(1)
    )
    features = vision(patches, GRIDS).pooler_output
    (features * torch.arange(features.shape[-1])).sum().backward()
    return features.detach(), vision.blocks[0].attn.qkv.weight.grad


def test_features_and_gradients_are_those_of_transformers(monkeypatch):
    calls, attend = [], window_attention.F.scaled_dot_product_attention

    def counted(q, k, v):
        calls.append(q.shape[0])
        return attend(q, k, v)

    theirs, ours = encoder(), encoder()
    batch_windows(ours)
    assert all(type(block.attn) is WindowAttention for block in ours.blocks)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    expected = outcome(theirs)
    monkeypatch.setattr(window_attention.F, "scaled_dot_product_attention", counted)
    for own, value in zip(outcome(ours), expected, strict=True):
        torch.testing.assert_close(own, value, rtol=1e-5, atol=1e-6)
    # Windows of each size at once in layers 0 and 2, the three images in layer 1.
    assert len(calls) < sum(calls) / 2


def test_a_window_sees_no_other():
    q, k, v = (torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    ends = torch.tensor([0, 2, 5, 5, 6])  # an empty window too
    before = window_attention.attend_in_windows(q, k, v, ends)
    v[3] += 1
    changed = (window_attention.attend_in_windows(q, k, v, ends) - before).abs().sum((1, 2)) > 0
    assert changed.tolist() == [False, False, True, True, True, False]
    torch.testing.assert_close(before[5], v[5])  # alone in its window


def test_other_encoders_stay_as_they_are():
    config = Qwen3VLVisionConfig(
        depth=1, hidden_size=32, intermediate_size=48, num_heads=2, deepstack_visual_indexes=[0]
    )
    vision = Qwen3VLVisionModel(config)
    kind = type(vision.blocks[0].attn)
    batch_windows(vision)
    assert type(vision.blocks[0].attn) is kind is not Qwen2_5_VLVisionAttention


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_in_bfloat16_on_a_gpu():
    theirs, ours = (encoder().to("cuda", torch.bfloat16) for _ in range(2))
    batch_windows(ours)
    patches = torch.randn(int(GRIDS.prod(1).sum()), 1176, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        own, value = (v(patches, GRIDS.cuda()).pooler_output.float() for v in (ours, theirs))
    assert (own - value).abs().max() < 0.02 * value.abs().max()
