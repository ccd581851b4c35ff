"""The cost of an answer's tokens, as a component of every task's reward (--overlong_buffer).

Letters: N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class OverlongPenalty:
    """0 up to longest - buffer tokens, from there linearly to -1 (DAPO, eq. 13).

    Stands where a `UserReward` does.
    """

    longest: int  # --max_completion_length
    buffer: int  # --overlong_buffer, in tokens
    name: ClassVar[str] = "overlong"
    weight: ClassVar[float] = 1.0

    def __call__(
        self, completions: list[str], *, num_tokens: list[int], **other_columns: Sequence
    ) -> torch.Tensor:
        """Return the penalty of each answer, (N,) in [-1, 0]."""
        tokens = torch.tensor(num_tokens, dtype=torch.float32)
        return ((self.longest - self.buffer - tokens) / self.buffer).clamp(-1, 0)
