"""Rewards: mask IoU, METEOR, an LLM judge, the caption reward of both, points, the user's own."""

from rl_train.rewards.caption import caption_reward
from rl_train.rewards.custom import UserReward, load_reward
from rl_train.rewards.iou import mask_iou
from rl_train.rewards.judge import LLMJudge
from rl_train.rewards.meteor import meteor
from rl_train.rewards.points import point_rewards

__all__ = [
    "mask_iou",
    "meteor",
    "caption_reward",
    "point_rewards",
    "LLMJudge",
    "UserReward",
    "load_reward",
]
