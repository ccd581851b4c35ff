"""Choose among G sampled answers of a prompt.

Letters: B prompts, G answers of each, N = B*G rows, T tokens.
"""

import torch

from rl_train.engine import Completions


def mean_logps(completed: Completions, num_generations: int) -> torch.Tensor:
    """Return (B, G) mean log-probs of the sampled tokens of each answer, its end included."""
    sums = torch.where(completed.valid, completed.logp.cpu(), 0.0).sum(1)  # (N,)
    return (sums / completed.valid.sum(1)).view(-1, num_generations)


def pick_best(values: torch.Tensor, by: torch.Tensor) -> list[float]:
    """Return the B `values` (B, G) at the largest `by` (B, G) of each row, the first of equals."""
    return values.gather(1, by.argmax(1, keepdim=True))[:, 0].tolist()
