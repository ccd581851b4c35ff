"""Cheap causes of loop 2: found where they were planted."""

from types import SimpleNamespace

import pytest
import torch

from rl_train.rewards import mask_iou
from tools.experiments.gauntlet.masks import (
    UNCHANGED,
    Answered,
    choose_variants,
    in_named_part,
    one_area,
    threshold,
)


def answered(logits, captions=("a", "b")) -> Answered:
    regions = SimpleNamespace(parts=[(SimpleNamespace(captions=list(captions)), None)])
    masks = [each > 0 for each in logits]
    return Answered(regions, 0, [0, 1], None, masks, logits)


def pixels(filled, count=16) -> torch.Tensor:
    return (torch.arange(count) < filled).view(4, 4)


def test_variants_by_hand():
    falling = torch.arange(8.0, -8.0, -1.0).view(4, 4)  # above 0 in the first 8 pixels
    nothing = torch.full((4, 4), -torch.inf)  # an answer without [SEG]
    given = answered([falling, nothing], ["an owl in the lower half", "an owl at the top"])
    masks = {
        "threshold": threshold(3.0)(given),
        "area": one_area(0.25)(given),
        "bonus": in_named_part(2.5)(given),
        "cut": in_named_part(torch.inf)(given),
    }
    assert torch.equal(masks["threshold"][0], pixels(5)) and torch.equal(
        masks["area"][0], pixels(4)
    )
    expected = pixels(6) | (pixels(11) & ~pixels(8))  # 2.5 less above, more below
    assert torch.equal(masks["bonus"][0], expected)
    assert not masks["cut"][0].any() and not any(mask[1].any() for mask in masks.values())


@pytest.mark.parametrize("shift, best", [(2.0, "2"), (0.0, "0")])
def test_a_threshold_is_chosen_where_it_was_planted(shift, best):
    """Logits that are all too high by a constant, or by none."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(4, 4, generator=generator) for _ in range(20)]
    targets = [each > 0 for each in logits]
    given = answered([each + shift for each in logits])
    variants = {f"{value:g}": threshold(value) for value in (-2.0, 0.0, 2.0)}
    measured = {
        name: dict(iou=mask_iou(variant(given), targets).tolist())
        for name, variant in variants.items()
    }
    measured[UNCHANGED] = measured["0"]
    assert choose_variants(measured, {"threshold": list(variants)}) == {"threshold": best}
