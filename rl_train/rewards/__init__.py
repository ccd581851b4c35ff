"""Rewards: mask IoU, METEOR, an LLM judge, points, the user's own."""

from rl_train.rewards.custom import UserReward
from rl_train.rewards.iou import mask_iou
from rl_train.rewards.judge import LLMJudge
from rl_train.rewards.meteor import meteor
from rl_train.rewards.points import point_rewards
from rl_train.rewards.published_points import segzero_rewards, visionreasoner_rewards

__all__ = [
    "mask_iou",
    "meteor",
    "point_rewards",
    "segzero_rewards",
    "visionreasoner_rewards",
    "LLMJudge",
    "UserReward",
]
