"""Texts of unequal length: sampled lengths, uniforms by which answers end there, waste.

Letters: P prompts, N rows, T tokens.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from rl_train.engine import StopText
from sa2va_hf.batches import Prompts

END = 0  # the token that ends an answer: the vocabulary's first, which the uniform 0 samples
# Smallest uniform that does not sample END, whose probability among many tokens alike is below it
MIN_UNIFORM = 1e-3


def log_normal(num: int, mean: float, std: float, longest: int, *seed: int) -> list[int]:
    """Sample `num` lengths of a log-normal distribution of this mean and std, cut to 1..longest."""
    # Variance of the logarithm; its mean is lowered by half of it, so that the mean is `mean`.
    variance = math.log1p((std / mean) ** 2)
    lengths = np.random.default_rng(seed).lognormal(
        math.log(mean) - variance / 2, math.sqrt(variance), num
    )
    return np.clip(np.rint(lengths), 1, longest).astype(int).tolist()


@dataclass(frozen=True)
class Request:
    """One call of the language model."""

    prompts: Prompts
    valid: torch.Tensor | None = None  # (N, T) bool, what it sampled; None: only the prompts' read


@dataclass(frozen=True)
class Lengths:
    """Lengths of a rank's answers: `log_normal`, or all full without mean and std."""

    mean_std: tuple[float, ...]
    rank: int = 0

    def of(self, num_rows: int, longest: int) -> list[int]:
        """Return the lengths of so many rows: the same in each step, so that steps compare."""
        if not self.mean_std:
            return [longest] * num_rows
        return log_normal(num_rows, *self.mean_std, longest, self.rank, num_rows)

    def set_end(self, stop: StopText):
        """Let a `StopText` see no end but END, and none at all where all answers are full."""
        stop.first_stop_state = stop.table.shape[1]  # beyond all states
        stop.eos_id = END if self.mean_std else -1

    def forced_uniforms(
        self, num_rows: int, longest: int, uniforms: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return uniforms (N, T) with which rows end at their lengths.

        An answer of full length has no end. Greedy answers (None) become sampled ones.
        """
        if not self.mean_std:
            return uniforms
        if uniforms is None:
            rng = np.random.default_rng([self.rank, num_rows])
            uniforms = torch.from_numpy(rng.random((num_rows, longest)))
        last = torch.tensor(self.of(num_rows, longest))[:, None] - 1  # (N, 1)
        ends = (torch.arange(longest) == last) & (last < longest - 1)  # (N, T)
        return self.without_end(uniforms).masked_fill(ends, 0.0)

    def without_end(self, uniforms: torch.Tensor | None) -> torch.Tensor | None:
        """Return the uniforms, raised so that none samples END where that ends an answer."""
        if uniforms is None or not self.mean_std:
            return uniforms
        return uniforms.clamp(min=MIN_UNIFORM)


def check_lengths(valid: torch.Tensor, expected: list[int]):
    """Assert that rows (N, T) are as long as expected, and T as the longest."""
    lengths = valid.sum(1).tolist()
    assert lengths == expected, f"answers of {lengths} tokens, not of {expected}"
    assert valid.shape[1] == max(expected), f"{valid.shape[1]} tokens decoded"


def wasted_fraction(requests: list[Request]) -> float | None:
    """Return the fraction of decoded tokens (rows x steps) that are no answer's, or None."""
    valid = [request.valid for request in requests if request.valid is not None]
    decoded = sum(v.numel() for v in valid)
    return 1 - sum(int(v.sum()) for v in valid) / decoded if decoded else None
