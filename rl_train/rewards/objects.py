"""Rewards of answers about captions that name no region of the image, or several.

Letters: N answers, M masks of an answer, K true regions, H W the pixels of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_train.rewards.published_points import best_assignment


def no_target_reward(masks: Sequence[Tensor]) -> Tensor:
    """Return the reward (N,) where a caption names nothing: 1 of an empty mask (H, W), else 0.

    An answer without [SEG] has an empty mask.
    """
    return torch.tensor([not mask.any() for mask in masks], dtype=torch.float32)


def with_no_target_reward(
    rewards: dict[str, Tensor], masks: Sequence[Tensor], no_target: Sequence[bool]
) -> dict[str, Tensor]:
    """Return rewards {component: (N,)} with `no_target_reward` in rows that name nothing.

    Args:
        masks: N (H, W) bool of the answers.
        no_target: N, whether the row's caption names nothing.
    """
    if not any(no_target):
        return rewards
    is_no_target, empty = torch.tensor(no_target), no_target_reward(masks)
    return {
        component: torch.where(is_no_target, empty, values.cpu())
        for component, values in rewards.items()
    }


@dataclass(frozen=True)
class Matching:
    """Record of the masks of an answer, one by one, against the true regions.

    Attributes:
        ious: (M, K) float64 IoU of each mask with each region.
        pairs: (mask, region) of the largest sum of IoUs, each of them above 0.
    """

    ious: np.ndarray
    pairs: tuple[tuple[int, int], ...]

    @property
    def reward(self) -> float:
        """Sum of the pairs' IoUs / max(M, K): what the larger side leaves unpaired counts as 0.

        1 where there is neither a mask nor a region.
        """
        largest = max(self.ious.shape)
        return float(sum(self.ious[pair] for pair in self.pairs) / largest) if largest else 1.0

    @property
    def num_missing(self) -> int:
        """Number of regions without a mask."""
        return self.ious.shape[1] - len(self.pairs)

    @property
    def num_surplus(self) -> int:
        """Number of masks without a region."""
        return self.ious.shape[0] - len(self.pairs)


def match(masks: Tensor, objects: Tensor) -> Matching:
    """Return the best one-to-one assignment of masks (M, H, W) to regions (K, H, W), bool."""
    ious = pair_ious(masks, objects)
    pairs = best_assignment(ious)
    return Matching(ious, tuple(pair for pair in pairs if ious[pair] > 0))


def pair_ious(masks: Tensor, objects: Tensor) -> np.ndarray:
    """Return the IoU (M, K) float64 of masks (M, H, W) with regions (K, H, W), bool."""
    if not len(masks) or not len(objects):
        return np.zeros((len(masks), len(objects)))
    a, b = masks.flatten(1).float(), objects.flatten(1).float()  # (M, H*W), (K, H*W)
    # float32 counts pixels exactly up to 2^24, four times MASK_PIXELS.
    intersection = (a @ b.T).double()
    union = a.sum(1)[:, None] + b.sum(1) - intersection
    return (intersection / union.clamp(min=1)).cpu().numpy()


def matched_rewards(masks: Sequence[Tensor], objects: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return {component: (N,)} of answers with several masks.

    "matched" in [0, 1] is `Matching.reward`, which may count; "missing" and "surplus" are counts of
    regions and masks, measured.

    Args:
        masks: N of (M, H, W) bool, M of each its own; objects: N of (K, H, W) bool.
    """
    matchings = [match(*pair) for pair in zip(masks, objects, strict=True)]
    rewards = dict(
        matched=[matching.reward for matching in matchings],
        missing=[float(matching.num_missing) for matching in matchings],
        surplus=[float(matching.num_surplus) for matching in matchings],
    )
    return {name: torch.tensor(values) for name, values in rewards.items()}
