"""Trainable weights of Sa2VA: their groups and precision; the rest stays frozen."""

import pytest
import torch

from rl_train.policies.sa2va import TRAINABLE
from rl_train.roles import Roles

NOT_REACHED = ("output_hypernetworks_mlps.0.", "iou_prediction_head.", "pred_obj_score_head.")


def expected_group(name):
    """The group of a parameter by a rule without regular expressions, or None if it is frozen."""
    if ".lora_A." in name or ".lora_B." in name:
        return "lora"
    if name.startswith(("mlp1.", "text_hidden_fcs.")):
        return name.split(".")[0]
    if name.startswith("grounding_encoder.mask_decoder."):
        return None if any(part in name for part in NOT_REACHED) else "sam2"
    if name.startswith(
        (
            "grounding_encoder.prompt_encoder.not_a_point_embed.",
            "grounding_encoder.prompt_encoder.no_mask_embed.",
        )
    ):
        return "sam2"
    return None


def test_trainable_set_is_the_allow_list(model):
    expected = {name: expected_group(name) for name, _ in model.model.named_parameters()}
    trains = {
        name: model.group_of[name] for name, p in model.model.named_parameters() if p.requires_grad
    }
    assert trains == {name: group for name, group in expected.items() if group}
    assert set(trains) == set(model.trainable) and set(trains.values()) == set(TRAINABLE)
    assert all(p.dtype == torch.float32 for p in model.trainable.values())
    for part in (
        *NOT_REACHED,
        "prompt_encoder.point_embed",
        "prompt_encoder.mask_embed",
        "vision_encoder",
        "vision_model",
        "embed_tokens",
        "lm_head",
        "base_layer",
    ):
        frozen = [n for n, p in model.model.named_parameters() if part in n]
        assert frozen and not any(n in trains for n in frozen), part
    # 4 layers x 7 projections x (A, B)
    assert sum(group == "lora" for group in trains.values()) == 4 * 7 * 2


def test_a_group_left_out_is_frozen(policy):
    model = policy(groups=("lora", "mlp1"))
    assert {model.group_of[name] for name in model.trainable} == {"lora", "mlp1"}
    assert not any(
        p.requires_grad
        for n, p in model.model.named_parameters()
        if n.startswith(("text_hidden", "grounding"))
    )
    with pytest.raises(ValueError, match="lora language_model: one of them"):
        policy(groups=("lora", "language_model"))


def test_trainables_are_float32_over_a_bf16_base(policy):
    model = policy(dtype=torch.bfloat16)
    assert {p.dtype for p in model.trainable.values()} == {torch.float32}
    assert model.model.language_model.lm_head.weight.dtype == torch.bfloat16
    Roles(model.trainable)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_frozen_encoders_need_no_autocast(policy, batch, device):
    """They are nearly as near to float32 without it.

    Only on a GPU does autocast take layer norms to float32.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    features = []
    for dtype, autocast in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        model = policy(dtype=dtype)
        model.model.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            images = model.encode(batch)
        assert images.vision.dtype == images.sam[0].dtype == dtype
        features.append([images.vision, *images.sam])
    for exact, without, within in zip(*features, strict=True):
        errors = [(found.float() - exact).norm() / exact.norm() for found in (without, within)]
        print(f"relative error without autocast {errors[0]:.5f}, with it {errors[1]:.5f}")
        assert 0 < errors[0] < 1.25 * errors[1]
        # the demo's weights: up to .009 in SAM2's last map, of .0017 for one rounding to bfloat16
        assert max(errors) < 0.01


def test_no_dropout_is_on(model):
    """Sampling and scoring are one distribution."""
    assert not any(
        module.training for module in model.model.modules() if isinstance(module, torch.nn.Dropout)
    )
