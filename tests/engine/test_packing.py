"""Layouts of sequences that share a prompt, and the segments in which attention goes over them."""

import torch

from rl_train.engine.packing import (
    MAX_PROMPTS_PER_SEQUENCE,
    next_positions,
    pack,
    positions,
    shared_prefix_layout,
)
from rl_train.engine.varlen_attention import varlen_segments


def packed(mask, *args):
    return pack(mask, positions(mask), *args)


def shared(mask, lengths):
    return shared_prefix_layout(mask, positions(mask), lengths)


def test_no_more_prompts_than_allowed_share_a_sequence():
    layout = shared(torch.ones(20, 5, dtype=torch.long), [0] + [3] * 19).layout
    rest = 20 - 2 * MAX_PROMPTS_PER_SEQUENCE
    assert [int(part.max()) for part in layout.part] == [
        MAX_PROMPTS_PER_SEQUENCE,
        MAX_PROMPTS_PER_SEQUENCE,
        rest,
    ]
    part = shared(torch.ones(3, 5, dtype=torch.long), [0, 3, 2]).layout.part
    assert part[0, :11].tolist() == [0] * 2 + [1] * 3 + [2] * 3 + [3] * 3


def test_shared_layout():
    """Three prompts of 3, 4 and 2 tokens, of which the first two begin with 2 equal ones."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])
    found = shared(mask, [0, 2, 0])
    padding = [-1, -1, -1]
    assert found.layout.part.tolist() == [[0, 0, 1, 2, 2, *padding], [0, 0, *padding, *padding]]
    assert found.layout.position_ids[0, 0, :5].tolist() == [0, 1, 2, 2, 3]
    assert found.layout.position_ids[0, 1, :2].tolist() == [0, 1]
    assert found.source[0, :5].tolist() == [1, 2, 3, 6, 7]
    assert found.source[1, :2].tolist() == [10, 11]
    assert found.where[mask.bool()].tolist() == [0, 1, 2, 0, 1, 3, 4, 8, 9]
    assert found.tokens()[mask.bool()].tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]


def test_cache_layout():
    """Two prompts that share 2 tokens, one alone; then each a prefix of its own."""
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    layout = shared(mask, [0, 2, 0, 1])  # tokens [0 1 | 2 3 | 4 5 6] and [7 | 8 9 | 10]
    found = layout.cache_layout(1)
    assert (found.rows_per_prefix, found.rows.tolist()) == (2, [0, 1, 2, 3])
    assert found.prefix_lengths.tolist() == [2, 1] and found.prefixes.shape == (2, 2)
    assert found.prefixes[0].tolist() == [0, 1] and found.prefixes[1, 1:].tolist() == [7]
    assert found.rest_lengths.tolist() == [2, 3, 2, 1] and found.rests.shape == (4, 3)
    rests = [row[3 - n :].tolist() for row, n in zip(found.rests, found.rest_lengths)]
    assert rests == [[2, 3], [4, 5, 6], [8, 9], [10]]
    found = layout.cache_layout(3)
    assert (found.rows_per_prefix, found.rows.tolist()) == (3, list(range(12)))
    assert torch.equal(found.prefixes, layout.tokens()) and found.rests.shape == (4, 0)
    assert found.prefix_lengths.tolist() == [4, 5, 3, 2] and not found.rest_lengths.any()


def test_unused_rows_of_the_cache():
    """Groups of 3 and 1 prompts have 4 rows each; 4 unused ones are worth 2,000 tokens a prompt."""
    for size, rows_per_prefix, rows in ((2001, 4, [0, 1, 2, 4]), (2000, 1, [0, 1, 2, 3])):
        layout = shared(torch.ones(4, 2002, dtype=torch.long), [0, size, size, 0])
        found = layout.cache_layout(1)
        assert (found.rows_per_prefix, found.rows.tolist()) == (rows_per_prefix, rows)


def test_packed_layout():
    """Prompts of 3 and 2 tokens; rows of 3, 1 and 2, of which the last is not fed; a size of 8."""
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    ids = torch.tensor([[11, 12, 13], [21, 0, 0], [31, 32, 0]])
    valid = ids > 0
    found = packed(mask, torch.tensor([0, 0, 1]), ids, valid, 9)
    assert found.ids.tolist() == [[11, 12, 9, 9, 9], [31, 9, 9, 9, 9]]
    assert found.position_ids[0, 0, :5].tolist() == [0, 1, 2, 3, 4]
    assert found.position_ids[0, 1, 1:4].tolist() == [0, 1, 2]
    assert found.before[valid].tolist() == [2, 3, 4, 2, 2, 3]
    seen = found.bias(torch.float32, "cpu")[:, 0] == 0
    assert torch.equal(seen[0, :5, :5], torch.ones(5, 5).tril().bool())
    # Nobody sees the padding.
    assert seen[1, 1:4, :4].int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert seen.any(-1).all() and not seen[:, :3, 3:].any()


def test_positions_on_three_axes():
    """A prompt of text, an image of 1 x 2 x 2 and text, padded: what follows counts on from it."""
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    prompt = torch.tensor(
        [[[1, 0, 1, 1, 1, 1, 3]], [[1, 0, 1, 1, 2, 2, 3]], [[1, 0, 1, 2, 1, 2, 3]]]
    )
    assert next_positions(prompt, mask).tolist() == [4]
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    found = pack(mask, prompt, torch.tensor([0, 0]), ids, ids > 0, 0)
    assert torch.equal(found.position_ids[:, :, :7], prompt)
    assert found.position_ids[:, 0, 7:10].tolist() == [[4, 5, 4]] * 3
    layout = shared_prefix_layout(
        torch.cat([mask, mask]), torch.cat([prompt, prompt], 1), [0, 5]
    ).layout
    assert layout.part[0, :7].tolist() == [0, 0, 0, 0, 0, 1, 2]
    assert layout.position_ids[:, 0, :7].tolist() == [
        [*axis, 3] for axis in prompt[:, 0, 1:].tolist()
    ]


def test_rows_do_not_see_each_other():
    mask, ids = torch.ones(1, 2, dtype=torch.long), torch.arange(1, 7).view(2, 3)
    found = packed(mask, torch.tensor([0, 0]), ids, ids > 0, 0)
    bias = found.bias(torch.bfloat16, "cpu")
    assert bias.dtype == torch.bfloat16 and bias.shape == (1, 1, 8, 8)
    prompt, first, second = ([1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]), [], []
    first = [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]
    second = [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]
    assert (bias[0, 0, :6, :6] == 0).int().tolist() == [*prompt, *first, *second]
    assert found.position_ids[0, 0, :6].tolist() == [0, 1, 2, 3, 2, 3]


def test_runs_by_hand():
    """Prompts of 2 and 1 tokens behind padding; rows of 2 and 1 fed tokens, and one of 1."""
    found = varlen_segments(torch.tensor([[0, 0, 1, 1, 2], [-1, 0, 3, -1, -1]]))
    assert found.slots.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert found.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6, 7]
    assert found.cu_seqlens_k.tolist() == [0, 2, 6, 9, 10, 12]
    assert found.keys.tolist() == [0, 1] + [0, 1, 2, 3] + [0, 1, 4] + [5] + [5, 6]
    assert (found.max_seqlen_q, found.max_seqlen_k) == (2, 4)


def test_runs_are_the_bias():
    """A token sees the keys of its segment up to itself: what the bias says."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    ids = torch.ones(5, 6, dtype=torch.long)
    valid = torch.arange(6) < torch.tensor([6, 2, 0, 1, 5])[:, None]
    layout = packed(mask, torch.tensor([0, 0, 1, 1, 1]), ids, valid, 0)
    found = varlen_segments(layout.part)
    seen = torch.zeros(len(found.slots), len(found.slots), dtype=torch.bool)
    queries, keys = found.cu_seqlens_q.tolist(), found.cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(queries, queries[1:], keys, keys[1:]):
        for i in range(q1 - q0):  # the last query sees all keys
            seen[q0 + i, found.keys[k0 : k1 - (q1 - q0) + i + 1]] = True
    bias = torch.block_diag(*(layout.bias(torch.float32, "cpu")[:, 0] == 0))
    assert torch.equal(seen, bias[found.slots][:, found.slots])
