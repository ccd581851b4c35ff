"""Learning rate and EMA decay as functions of the update."""

import math

import torch

from rl_train.config.grpo_config import OptimConfig
from rl_train.roles import half_life_decay


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


def teacher_decay(config: OptimConfig, max_steps: int, step: int, iteration: int) -> float:
    """Return the EMA's decay at an update of a step.

    All updates before it count, as in the learning rate's schedule, also those of steps in which
    nothing was learnt.
    """
    if config.ema_decay is not None:
        return config.ema_decay
    half_life = config.ema_half_life * max_steps * config.num_iterations
    return half_life_decay(step * config.num_iterations + iteration, half_life)
