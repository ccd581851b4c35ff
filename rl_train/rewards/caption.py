"""How METEOR and an LLM judge weigh in the caption reward, and rows that it does not score."""

from collections.abc import Sequence

import torch
from torch import Tensor

METEOR_WEIGHT, JUDGE_WEIGHT = 0.25, 0.75


def without_rows(
    rewards: dict[str, Tensor], names: Sequence[str], rows: Tensor
) -> dict[str, Tensor]:
    """Return `rewards` with the components `names` NaN at `rows` (N,) bool.

    `combine.combine` leaves NaN components out of a row's sum; with all weighted components NaN
    the row itself is not scored.
    """
    return rewards | {name: torch.where(rows, torch.nan, rewards[name]) for name in names}
