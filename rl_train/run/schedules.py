"""Learning rate as a function of the step."""

import math

import torch


def cosine_schedule(
    optimizer: torch.optim.Optimizer,
    max_steps: int,
    warmup_ratio: float,
    updates_per_step: int = 1,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm up linearly over the first fraction of all updates, then follow a cosine to 0.

    The rate is that of a step's first update, for all of its `updates_per_step`.
    """
    num_updates = max_steps * updates_per_step
    num_warmup = math.ceil(num_updates * warmup_ratio)

    def factor(step: int) -> float:
        update = step * updates_per_step
        if update < num_warmup:
            return (update + 1) / (num_warmup + 1)
        progress = min((update - num_warmup) / max(num_updates - num_warmup, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
