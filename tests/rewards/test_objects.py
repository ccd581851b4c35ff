"""Rewards where a caption names no region of the image, or several."""

import torch

from rl_train.rewards.objects import none_reward, with_none_reward

EMPTY, PIXEL = torch.zeros(2, 3, dtype=torch.bool), torch.eye(2, 3, dtype=torch.bool)


def test_an_empty_mask_is_right_where_nothing_is_named():
    assert none_reward([EMPTY, PIXEL]).tolist() == [1, 0]
    rewards = dict(meteor=torch.tensor([0.2, 0.4, 0.6]), other=torch.tensor([5.0, 6, 7]))
    changed = with_none_reward(
        rewards, ["meteor"], [EMPTY, PIXEL, EMPTY], no_target=[True, True, False]
    )
    assert torch.equal(changed["meteor"], torch.tensor([1, 0, 0.6]))
    assert torch.equal(changed["other"], rewards["other"])
    assert rewards["meteor"].tolist()[0] != 1  # nothing is written to
    assert with_none_reward(rewards, ["meteor"], [EMPTY] * 3, [False] * 3) is rewards


def test_a_fault_of_the_judge_is_no_fault_where_nothing_is_named():
    rewards = dict(judge=torch.tensor([float("nan"), float("nan")]))
    judge = with_none_reward(rewards, ["judge"], [EMPTY, EMPTY], [True, False])["judge"]
    assert judge[0] == 1 and judge[1].isnan()
