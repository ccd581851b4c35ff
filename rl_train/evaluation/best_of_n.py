"""Which of G sampled answers of a prompt is kept, and what it is worth.

Letters: B prompts, G answers of each, N = B*G rows, T tokens.
"""

import torch

from rl_train.engine import Completions


def mean_logps(completed: Completions, num_generations: int) -> torch.Tensor:
    """(B, G) mean log-prob of each answer's tokens, its end among them, as they were sampled."""
    sums = torch.where(completed.valid, completed.logp.cpu(), 0.0).sum(1)  # (N,)
    return (sums / completed.valid.sum(1)).view(-1, num_generations)


def pick_best(values: torch.Tensor, by: torch.Tensor) -> list[float]:
    """Of values (B, G) those of the answers with the largest `by` (B, G), of equals the first."""
    return values.gather(1, by.argmax(1, keepdim=True))[:, 0].tolist()
