"""Random numbers of rollouts, each row's from (seed, step, task, sample, generation) alone."""

import numpy as np
import torch


class RowRNG:
    """Random numbers of N = B*G rows of samples `indices`: uniforms for tokens, then normals."""

    def __init__(self, seed: int, step: int, task: int, indices: list[int], num_generations: int):
        # One generator a row, in the order of rows: i*G+j.
        self.generators = [
            np.random.default_rng([seed, step, task, index, generation])
            for index in indices
            for generation in range(num_generations)
        ]

    def uniforms(self, num_tokens: int) -> torch.Tensor:
        """Return (N, num_tokens) float64 in [0, 1), one number for each token to sample."""
        return torch.from_numpy(np.stack([rng.random(num_tokens) for rng in self.generators]))

    def normals(self, rows: list[int], dim: int) -> torch.Tensor:
        """Return (M, dim) float32 standard normals, the m-th by the generator of row rows[m]."""
        noise = [self.generators[row].standard_normal(dim, dtype=np.float32) for row in rows]
        return torch.from_numpy(np.stack(noise)) if noise else torch.zeros(0, dim)
