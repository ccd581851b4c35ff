"""From components to a row's reward: a weighted sum, of them as they are or on one scale."""

import torch

from rl_train.grpo import group_advantages

# Weights of METEOR and the LLM judge in the caption reward, in place of METEOR alone.
METEOR_WEIGHT, JUDGE_WEIGHT = 0.25, 0.75


def combine(rewards: dict[str, torch.Tensor], weights: dict[str, float]) -> torch.Tensor:
    """(N,) weighted sum of reward components (N,), without NaN parts; NaN where all are.

    Components without a weight are measurements: they are logged and do not count.
    """
    parts = torch.stack([weights[name] * rewards[name] for name in weights], dim=-1)
    return torch.where(parts.isnan().all(-1), torch.nan, parts.nansum(-1))


def normalise_components(
    rewards: dict[str, torch.Tensor], weights: dict[str, float], num_generations: int
) -> dict[str, torch.Tensor]:
    """{component that counts: (N,) less its mean, by its std inside each group of G rows}.

    Then a weight says how much a component counts, whatever its spread: in a plain sum the one that
    spreads most decides. Of one that is equal in a group, nothing is left there; NaN stays NaN.
    """
    return {
        name: torch.where(values.isnan(), torch.nan, group_advantages(values, num_generations))
        for name, values in rewards.items()
        if name in weights
    }
