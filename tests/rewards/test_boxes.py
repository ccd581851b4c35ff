"""Agreement of masks by boxes and centres, by hand."""

import pytest
import torch

from rl_train.rewards.boxes import centre_closeness, mask_box, mask_box_iou


def mask(*boxes, size=(30, 40)):
    """Pixels inside boxes (x1, y1, x2, y2)."""
    drawn = torch.zeros(size, dtype=torch.bool)
    for x1, y1, x2, y2 in boxes:
        drawn[y1:y2, x1:x2] = True
    return drawn


def test_the_box_of_a_mask():
    assert mask_box(mask((3, 5, 10, 8), (20, 25, 21, 26))).tolist() == [3, 5, 21, 26]
    assert mask_box(mask()).tolist() == [0, 0, 0, 0]


def test_boxes_and_centres():
    """The same box; one of a third of the union; apart; an empty answer; an image of other size."""
    pairs = [
        (mask((0, 0, 10, 10)), mask((0, 0, 2, 2), (8, 8, 10, 10))),
        (mask((0, 0, 20, 10)), mask((10, 0, 30, 10))),
        (mask((0, 0, 10, 10)), mask((30, 20, 40, 30))),
        (mask(), mask((0, 0, 10, 10))),
        (mask((0, 0, 4, 4), size=(8, 6)), mask((1, 2, 5, 6), size=(8, 6))),
    ]
    answers, targets = zip(*pairs)
    assert mask_box_iou(answers, targets).tolist() == pytest.approx([1, 1 / 3, 0, 0, 6 / 26])
    # Diagonals are 50 and 10 pixels; the centres lie 10, (30, 20) and (1, 2) apart.
    apart = [0, 10 / 50, 1300**0.5 / 50, 1, 5**0.5 / 10]
    assert centre_closeness(answers, targets).tolist() == pytest.approx([1 - d for d in apart])
