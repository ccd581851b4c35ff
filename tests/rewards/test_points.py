"""Rewards of points, by hand; that nothing pays less than an answer that cannot be read."""

import itertools
import math

import pytest
import torch

from rl_train.points.parser import PointPrompt
from rl_train.rewards.combine import combine
from rl_train.rewards.points import (
    bounding_box,
    box_iou,
    deepest_point,
    fraction_inside,
    point_rewards,
    reference_prompt,
)

H, W = 8, 10


def mask(*boxes) -> torch.Tensor:
    """(H, W) bool, True in the boxes (x1, y1, x2, y2)."""
    filled = torch.zeros(H, W, dtype=torch.bool)
    for x1, y1, x2, y2 in boxes:
        filled[y1:y2, x1:x2] = True
    return filled


TARGET, CONFUSED = mask((1, 1, 4, 5)), mask((4, 1, 6, 5))
IN_TARGET, IN_CONFUSED, BACKGROUND = (2.0, 2.0), (5.0, 2.0), (9.0, 7.0)


def rewards(*cases, confused=CONFUSED) -> dict[str, list]:
    """Return the rewards of (answer, in form, mask, mask without negatives) about TARGET."""
    answers, in_form, masks, without = zip(*cases)
    n = len(cases)
    return point_rewards(answers, in_form, masks, without, [TARGET] * n, [confused] * n)


def test_components_by_hand():
    """A box that holds target and confused region; one point of two in the target."""
    answer = PointPrompt(
        ((1, 1, 6, 5),), (IN_TARGET, BACKGROUND), (IN_CONFUSED, IN_CONFUSED, IN_TARGET)
    )
    found = rewards(
        (answer, True, TARGET, TARGET | CONFUSED),
        (PointPrompt(positive=(IN_TARGET,)), False, CONFUSED, CONFUSED),
        (None, True, TARGET, TARGET),
    )
    expected = dict(
        iou=[1, 0, 0],
        format=[1, 0.5, 0],
        negatives=[(2 / 3 - 1 / 3 + 1) / 2, 0.5, 0],
        iou_without=[12 / 20, 0, 0],
        gain=[8 / 20, 0, 0],
        points_in_target=[0.5, 1, math.nan],
        neg_in_target=[1 / 3, math.nan, math.nan],
        neg_in_confused=[2 / 3, math.nan, math.nan],
        box_iou=[12 / 20, math.nan, math.nan],
        num_positive=[2, 1, 0],
        num_negative=[3, 0, 0],
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values, nan_ok=True), name


def test_the_negative_term_is_bounded_and_neutral_when_abstaining():
    negatives = [(), (IN_CONFUSED,), (IN_TARGET,), (BACKGROUND,), (IN_CONFUSED, BACKGROUND)]
    cases = [(PointPrompt((), (IN_TARGET,), n), True, TARGET, TARGET) for n in negatives]
    assert rewards(*cases)["negatives"].tolist() == [0.5, 1, 0, 0.5, 0.75]
    # where the segmenter confuses nothing, no negative point pays, and none costs
    assert rewards(*cases, confused=mask())["negatives"].tolist() == [0.5] * 5
    # more of the same points pay no more
    many = (PointPrompt((), (), (IN_CONFUSED,) * 7), True, TARGET, TARGET)
    assert rewards(many)["negatives"].tolist() == [1]


def test_what_cannot_be_read_has_the_lowest_reward():
    """All answers, masks and weights: a valid answer that is wrong in all is no worse."""
    regions = (mask(), TARGET, CONFUSED)
    points_of = ((), (IN_TARGET,), (IN_CONFUSED,), (BACKGROUND,))
    cases = [
        (PointPrompt((), positive, negative), in_form, final, without)
        for positive, negative, in_form, final, without in itertools.product(
            points_of, points_of, (False, True), regions, regions
        )
    ]
    cases += [(None, True, region, region) for region in regions]
    found = rewards(*cases)
    for weights in itertools.product((0.0, 0.1, 2.0), repeat=2):
        named = dict(zip(("format", "negatives"), weights)) | dict(iou=1.0)
        total = combine(found, named)
        assert (total[-3:] == 0).all() and (total[:-3] >= 0).all()
        if weights[0]:
            assert (total[:-3] > 0).all()
    for name in ("iou", "format", "negatives"):
        assert ((found[name] >= 0) & (found[name] <= 1)).all()


def test_the_policy_cannot_enlarge_the_region_that_pays():
    """The confused region follows from target and segmenter; a larger box has no say in it."""
    prompt = reference_prompt(TARGET)
    assert prompt == PointPrompt(((1.0, 1.0, 4.0, 5.0),), ((2.0, 3.0),))
    confused = (TARGET | CONFUSED) & ~TARGET
    assert torch.equal(confused, CONFUSED)
    for box in ((1, 1, 4, 5), (0, 0, W, H)):
        answer = PointPrompt((box,), (IN_TARGET,), (BACKGROUND,))
        found = rewards((answer, True, TARGET, mask((0, 0, W, H))), confused=confused)
        assert found["negatives"].tolist() == [0.5]


def test_points_on_the_border_lie_in_the_last_pixel():
    last = mask((W - 1, H - 1, W, H))
    assert fraction_inside(last, [(float(W), float(H))]) == 1
    assert fraction_inside(last, [(W - 1.5, H - 0.5), (W - 0.5, H - 0.1)]) == 0.5
    assert math.isnan(fraction_inside(last, []))


def test_the_deepest_point_is_farthest_from_the_outside():
    rng = torch.Generator().manual_seed(0)
    for filled in (0.97, 0.9, 0.5, 0.05):
        region = torch.rand(23, 17, generator=rng) < filled
        region[5, 7] = True
        x, y = (int(n) for n in deepest_point(region))

        def depth(row, column):
            """Chessboard distance to the next pixel outside, beyond the image too."""
            padded = torch.nn.functional.pad(region, (1, 1, 1, 1))
            outside = (~padded).nonzero() - torch.tensor([row + 1, column + 1])
            return outside.abs().amax(1).min().item()

        deepest = max(depth(*pixel) for pixel in region.nonzero().tolist())
        assert depth(y, x) == deepest and region[y, x]
    assert deepest_point(torch.ones(1, 1, dtype=torch.bool)) == (0.0, 0.0)
    assert deepest_point(torch.ones(5, 9, dtype=torch.bool)) == (4.0, 2.0)


def test_boxes():
    assert bounding_box(TARGET) == (1, 1, 4, 5)
    assert box_iou([(1, 1, 4, 5)], TARGET) == 1 and box_iou([(6, 6, 9, 8)], TARGET) == 0
    assert box_iou([(0, 1, 4, 5)], TARGET) == 12 / 16 and box_iou([(2, 2, 2, 2)], TARGET) == 0
    assert box_iou([(1, 1, 3, 2), (2, 3, 4, 5)], TARGET) == 1  # the box around both
    assert math.isnan(box_iou([], TARGET))
