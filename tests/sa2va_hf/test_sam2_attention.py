"""Attention of SAM2's image encoder against transformers' own module."""

import torch
from transformers import Sam2HieraDetConfig, Sam2VideoConfig, Sam2VisionConfig, Sam2VisionModel
from transformers.models.sam2.modeling_sam2 import Sam2MultiScaleAttention

from sa2va_hf.sam2_attention import MultiScaleAttention, leave_out_unread_scores
from sa2va_hf.sam3 import build_sam

PIXELS = torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(1))


def encoder() -> Sam2VisionModel:
    """Return an encoder of stages that pool, whose windows are padded, with a global layer."""
    torch.manual_seed(0)
    hiera = Sam2HieraDetConfig(
        hidden_size=16,
        num_attention_heads=1,
        image_size=[128, 128],
        blocks_per_stage=[1, 2, 3, 1],
        embed_dim_per_stage=[16, 32, 64, 128],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 6, 2],
        global_attention_blocks=[4],
    )
    sizes = dict(fpn_hidden_size=16, backbone_channel_list=[128, 64, 32, 16])
    model = Sam2VisionModel(Sam2VisionConfig(backbone_config=hiera, **sizes))
    model.set_attn_implementation("sdpa")
    return model.eval()


def outcome(model: Sam2VisionModel) -> list[torch.Tensor]:
    """Return the pyramid of two images, and the gradients of the weights."""
    levels = model(PIXELS).fpn_hidden_states
    sum((level * torch.linspace(-1, 1, level.shape[-1])).sum() for level in levels).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [level.detach() for level in levels] + gradients


def test_features_and_gradients_are_those_of_transformers(monkeypatch):
    theirs, ours = encoder(), encoder()
    leave_out_unread_scores(ours)
    kinds = [type(m) for m in ours.modules() if isinstance(m, MultiScaleAttention)]
    assert kinds == 7 * [MultiScaleAttention]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    calls, softmax = [], torch.nn.functional.softmax

    def counted(*args, **kwargs):
        calls.append(1)
        return softmax(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", counted)
    expected = outcome(theirs)
    assert len(calls) == 7  # transformers still computes scores that it drops
    for own, value in zip(outcome(ours), expected, strict=True):
        assert torch.equal(own, value)
    assert len(calls) == 7


def test_a_sa2va_has_it():
    with torch.device("meta"):
        sam = build_sam(Sam2VideoConfig())
    attentions = [m for m in sam.modules() if isinstance(m, Sam2MultiScaleAttention)]
    assert attentions and {type(m) for m in attentions} == {MultiScaleAttention}


def test_other_modules_stay_as_they_are():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    leave_out_unread_scores(module)
    assert type(module) is torch.nn.Sequential and type(module[0]) is torch.nn.Linear
