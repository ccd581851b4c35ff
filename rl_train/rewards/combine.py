"""Combine reward components into a row's reward: their weighted sum, also on one scale.

Letters: N rows of a rollout, G generations, K components.
"""

import torch

from rl_train.grpo import group_advantages


def combine(
    rewards: dict[str, torch.Tensor],
    weights: dict[str, float],
    normalise_in_groups_of: int | None = None,
) -> torch.Tensor:
    """Return the (N,) weighted sum of reward components (N,).

    NaN components of a row are left out of its sum; it is NaN if all are. Components without a
    weight are measurements: they are logged and do not count.

    Args:
        normalise_in_groups_of: G, to sum `normalise_components` instead of the components.
    """
    if normalise_in_groups_of:
        rewards = normalise_components(rewards, weights, normalise_in_groups_of)
    weighted = torch.stack([weights[name] * rewards[name] for name in weights], dim=-1)  # (N, K)
    # nansum of NaN alone is 0, which would be a reward.
    return torch.where(weighted.isnan().all(-1), torch.nan, weighted.nansum(-1))


def normalise_components(
    rewards: dict[str, torch.Tensor], weights: dict[str, float], num_generations: int
) -> dict[str, torch.Tensor]:
    """Return {component: (N,)} of those with a weight, normalised inside each group of G rows.

    Each is its difference from the group's mean divided by the group's std. A weight then says how
    much a component counts: in a plain sum the one with the largest std decides. A component that
    is equal in a group is 0 there; NaN stays NaN.
    """
    return {
        name: torch.where(values.isnan(), torch.nan, group_advantages(values, num_generations))
        for name, values in rewards.items()
        if name in weights
    }
