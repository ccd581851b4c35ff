"""Attention of a token in Triton: a kernel makes the heads of [q, k, v], two attend.

The functions are those of `layers` and `decode_torch`, where their arguments are documented.

Letters: N = P*G rows of P prefixes, H query heads, K key-value heads, D head size, r LoRA rank.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rl_train.engine.decode_torch import TokenCache
from rl_train.engine.layers import Norm
from rl_train.engine.linear_triton import (
    Projected,
    at_least_16,
    linear,
    norm_scale,
    product_of,
    program_rows,
    read_linear,
    read_lora_b,
    read_power,
)

MAX_SPLITS = 8  # ranges of a prefix's keys that programs process in parallel
LOG2E = 1.4426950408889634


class Cache(NamedTuple):
    """Keys and values (.., slots, D)."""

    k: torch.Tensor
    v: torch.Tensor
    slots: int


class Rotation(NamedTuple):
    """Rotary embedding of each row's q and k."""

    cos: torch.Tensor  # (positions, D/2)
    sin: torch.Tensor
    position: torch.Tensor  # (N,)


class HeadNorms(NamedTuple):
    """RMSNorms of each head of q and of k, before the rotation."""

    q: torch.Tensor  # (D,)
    k: torch.Tensor  # (D,)
    eps: float


class Heads(NamedTuple):
    """Constants of the compiled kernels."""

    H: int
    K: int
    D: int
    G: int = 0  # rows of a prefix
    SPLITS: int = 0  # of a prefix's keys
    QUERIES: int = 0  # of a program that reads a prefix's keys
    OWN_QUERIES: int = 0  # of one that reads a row's own
    KEYS: int = 0  # that a program reads at a time


@triton.jit
def _heads(
    product,
    power,
    eps,
    bias,
    rotation,
    q,
    suffix,
    slot,
    norms,
    S: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Compute a head of q, k or v and store it; its halves, which rotate together, are columns."""
    H: tl.constexpr = M.H
    K: tl.constexpr = M.K
    D: tl.constexpr = M.D
    head = tl.program_id(0)
    rows = (tl.program_id(1) * S.ROWS + tl.arange(0, S.ROWS)).to(tl.int64)
    half, keys, values = tl.arange(0, D // 2), suffix.k, suffix.v
    # Where LoRA A's outputs of q, k or v begin.
    inner = (H + 2 * K) * D + ((head >= H).to(tl.int32) + (head >= H + K).to(tl.int32)) * S.RANK
    column = head * D + half
    dtype = product.y.dtype.element_ty
    valid = (rows < product.num_rows)[:, None]
    # Slot of a k or v head in the cache; of a q head it is not used.
    stored = ((rows[:, None] * K + (head - H) % K) * suffix.slots + tl.load(slot)) * D
    position = tl.load(rotation.position + rows, mask=rows < product.num_rows, other=0)
    at = position[:, None] * (D // 2) + half[None, :]
    summands = read_power(power, rows, product.num_rows, S)
    first, a = read_linear(product, product.y, rows, column, inner, S)
    second, _ = read_linear(product, product.y, rows, column + D // 2, inner, S)
    first_b, second_b = read_lora_b(product, column, S), read_lora_b(product, column + D // 2, S)
    c = tl.load(rotation.cos + at, mask=valid, other=0.0).to(tl.float32)
    s = tl.load(rotation.sin + at, mask=valid, other=0.0).to(tl.float32)
    scale = norm_scale(summands, eps)
    first = linear(product, first, a, first_b, S) * scale
    second = linear(product, second, a, second_b, S) * scale
    if BIAS:
        first += tl.load(bias + column).to(tl.float32)[None, :]
        second += tl.load(bias + column + D // 2).to(tl.float32)[None, :]
    # Rounded before the rotation, as the model's projections are.
    first = first.to(dtype).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    if NORMS:
        if head < H + K:  # v has no norm
            weight = norms.q + half
            if head >= H:
                weight = norms.k + half
            squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
            of_head = tl.rsqrt(squares / D + norms.eps)[:, None]
            # Rounded before the weight and behind it, as by the model.
            first = (first * of_head).to(dtype).to(tl.float32)
            second = (second * of_head).to(dtype).to(tl.float32)
            first = (first * tl.load(weight).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
            weight += D // 2
            second = (second * tl.load(weight).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    if head < H + K:  # v is not rotated
        first, second = first * c - second * s, second * c + first * s
    target = q + (rows[:, None] * H + head) * D
    if head >= H + K:
        target = values + stored
    elif head >= H:
        target = keys + stored
    tl.store(target + half[None, :], first.to(dtype), mask=valid)
    tl.store(target + half[None, :] + D // 2, second.to(dtype), mask=valid)


def heads(
    cache: TokenCache, projected: Projected, norms: tuple[Norm, ...], rotation: Rotation
) -> tuple[torch.Tensor, None, None]:
    """Compute `layers.heads`; k and v are stored in the cache."""
    (n, num_kv, slots, size), normed = cache.keys.shape, projected.normed
    qkv = projected.linears
    num_heads = sum(qkv.sizes) // size  # of q, k and v
    # There are few heads: programs of few rows and many warps take less time.
    product, sizes = product_of(projected, normed.power, most_rows=16)
    shape = Heads(num_heads - 2 * num_kv, num_kv, size)
    q = normed.x.new_empty(n, shape.H, size)
    # Without a bias or norms any pointer will do: the kernel does not read it.
    head_norms = HeadNorms(q, q, 0.0)
    if norms:
        head_norms = HeadNorms(*(norm.weight for norm in norms), norms[0].eps)
    _heads[(num_heads, triton.cdiv(n, sizes.ROWS))](
        product,
        normed.power,
        normed.eps,
        q if qkv.bias is None else qkv.bias,
        rotation,
        q,
        Cache(cache.keys, cache.values, slots),
        cache.slot,
        head_norms,
        sizes,
        shape,
        BIAS=qkv.bias is not None,
        NORMS=bool(norms),
        num_warps=8,
    )
    return q, None, None


@triton.jit
def _attend(
    q,
    prefix,
    suffix,
    pad,
    own_pad,
    done,
    slot,
    partials,
    sizes,
    scale,
    num_prefixes,
    chunk,
    M: tl.constexpr,
):
    """Compute attention of some queries over a range of keys: a prefix's or a row's own."""
    blocks: tl.constexpr = (M.G * (M.H // M.K) + M.QUERIES - 1) // M.QUERIES
    item, num_shared = tl.program_id(0), num_prefixes * blocks * M.SPLITS
    # Programs of prefixes' keys come first, then those of each row's own.
    if item < num_shared:
        block = item // M.SPLITS
        _attend_to_prefix(
            q,
            prefix,
            pad,
            done,
            partials,
            sizes,
            scale,
            block // blocks,
            block % blocks,
            item % M.SPLITS,
            chunk,
            M,
        )
    else:
        row = item - num_shared
        _attend_to_own(q, suffix, own_pad, done, slot, partials, sizes, scale, row, M)


@triton.jit
def _attend_to_prefix(
    q, prefix, pad, done, partials, sizes, scale, owner, block, split, chunk, M: tl.constexpr
):
    """Attend with QUERIES of the prefix's queries to one of SPLITS ranges of its keys."""
    PER: tl.constexpr = M.H // M.K  # query heads of a key-value head
    QUERIES: tl.constexpr = M.QUERIES
    kv = tl.program_id(1)
    query = block * QUERIES + tl.arange(0, QUERIES)
    row, valid = owner * M.G + query // PER, query < M.G * PER
    empty = tl.load(pad + owner).to(tl.int32)
    low, high = tl.maximum(split * chunk, empty), tl.minimum((split + 1) * chunk, prefix.slots)
    unfinished = tl.load(done + row, mask=valid, other=1) == 0
    # Keys for which no row is left are not read.
    high = tl.where(tl.max(unfinished.to(tl.int32)) > 0, high, low)
    first_slot = (owner.to(tl.int64) * M.K + kv) * prefix.slots
    head = row.to(tl.int64) * M.H + kv * PER + query % PER
    _attend_to_range(
        q, prefix, partials, sizes, scale, head, valid, split, first_slot, low, high, M
    )


@triton.jit
def _attend_to_own(q, suffix, own_pad, done, slot, partials, sizes, scale, row, M: tl.constexpr):
    """Attend with a row's queries, at most OWN_QUERIES, to its own keys."""
    PER: tl.constexpr = M.H // M.K
    kv, query = tl.program_id(1), tl.arange(0, M.OWN_QUERIES)
    high = tl.load(slot).to(tl.int32) + 1
    # A row that is done reads its newest slot alone, so that its sum is not 0.
    low = tl.where(tl.load(done + row) == 0, tl.load(own_pad + row), high - 1)
    first_slot = (row.to(tl.int64) * M.K + kv) * suffix.slots
    head, split = row.to(tl.int64) * M.H + kv * PER + query, M.SPLITS
    valid = query < PER
    _attend_to_range(
        q, suffix, partials, sizes, scale, head, valid, split, first_slot, low, high, M
    )


@triton.jit
def _attend_to_range(
    q,
    cache,
    partials,
    sizes,
    scale,
    head,
    valid,
    split,
    first_slot,
    low,
    high,
    M: tl.constexpr,
):
    """Attend with the queries `head` to the keys from low to high behind the cache's `first_slot`.

    The result is number `split` of the partial ones.
    """
    D: tl.constexpr = M.D
    QUERIES: tl.constexpr = head.shape[0]
    d, key = tl.arange(0, D), tl.arange(0, M.KEYS)
    keys, values = cache.k + first_slot * D, cache.v + first_slot * D
    vectors = tl.load(q + head[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    highest = tl.full((QUERIES,), -1e30, tl.float32)  # not -inf, whose differences are NaN
    total, mixed = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, D), tl.float32)
    for start in range(0, high - low, M.KEYS):  # Triton 3.4 and 3.5 crash on a range from low
        at = (low + start + key) * D
        in_range = start + key < high - low
        k = tl.load(keys + at[None, :] + d[:, None], mask=in_range[None, :], other=0.0)  # (D, KEYS)
        v = tl.load(
            values + at[:, None] + d[None, :], mask=in_range[:, None], other=0.0
        )  # (KEYS, D)
        score = tl.dot(vectors, k, input_precision="ieee") * scale
        score = tl.where(in_range[None, :], score, float("-inf"))
        # Online softmax: what is summed so far is scaled to the new highest score.
        higher = tl.maximum(highest, tl.max(score, axis=1))
        p, shrink = tl.exp2(score - higher[:, None]), tl.exp2(highest - higher)
        total, highest = total * shrink + tl.sum(p, axis=1), higher
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    # Unnormalised: `_merge` divides by the sum over all partial results.
    at = head * (M.SPLITS + 1) + split
    tl.store(partials + at[:, None] * D + d[None, :], mixed, mask=valid[:, None])
    tl.store(sizes + at * 2, highest, mask=valid)
    tl.store(sizes + at * 2 + 1, total, mask=valid)


@triton.jit
def _merge(partials, sizes, out, D: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Merge NUM partial results of one query's attention.

    Each has its highest score and its sum of exponentials.
    """
    head, part, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, D)
    at, valid = head * NUM + part, part < NUM
    highest = tl.load(sizes + at * 2, mask=valid, other=-1e30)
    weight = tl.exp2(highest - tl.max(highest))
    total = tl.sum(weight * tl.load(sizes + at * 2 + 1, mask=valid, other=0.0))
    vectors = tl.load(partials + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    mixed = tl.sum(vectors * weight[:, None], axis=0) / total
    tl.store(out + head * D + d, mixed.to(out.dtype.element_ty))


def attend(cache: TokenCache, q: torch.Tensor, k: None, v: None) -> torch.Tensor:
    """Compute `decode_torch.attend`; `heads` stored k and v."""
    prefix_keys, prefix_values, keys, values, pad, own_pad, done, slot = cache
    (n, num_heads, size), (num_prefixes, num_kv, slots, _) = q.shape, prefix_keys.shape
    group, per, own_slots = n // num_prefixes, num_heads // num_kv, keys.shape[2]
    num_keys = 128 // q.element_size()  # by shared memory
    queries = program_rows(group * per)
    splits = min(MAX_SPLITS, triton.cdiv(slots, 128))
    # Keys of a split, a multiple of what a program reads together.
    chunk = triton.cdiv(triton.cdiv(slots, splits), num_keys) * num_keys
    num_partials = splits + 1  # the last: a row's own keys
    partials = q.new_empty(n, num_heads, num_partials, size, dtype=torch.float32)
    sums = q.new_empty(n, num_heads, num_partials, 2, dtype=torch.float32)
    shared_items = num_prefixes * triton.cdiv(group * per, queries) * splits
    _attend[(shared_items + n, num_kv)](
        q,
        Cache(prefix_keys, prefix_values, slots),
        Cache(keys, values, own_slots),
        pad,
        own_pad,
        done,
        slot,
        partials,
        sums,
        size**-0.5 * LOG2E,  # for exp2, which GPUs compute directly
        num_prefixes,
        chunk,
        Heads(num_heads, num_kv, size, group, splits, queries, at_least_16(per), num_keys),
    )
    out, block = torch.empty_like(q), triton.next_power_of_2(num_partials)
    _merge[(n * num_heads,)](
        partials, sums, out, D=size, NUM=num_partials, BLOCK=block, num_warps=1
    )
    return out.view(n, -1)
