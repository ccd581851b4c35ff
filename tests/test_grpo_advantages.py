"""Advantages against numbers worked by hand."""

import math

import pytest
import torch

from rl_train import grpo

NAN = math.nan


def test_advantages_by_hand():
    # [0, 0, 0, 1]: mean 1/4, variance (3/16 + 9/16) / 3 = 1/4, std 1/2 (with G, not G - 1: 0.433)
    advantages = grpo.group_advantages(torch.tensor([0.0, 0, 0, 1]), 4)
    torch.testing.assert_close(advantages, torch.tensor([-0.25, -0.25, -0.25, 0.75]) / 0.5001)


def test_groups_are_consecutive_rows():
    # [0, 1]: std 1/sqrt(2); [4, 2]: std sqrt(2)
    advantages = grpo.group_advantages(torch.tensor([0.0, 1, 4, 2]), 2)
    s = 2**0.5
    torch.testing.assert_close(
        advantages,
        torch.tensor(
            [-0.5 / (s / 2 + 1e-4), 0.5 / (s / 2 + 1e-4), 1 / (s + 1e-4), -1 / (s + 1e-4)]
        ),
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    # 0.1 * 3 / 3 is not 0.1 in float32: a tiny difference must not be divided by 1e-4
    advantages = grpo.group_advantages(torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.5]), 3, scale)
    assert advantages[:3].tolist() == [0, 0, 0] and (advantages[3:5] != 0).all()


def test_scales():
    rewards = torch.tensor([0.0, 1, 4, 2])
    # all rows: mean 1.75, squares 3.0625 + .5625 + 5.0625 + .0625 = 8.75, std sqrt(8.75 / 3)
    torch.testing.assert_close(
        grpo.group_advantages(rewards, 2, "batch"),
        torch.tensor([-0.5, 0.5, 1, -1]) / ((8.75 / 3) ** 0.5 + 1e-4),
    )
    assert grpo.group_advantages(rewards, 2, "none").tolist() == [-0.5, 0.5, 1, -1]
    with pytest.raises(ValueError, match="'global'"):
        grpo.group_advantages(rewards, 2, "global")


def test_dr_grpo_alone_is_not_divided_by_the_spread():
    rewards = torch.tensor([0.0, 1.0, 0.2, 0.2])
    for loss_type in grpo.LOSSES:
        found = grpo.group_advantages(rewards, 2, grpo.LOSSES[loss_type].advantage_scale)
        std = 1.0 if loss_type == "dr_grpo" else 0.5**0.5 + 1e-4
        expected = torch.tensor([-0.5, 0.5, 0, 0]) / std
        torch.testing.assert_close(found, expected, msg=loss_type)


def test_an_unscored_row_leaves_the_statistics():
    # of [0, NaN, 1, NaN] two rows count: mean 1/2, std 1/sqrt(2)
    advantages = grpo.group_advantages(torch.tensor([0.0, NAN, 1, NAN]), 4)
    torch.testing.assert_close(advantages, torch.tensor([-0.5, 0, 0.5, 0]) / (0.5**0.5 + 1e-4))
    assert grpo.group_advantages(torch.tensor([0.7, NAN, NAN, NAN]), 4).tolist() == [0, 0, 0, 0]
    assert grpo.group_advantages(torch.full((4,), NAN), 4).tolist() == [0, 0, 0, 0]
    batch = grpo.group_advantages(torch.tensor([0.0, NAN, 1, NAN]), 4, "batch")
    torch.testing.assert_close(batch, advantages)


def test_group_std():
    std = grpo.group_std(torch.tensor([0.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1, NAN, NAN, NAN, 1]), 4)
    assert std.tolist() == [0.5, 0, 0]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="--num_generations 1"):
        grpo.group_advantages(torch.tensor([1.0, 2]), 1)
    with pytest.raises(ValueError, match="groups of 2"):
        grpo.group_advantages(torch.tensor([1.0, 2, 3]), 2)
