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
    peak_in_named_part,
    points_at,
    threshold,
)


def answered(logits, captions=("a", "b")) -> Answered:
    regions = SimpleNamespace(parts=[(SimpleNamespace(captions=list(captions)), None)])
    return Answered(regions, 0, [0, 1], None, logits)


def pixels(filled, count=16) -> torch.Tensor:
    return (torch.arange(count) < filled).view(4, 4)


def test_variants_by_hand():
    falling = torch.arange(8.0, -8.0, -1.0).view(4, 4)  # above 0 in the first 8 pixels
    nothing = torch.full((4, 4), -torch.inf)  # an answer without [SEG]
    given = answered([falling, nothing], ["an owl in the lower half", "an owl at the top"])
    variants = {
        "threshold": threshold(3.0),
        "area": one_area(0.25),
        "bonus": in_named_part(2.5),
        "cut": in_named_part(torch.inf),
        "peak": peak_in_named_part(2.0),
    }
    masks = {name: [each > 0 for each in of(given)] for name, of in variants.items()}
    assert torch.equal(masks["threshold"][0], pixels(5)) and torch.equal(
        masks["area"][0], pixels(4)
    )
    expected = pixels(6) | (pixels(11) & ~pixels(8))  # 2.5 less above, more below
    assert torch.equal(masks["bonus"][0], expected)
    assert not masks["cut"][0].any() and not any(mask[1].any() for mask in masks.values())
    assert torch.equal(masks["peak"][0], pixels(10) & ~pixels(8))  # the highest below: 0


def test_only_the_highest_logit_points():
    falling = torch.arange(8.0, -8.0, -1.0).view(4, 4)
    given = answered([falling, torch.full((4, 4), -torch.inf)], ["an owl", "an owl"])
    for variant in (threshold(7.5), threshold(-7.5), one_area(0.5), peak_in_named_part(3.0)):
        first, second = variant(given)
        assert points_at(first, pixels(1)) == 1 and points_at(first, pixels(16) & ~pixels(1)) == 0
        assert points_at(second, pixels(16)) == 0  # no [SEG]
        assert points_at(first, pixels(0)) == 0 and points_at(second, pixels(0)) == 1
    [part, _] = in_named_part(torch.inf)(answered([falling, falling], ["at the bottom", ""]))
    assert points_at(part, pixels(9) & ~pixels(8)) == 1


@pytest.mark.parametrize("shift, best", [(2.0, "2"), (0.0, "0")])
def test_a_threshold_is_chosen_where_it_was_planted(shift, best):
    """Logits that are all too high by a constant, or by none."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(4, 4, generator=generator) for _ in range(20)]
    targets = [each > 0 for each in logits]
    given = answered([each + shift for each in logits])
    variants = {f"{value:g}": threshold(value) for value in (-2.0, 0.0, 2.0)}
    measured = {
        name: dict(iou=mask_iou([each > 0 for each in variant(given)], targets).tolist())
        for name, variant in variants.items()
    }
    measured[UNCHANGED] = measured["0"]
    assert choose_variants(measured, {"threshold": list(variants)}) == {"threshold": best}
