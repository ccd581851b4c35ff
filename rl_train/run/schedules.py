"""Learning rate as a function of the update."""

import math

import torch


def cosine_schedule(
    optimizer: torch.optim.Optimizer, num_updates: int, warmup_ratio: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm up linearly over the first fraction of the updates, then follow a cosine to 0."""
    num_warmup = math.ceil(num_updates * warmup_ratio)

    def factor(update: int) -> float:
        if update < num_warmup:
            return (update + 1) / (num_warmup + 1)
        progress = min((update - num_warmup) / max(num_updates - num_warmup, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
