"""Rewards of answers about captions that name no region of the image, or several.

Letters: N answers, H W the pixels of a mask.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def none_reward(masks: Sequence[Tensor]) -> Tensor:
    """Return the reward (N,) where a caption names nothing: 1 of an empty mask (H, W), else 0.

    An answer without [SEG] has an empty mask.
    """
    return torch.tensor([not mask.any() for mask in masks], dtype=torch.float32)


def with_none_reward(
    rewards: dict[str, Tensor],
    components: Iterable[str],
    masks: Sequence[Tensor],
    no_target: Sequence[bool],
) -> dict[str, Tensor]:
    """Return rewards {component: (N,)} whose `components` are `none_reward` in some rows.

    Args:
        masks: N (H, W) bool of the answers.
        no_target: N, whether the row's caption names nothing.
    """
    if not any(no_target):
        return rewards
    names_nothing, empty = torch.tensor(no_target), none_reward(masks)
    changed = {k: torch.where(names_nothing, empty, rewards[k].cpu()) for k in components}
    return rewards | changed
