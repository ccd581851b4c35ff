"""Weighted sums of reward components, and rewards that must not teach."""

import math

import pytest
import torch

from rl_train.grpo import group_advantages, group_std
from rl_train.rewards.components import combine, control_rewards

NAN = math.nan


def test_combine_leaves_nan_parts_out():
    rewards = dict(
        iou=torch.tensor([0.5, NAN, 0.25, NAN]),
        meteor=torch.tensor([1.0, 0.5, NAN, NAN]),
        seen=torch.tensor([9.0, 9, 9, 9]),
    )
    combined = combine(rewards, dict(iou=2.0, meteor=0.5))
    assert combined[:3].tolist() == [2 * 0.5 + 0.5 * 1, 0.5 * 0.5, 2 * 0.25] and combined[3].isnan()


@pytest.mark.parametrize("seed", range(5))
def test_shuffled_rewards_stay_in_their_group(seed):
    rewards = torch.arange(32.0)
    rewards[5] = NAN
    shuffled = control_rewards(rewards, 8, "shuffled", (seed, 3), [7, 1, 4, 9])
    for before, after in zip(rewards.view(4, 8), shuffled.view(4, 8)):
        assert sorted(before.nan_to_num(99).tolist()) == sorted(after.nan_to_num(99).tolist())
        assert not torch.equal(before, after)
    orders = {tuple((after % 8).tolist()) for after in shuffled.view(4, 8)[[0, 2, 3]]}
    assert len(orders) == 3  # each in an order of its own
    again, other = (
        control_rewards(rewards, 8, "shuffled", (seed, step), [7, 1, 4, 9]) for step in (3, 4)
    )
    assert torch.equal(again.nan_to_num(99), shuffled.nan_to_num(99))
    alone = control_rewards(rewards[8:16], 8, "shuffled", (seed, 3), [1])
    assert torch.equal(alone, shuffled[8:16])  # whatever else is in the batch
    assert not torch.equal(other.nan_to_num(99), shuffled.nan_to_num(99))
    assert rewards[0] == 0  # the argument is not touched


def test_constant_rewards_teach_nothing():
    rewards = torch.tensor([0.0, 1, NAN, 3])
    constant = control_rewards(rewards, 4, "constant", (0,), [0])
    assert constant.isnan().tolist() == [False, False, True, False]
    assert len(set(constant[[0, 1, 3]].tolist())) == 1
    assert group_advantages(constant, 4).tolist() == [0, 0, 0, 0]
    assert group_std(constant, 4).tolist() == [0]
    assert control_rewards(rewards, 4, "none", (0,), [0]) is rewards
