"""Attention of a decode step in Triton: its input from [q, k, v], and itself in two kernels.

The same functions as in `decode_torch`, which says what they take and return.

Letters: N = P*G rows, H query heads, K key-value heads, D head size, L prompt slots, T suffix
slots, r LoRA rank.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from rl_train.engine.linear_triton import (
    linear,
    norm_scale,
    product_of,
    program_rows,
    read_linear,
    read_lora_b,
    read_power,
)

if TYPE_CHECKING:
    from rl_train.engine.fused_weights import FusedLinears


MAX_SPLITS = 8  # pieces of a prompt's keys that run side by side
LOG2E = 1.4426950408889634


class Cache(NamedTuple):
    """Keys and values (.., slots, D)."""

    k: torch.Tensor
    v: torch.Tensor
    slots: int


class Turn(NamedTuple):
    """By which each row's q and k are turned."""

    cos: torch.Tensor  # (positions, D/2)
    sin: torch.Tensor
    position: torch.Tensor  # (N,)


class Heads(NamedTuple):
    """What the kernels here are compiled for."""

    H: int
    K: int
    D: int
    G: int = 0  # of a prompt
    SPLITS: int = 0  # of a prompt's keys
    QUERIES: int = 0  # of a program
    KEYS: int = 0  # that it reads together


@triton.jit
def _rotate_and_store(
    p, power, eps, bias, turn, q, own, step, S: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr
):
    """One head of q, k or v; a program's columns are halves of it, which turn together."""
    H: tl.constexpr = M.H
    K: tl.constexpr = M.K
    D: tl.constexpr = M.D
    head = tl.program_id(0)
    rows = (tl.program_id(1) * S.ROWS + tl.arange(0, S.ROWS)).to(tl.int64)
    half, keys, values = tl.arange(0, D // 2), own.k, own.v
    # Where LoRA A's outputs of q, k or v begin.
    inner = (H + 2 * K) * D + ((head >= H).to(tl.int32) + (head >= H + K).to(tl.int32)) * S.RANK
    column = head * D + half
    dtype = p.y.dtype.element_ty
    there = (rows < p.num_rows)[:, None]
    stored = ((rows[:, None] * K + (head - H) % K) * own.slots + tl.load(step)) * D
    place = tl.load(turn.position + rows, mask=rows < p.num_rows, other=0)
    at = place[:, None] * (D // 2) + half[None, :]
    shares = read_power(power, rows, p.num_rows, S)
    first, a = read_linear(p, p.y, rows, column, inner, S)
    second, _ = read_linear(p, p.y, rows, column + D // 2, inner, S)
    first_b, second_b = read_lora_b(p, column, S), read_lora_b(p, column + D // 2, S)
    c = tl.load(turn.cos + at, mask=there, other=0.0).to(tl.float32)
    s = tl.load(turn.sin + at, mask=there, other=0.0).to(tl.float32)
    scale = norm_scale(shares, eps)
    first = linear(p, first, a, first_b, S) * scale
    second = linear(p, second, a, second_b, S) * scale
    if BIAS:
        first += tl.load(bias + column).to(tl.float32)[None, :]
        second += tl.load(bias + column + D // 2).to(tl.float32)[None, :]
    first = first.to(dtype).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    if head < H + K:
        first, second = first * c - second * s, second * c + first * s
    target = q + (rows[:, None] * H + head) * D
    if head >= H + K:
        target = values + stored
    elif head >= H:
        target = keys + stored
    tl.store(target + half[None, :], first.to(dtype), mask=there)
    tl.store(target + half[None, :] + D // 2, second.to(dtype), mask=there)


def rotate_and_store(
    y: torch.Tensor,
    power: torch.Tensor,
    eps: float,
    qkv: "FusedLinears",
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: torch.Tensor,
):
    n, num_kv, slots, size = keys.shape
    heads = sum(qkv.sizes) // size
    product, sizes = product_of(y, qkv, power)
    q, shape = y.new_empty(n, heads - 2 * num_kv, size), Heads(heads - 2 * num_kv, num_kv, size)
    bias, own = y if qkv.bias is None else qkv.bias, Cache(keys, values, slots)
    turn, grid = Turn(cos, sin, position), (heads, triton.cdiv(n, sizes.ROWS))
    _rotate_and_store[grid](
        product, power, eps, bias, turn, q, own, step, sizes, shape, qkv.bias is not None
    )
    return q


@triton.jit
def _attend(
    q, prefix, own, pad, done, step, parts, sizes, scale, num_prompts, chunk, M: tl.constexpr
):
    """Attention of QUERIES queries over a stretch of the keys they share: a prompt's or a row's."""
    H: tl.constexpr = M.H
    K: tl.constexpr = M.K
    D: tl.constexpr = M.D
    QUERIES: tl.constexpr = M.QUERIES
    PER: tl.constexpr = M.H // M.K  # query heads of a key-value head
    item, kv = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = (M.G * PER + QUERIES - 1) // QUERIES
    own_blocks: tl.constexpr = (PER + QUERIES - 1) // QUERIES
    num_prefix = num_prompts * blocks * M.SPLITS
    if item < num_prefix:
        prompt, split = item // M.SPLITS // blocks, item % M.SPLITS
        query = item // M.SPLITS % blocks * QUERIES + tl.arange(0, QUERIES)
        row, there = prompt * M.G + query // PER, query < M.G * PER
        empty = tl.load(pad + prompt).to(tl.int32)
        low, high = tl.maximum(split * chunk, empty), tl.minimum((split + 1) * chunk, prefix.slots)
        going = tl.load(done + row, mask=there, other=1) == 0
        high = tl.where(tl.max(going.to(tl.int32)) > 0, high, low)
        base = (prompt.to(tl.int64) * K + kv) * prefix.slots * D
        keys, values = prefix.k + base, prefix.v + base
    else:
        mine = item - num_prefix
        query = mine % own_blocks * QUERIES + tl.arange(0, QUERIES)
        row, there, split = mine // own_blocks + query // PER, query < PER, M.SPLITS
        high = tl.load(step).to(tl.int32) + 1
        low = tl.where(tl.load(done + mine // own_blocks) == 0, 0, high - 1)
        base = ((mine // own_blocks).to(tl.int64) * K + kv) * own.slots * D
        keys, values = own.k + base, own.v + base
    d, slot = tl.arange(0, D), tl.arange(0, M.KEYS)
    head = row.to(tl.int64) * H + kv * PER + query % PER
    vectors = tl.load(q + head[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
    most = tl.full((QUERIES,), -1e30, tl.float32)  # not -inf: differences of two are numbers
    total, mixed = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, D), tl.float32)
    for start in range(0, high - low, M.KEYS):  # from low Triton 3.4 and 3.5 crash
        at = (low + start + slot) * D
        kept = start + slot < high - low
        k = tl.load(keys + at[None, :] + d[:, None], mask=kept[None, :], other=0.0)  # (D, KEYS)
        v = tl.load(values + at[:, None] + d[None, :], mask=kept[:, None], other=0.0)  # (KEYS, D)
        score = tl.dot(vectors, k, input_precision="ieee") * scale
        score = tl.where(kept[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, axis=1))
        p, shrink = tl.exp2(score - higher[:, None]), tl.exp2(most - higher)
        total, most = total * shrink + tl.sum(p, axis=1), higher
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    at = head * (M.SPLITS + 1) + split
    tl.store(parts + at[:, None] * D + d[None, :], mixed, mask=there[:, None])
    tl.store(sizes + at * 2, most, mask=there)
    tl.store(sizes + at * 2 + 1, total, mask=there)


@triton.jit
def _merge(parts, sizes, out, D: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of NUM parts of one query's attention.

    Each comes with its highest score and its sum of exponentials.
    """
    head, part, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, D)
    at, kept = head * NUM + part, part < NUM
    most = tl.load(sizes + at * 2, mask=kept, other=-1e30)
    weight = tl.exp2(most - tl.max(most))
    total = tl.sum(weight * tl.load(sizes + at * 2 + 1, mask=kept, other=0.0))
    each = tl.load(parts + at[:, None] * D + d[None, :], mask=kept[:, None], other=0.0)
    mixed = tl.sum(each * weight[:, None], axis=0) / total
    tl.store(out + head * D + d, mixed.to(out.dtype.element_ty))


def attend(
    q: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pad: torch.Tensor,
    done: torch.Tensor,
    step: torch.Tensor,
):
    (n, num_heads, size), (num_prompts, num_kv, slots, _) = q.shape, prefix_keys.shape
    group, per = n // num_prompts, num_heads // num_kv
    num_keys = 128 // q.element_size()  # by shared memory
    queries = program_rows(group * per)
    splits = min(MAX_SPLITS, triton.cdiv(slots, 128))
    chunk = triton.cdiv(triton.cdiv(slots, splits), num_keys) * num_keys
    parts = q.new_empty(n, num_heads, splits + 1, size, dtype=torch.float32)
    sums = q.new_empty(n, num_heads, splits + 1, 2, dtype=torch.float32)
    items = num_prompts * triton.cdiv(group * per, queries) * splits + n * triton.cdiv(per, queries)
    prefix, own = Cache(prefix_keys, prefix_values, slots), Cache(keys, values, keys.shape[2])
    scale = size**-0.5 * LOG2E
    shape = Heads(num_heads, num_kv, size, group, splits, queries, num_keys)
    _attend[(items, num_kv)](
        q, prefix, own, pad, done, step, parts, sums, scale, num_prompts, chunk, shape
    )
    out, block = torch.empty_like(q), triton.next_power_of_2(splits + 1)
    _merge[(n * num_heads,)](parts, sums, out, D=size, NUM=splits + 1, BLOCK=block, num_warps=1)
    return out.view(n, -1)
