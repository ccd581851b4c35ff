"""Rewards as pure functions: mask IoU (loop 1) and METEOR (loop 2)."""

from rl_train.rewards.iou import mask_iou
from rl_train.rewards.meteor import meteor

__all__ = ["mask_iou", "meteor"]
