"""From components to a row's reward: a weighted sum."""

import torch


def combine(rewards: dict[str, torch.Tensor], weights: dict[str, float]) -> torch.Tensor:
    """(N,) weighted sum of reward components (N,), without NaN parts; NaN where all are.

    Components without a weight are measurements: they are logged and do not count.
    """
    parts = torch.stack([weights[name] * rewards[name] for name in weights], dim=-1)
    return torch.where(parts.isnan().all(-1), torch.nan, parts.nansum(-1))
