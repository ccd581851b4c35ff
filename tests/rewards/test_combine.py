"""Weighted sums of reward components."""

import math

import pytest
import torch

from rl_train.rewards.combine import combine, normalise_components

NAN = math.nan


def test_combine_leaves_nan_parts_out():
    rewards = dict(
        iou=torch.tensor([0.5, NAN, 0.25, NAN]),
        meteor=torch.tensor([1.0, 0.5, NAN, NAN]),
        seen=torch.tensor([9.0, 9, 9, 9]),
    )
    combined = combine(rewards, dict(iou=2.0, meteor=0.5))
    assert combined[:3].tolist() == [2 * 0.5 + 0.5 * 1, 0.5 * 0.5, 2 * 0.25] and combined[3].isnan()


def test_scaled_components_count_by_their_weights_alone():
    """Groups of 2: (0, 1) and (0, .01) both become -+ 1 / sqrt(2), up to the 1e-4 of the std."""
    rewards = dict(
        wide=torch.tensor([0.0, 1, 0.3, 0.3]),
        narrow=torch.tensor([0.01, 0, 0.5, NAN]),
        seen=torch.tensor([9.0, 0, 9, 0]),
    )
    weights = dict(wide=0.5, narrow=0.5)
    found = normalise_components(rewards, weights, 2)
    assert found.keys() == weights.keys()
    wide = 0.5 / (math.sqrt(0.5) + 1e-4)
    narrow = 0.005 / (0.01 * math.sqrt(0.5) + 1e-4)
    assert found["wide"].tolist() == pytest.approx([-wide, wide, 0, 0])
    assert found["narrow"].tolist()[:3] == pytest.approx([narrow, -narrow, 0], rel=1e-4)
    assert found["narrow"][3].isnan()  # and leaves the sum, as ever
    plain, now = combine(rewards, weights), combine(found, weights)
    assert plain[1] > plain[0] + 0.4  # the one that spreads decides,
    assert abs(now[1] - now[0]) < 0.02 and now[3] == 0  # where both ought to count alike
