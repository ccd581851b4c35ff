"""What an answer's tokens cost, as components of every task's reward.

Letters: N rows, T --max_completion_length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True)
class LengthTerm:
    """A component that follows from an answer's tokens; stands where a `UserReward` does."""

    name: str
    weight: float
    of: Callable  # (N,) tokens -> (N,) in [-1, 0]

    def __call__(self, completions: list[str], *, num_tokens: list[int], **_) -> torch.Tensor:
        return self.of(torch.tensor(num_tokens, dtype=torch.float32))


def overlong(num_tokens: torch.Tensor, longest: int, buffer: int) -> torch.Tensor:
    """(N,) 0 up to longest - buffer tokens, from there linearly to -1 (DAPO, eq. 13)."""
    return ((longest - buffer - num_tokens) / buffer).clamp(-1, 0)


def distance(num_tokens: torch.Tensor, longest: int, target: int) -> torch.Tensor:
    """(N,) -|tokens - target| / longest; of target 0 every token costs the same."""
    return -(num_tokens - target).abs() / longest


def length_terms(
    longest: int, overlong_buffer: int = 0, length_weight: float = 0.0, target_length: int = 0
) -> list[LengthTerm]:
    """The terms that the flags of these names ask for; longest: T."""
    terms = []
    if overlong_buffer:
        of = partial(overlong, longest=longest, buffer=overlong_buffer)
        terms.append(LengthTerm("overlong", 1.0, of))
    if length_weight:
        of = partial(distance, longest=longest, target=target_length)
        terms.append(LengthTerm("length", length_weight, of))
    return terms
