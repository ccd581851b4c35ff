"""Texts of unequal length: drawn once, how the sampler comes to end there, what that wastes.

Letters: P prompts, N rows, T tokens.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from rl_train.engine import StopText
from sa2va_hf.batches import Prompts

END = 0  # the token that ends an answer: the vocabulary's first, which the number 0 draws
LEAST = 1e-3  # of all other numbers: more than END's probability, of many tokens alike


def log_normal(num: int, mean: float, std: float, most: int, *seed: int) -> list[int]:
    """`num` lengths in 1..most of a log-normal distribution of this mean and std, then cut."""
    variance = math.log1p((std / mean) ** 2)
    drawn = np.random.default_rng(seed).lognormal(
        math.log(mean) - variance / 2, math.sqrt(variance), num
    )
    return np.clip(np.rint(drawn), 1, most).astype(int).tolist()


@dataclass(frozen=True)
class Asked:
    """One call's request to the language model."""

    prompts: Prompts
    valid: torch.Tensor | None = None  # (N, T) bool, what it sampled; None: only the prompts' read


@dataclass(frozen=True)
class Lengths:
    """Return the lengths of a rank's answers: `log_normal`, or all full without mean and std."""

    mean_std: tuple[float, ...]
    rank: int = 0

    def of(self, num_rows: int, most: int) -> list[int]:
        """Those of so many rows: the same in each step, so that steps can be compared."""
        if not self.mean_std:
            return [most] * num_rows
        return log_normal(num_rows, *self.mean_std, most, self.rank, num_rows)

    def set_end(self, stop: StopText):
        """Let a `StopText` see no end but END, and none at all where all answers are full."""
        stop.stopped = stop.table.shape[1]  # beyond all states
        stop.eos_id = END if self.mean_std else -1

    def numbers(
        self, num_rows: int, most: int, uniforms: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """(N, T) uniforms with which rows end where they are to.

        An answer of full length has no end. Greedy answers (None) become sampled ones.
        """
        if not self.mean_std:
            return uniforms
        if uniforms is None:
            drawn = np.random.default_rng([self.rank, num_rows]).random((num_rows, most))
            uniforms = torch.from_numpy(drawn)
        last = torch.tensor(self.of(num_rows, most))[:, None] - 1
        ends = (torch.arange(most) == last) & (last < most - 1)
        return self.without_end(uniforms).masked_fill(ends, 0.0)

    def without_end(self, uniforms: torch.Tensor | None) -> torch.Tensor | None:
        """The uniforms, of which none draws END where that is an end."""
        if uniforms is None or not self.mean_std:
            return uniforms
        return uniforms.clamp(min=LEAST)


def check_lengths(valid: torch.Tensor, expected: list[int]):
    """Assert that rows (N, T) are as long as expected, and T as the longest."""
    lengths = valid.sum(1).tolist()
    assert lengths == expected, f"answers of {lengths} tokens, not of {expected}"
    assert valid.shape[1] == max(expected), f"{valid.shape[1]} tokens decoded"


def wasted(asked: list[Asked]) -> float | None:
    """Share of the tokens decoded, rows x steps, that are no answer's; None if there are none."""
    valid = [one.valid for one in asked if one.valid is not None]
    decoded = sum(v.numel() for v in valid)
    return 1 - sum(int(v.sum()) for v in valid) / decoded if decoded else None
