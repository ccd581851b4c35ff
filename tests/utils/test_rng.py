"""The random numbers of a rollout: each row's own, whatever else is in the batch."""

import numpy as np
import torch

from rl_train.utils.rng import RowRNG


def uniforms_and_normals(seed, step, task, indices, num_generations, num_tokens, dim):
    """(N, T) and (N, T, D), drawn in the order of a rollout: all normals that rows may use."""
    draws = RowRNG(seed, step, task, indices, num_generations)
    uniforms = draws.uniforms(num_tokens)
    rows = [row for row in range(len(uniforms)) for _ in range(num_tokens)]
    return uniforms, draws.normals(rows, dim).view(len(uniforms), num_tokens, dim)


def test_every_row_and_token_has_numbers_of_its_own():
    uniforms, normals = uniforms_and_normals(0, 3, 1, list(range(100)), 5, 6, 16)
    assert uniforms.shape == (500, 6) and normals.shape == (500, 6, 16)
    assert uniforms.dtype == torch.float64 and normals.dtype == torch.float32
    assert len(uniforms.unique()) == uniforms.numel()
    assert 0 <= uniforms.min() and uniforms.max() < 1
    assert abs(uniforms.mean() - 0.5) < 0.02
    assert abs(normals.mean()) < 0.02 and abs(normals.std() - 1) < 0.02
    for numbers in (uniforms, normals):  # of generations, over samples
        of_generation = numbers.view(100, 5, -1).transpose(0, 1).flatten(1).double()
        assert (torch.corrcoef(of_generation) - torch.eye(5)).abs().max() < 0.15


def test_a_rows_numbers_are_its_own():
    """Whatever else is in the batch, and however many generations follow."""
    sizes = (6, 16)
    together = uniforms_and_normals(0, 3, 1, [7, 2, 9], 4, *sizes)
    alone = uniforms_and_normals(0, 3, 1, [2], 4, *sizes)
    for many, one in zip(together, alone):
        assert torch.equal(many[4:8], one)
    for many, few in zip(alone, uniforms_and_normals(0, 3, 1, [2], 3, *sizes)):
        assert torch.equal(many[:3], few)
    for seed, step, task, index in ((1, 3, 1, 2), (0, 4, 1, 2), (0, 3, 0, 2), (0, 3, 1, 3)):
        other = uniforms_and_normals(seed, step, task, [index], 4, *sizes)
        assert not any(torch.equal(a, b) for a, b in zip(alone, other))
    assert torch.equal(RowRNG(0, 3, 1, [2], 4).uniforms(6), alone[0])  # with no normals after them


def test_normals_are_drawn_for_each_action_and_are_those_of_a_whole_block():
    """The k-th of a row equals the k-th of a (T, D) block that its generator would draw at once."""
    T, D, rows = 6, 16, [0, 2, 2, 2, 3, 5, 5]
    draws = RowRNG(4, 3, 1, [8, 1], 3)
    uniforms, drawn = draws.uniforms(T), draws.normals(rows, D)
    blocks = []
    for row in range(6):
        generator = np.random.default_rng([4, 3, 1, (8, 1)[row // 3], row % 3])
        assert uniforms[row].tolist() == generator.random(T).tolist()
        blocks.append(torch.from_numpy(generator.standard_normal((T, D), dtype=np.float32)))
    ordinals = [0, 0, 1, 2, 0, 0, 1]
    expected = torch.stack([blocks[row][k] for row, k in zip(rows, ordinals)])
    assert torch.equal(drawn, expected)
    # What a row has not used is still there for its next one; rows that used none have lost none.
    assert torch.equal(draws.normals([2, 4], D), torch.stack([blocks[2][3], blocks[4][0]]))


def test_no_action_draws_nothing():
    draws = RowRNG(0, 0, 0, [0, 1], 2)
    assert draws.normals([], 16).shape == (0, 16)
    assert torch.equal(draws.uniforms(3), RowRNG(0, 0, 0, [0, 1], 2).uniforms(3))
