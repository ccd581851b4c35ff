"""From components to a row's reward: weighted sums, and rewards that must not teach."""

import numpy as np
import torch

CONTROLS = ("none", "shuffled", "constant")


def combine(rewards: dict[str, torch.Tensor], weights: dict[str, float]) -> torch.Tensor:
    """(N,) weighted sum of reward components (N,), without NaN parts; NaN where all are.

    Components without a weight are measurements: they are logged and do not count.
    """
    parts = torch.stack([weights[name] * rewards[name] for name in weights], dim=-1)
    return torch.where(parts.isnan().all(-1), torch.nan, parts.nansum(-1))


def control_rewards(
    rewards: torch.Tensor, num_generations: int, control: str, seed: tuple, indices: list[int]
) -> torch.Tensor:
    """(N,) rewards "shuffled" inside each group, or "constant"; or as they are.

    Missing rewards (NaN) move with the shuffle and stay where they are under "constant".

    Args:
        seed, indices: the order of group i follows from seed and indices[i], its sample, alone.
    """
    if control == "constant":
        return torch.where(rewards.isnan(), rewards, 1.0)
    if control == "none":
        return rewards
    shuffled = [
        group[np.random.default_rng([*seed, index]).permutation(num_generations)]
        for group, index in zip(rewards.split(num_generations), indices)
    ]
    return torch.cat(shuffled)
