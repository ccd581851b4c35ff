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
        """Return the fraction of the base rate at a step."""
        update = step * updates_per_step
        if update < num_warmup:
            # Above 0 at the first update, so that it is not lost.
            return (update + 1) / (num_warmup + 1)
        progress = min((update - num_warmup) / max(num_updates - num_warmup, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def follow_new_length(scheduler: torch.optim.lr_scheduler.LambdaLR):
    """Set the learning rates to what the scheduler's own function gives at its position.

    A scheduler that was loaded has the rates of the run that it was saved by, which may have been
    of another length.
    """
    rates = [
        base_rate * factor(scheduler.last_epoch)
        for base_rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate
    scheduler._last_lr = rates  # what `get_last_lr` returns
