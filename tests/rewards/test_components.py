"""Weighted sums of reward components."""

import math

import torch

from rl_train.rewards.components import combine

NAN = math.nan


def test_combine_leaves_nan_parts_out():
    rewards = dict(
        iou=torch.tensor([0.5, NAN, 0.25, NAN]),
        meteor=torch.tensor([1.0, 0.5, NAN, NAN]),
        seen=torch.tensor([9.0, 9, 9, 9]),
    )
    combined = combine(rewards, dict(iou=2.0, meteor=0.5))
    assert combined[:3].tolist() == [2 * 0.5 + 0.5 * 1, 0.5 * 0.5, 2 * 0.25] and combined[3].isnan()
