"""Combined rewards, controls and advantages against numbers worked by hand."""

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


def test_combine_leaves_nan_parts_out():
    rewards = dict(
        iou=torch.tensor([0.5, NAN, 0.25, NAN]),
        meteor=torch.tensor([1.0, 0.5, NAN, NAN]),
        seen=torch.tensor([9.0, 9, 9, 9]),
    )
    combined = grpo.combine(rewards, dict(iou=2.0, meteor=0.5))
    assert combined[:3].tolist() == [2 * 0.5 + 0.5 * 1, 0.5 * 0.5, 2 * 0.25] and combined[3].isnan()


@pytest.mark.parametrize("seed", range(5))
def test_shuffled_rewards_stay_in_their_group(seed):
    rewards = torch.arange(32.0)
    rewards[5] = NAN
    shuffled = grpo.control_rewards(rewards, 8, "shuffled", (seed, 3), [7, 1, 4, 9])
    for before, after in zip(rewards.view(4, 8), shuffled.view(4, 8)):
        assert sorted(before.nan_to_num(99).tolist()) == sorted(
            after.nan_to_num(99).tolist()
        ) and not torch.equal(before, after)
    assert (
        len({tuple((after % 8).tolist()) for after in shuffled.view(4, 8)[[0, 2, 3]]}) == 3
    )  # each in an order of its own
    again, other = (
        grpo.control_rewards(rewards, 8, "shuffled", (seed, step), [7, 1, 4, 9]) for step in (3, 4)
    )
    assert torch.equal(again.nan_to_num(99), shuffled.nan_to_num(99))
    alone = grpo.control_rewards(
        rewards[8:16], 8, "shuffled", (seed, 3), [1]
    )  # whatever else is in the batch
    assert torch.equal(alone, shuffled[8:16])
    assert (
        not torch.equal(other.nan_to_num(99), shuffled.nan_to_num(99)) and rewards[0] == 0
    )  # nor is the argument touched


def test_constant_rewards_teach_nothing():
    rewards = torch.tensor([0.0, 1, NAN, 3])
    constant = grpo.control_rewards(rewards, 4, "constant", (0,), [0])
    assert (
        constant.isnan().tolist() == [False, False, True, False]
        and len(set(constant[[0, 1, 3]].tolist())) == 1
    )
    assert grpo.group_advantages(constant, 4).tolist() == [0, 0, 0, 0] and grpo.group_std(
        constant, 4
    ).tolist() == [0]
    assert grpo.control_rewards(rewards, 4, "none", (0,), [0]) is rewards
