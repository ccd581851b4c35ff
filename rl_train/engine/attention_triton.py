"""Attention of a decode step in Triton: its input from [q, k, v], and itself in two kernels.

The same functions as in `decode_torch`, which says what they take and return.

Letters: N = P*G rows, H query heads, K key-value heads, D head size, L prompt slots, T suffix
slots, r LoRA rank.
"""

import torch
import triton
import triton.language as tl

from rl_train.engine.linear_triton import (
    linear,
    lora_sizes,
    norm_scale,
    power_sizes,
    program_rows,
    read_linear,
    read_lora_b,
    read_power,
)

MAX_SPLITS = 8  # pieces of a prompt's keys that run side by side
LOG2E = 1.4426950408889634


@triton.jit
def _rotate_and_store(
    y,
    power,
    bias,
    lora_b,
    cos,
    sin,
    position,
    q,
    keys,
    values,
    step,
    eps,
    scaling,
    stride,
    num_rows,
    slots,
    BIAS: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One head of q, k or v; a program's columns are halves of it, which turn together."""
    head = tl.program_id(0)
    rows, half = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, D // 2)
    # Where LoRA A's outputs of q, k or v begin.
    inner = (H + 2 * K) * D + ((head >= H).to(tl.int32) + (head >= H + K).to(tl.int32)) * RANK
    column = head * D + half
    dtype = y.dtype.element_ty
    there = (rows < num_rows)[:, None]
    slot = tl.load(step)
    place = tl.load(position + rows, mask=rows < num_rows, other=0)
    at = place[:, None] * (D // 2) + half[None, :]
    shares = read_power(power, rows, num_rows, PARTS, PARTS_BLOCK)
    first, a = read_linear(y, rows, column, inner, stride, num_rows, RANK, RANK_BLOCK)
    second = tl.load(y + rows[:, None] * stride + column[None, :] + D // 2, mask=there, other=0.0)
    first_b = read_lora_b(lora_b, column, RANK, RANK_BLOCK)
    second_b = read_lora_b(lora_b, column + D // 2, RANK, RANK_BLOCK)
    c = tl.load(cos + at, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
    scale = norm_scale(shares, eps)
    first = linear(first, a, first_b, scaling, RANK) * scale
    second = linear(second, a, second_b, scaling, RANK) * scale
    if BIAS:
        first += tl.load(bias + column).to(tl.float32)[None, :]
        second += tl.load(bias + column + D // 2).to(tl.float32)[None, :]
    first = first.to(dtype).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    if head < H + K:
        first, second = first * c - second * s, second * c + first * s
    if head < H:
        at = (rows[:, None] * H + head) * D + half[None, :]
        tl.store(q + at, first.to(dtype), mask=there)
        tl.store(q + at + D // 2, second.to(dtype), mask=there)
    else:
        at = ((rows[:, None] * K + (head - H) % K) * slots + slot) * D + half[None, :]
        if head < H + K:
            tl.store(keys + at, first.to(dtype), mask=there)
            tl.store(keys + at + D // 2, second.to(dtype), mask=there)
        else:
            tl.store(values + at, first.to(dtype), mask=there)
            tl.store(values + at + D // 2, second.to(dtype), mask=there)


def rotate_and_store(y, power, eps, qkv, cos, sin, position, keys, values, step):
    n, num_kv, slots, size = keys.shape
    rows, heads = program_rows(n), sum(qkv.sizes) // size
    b = y if qkv.lora_b is None else qkv.lora_b
    q = y.new_empty(n, heads - 2 * num_kv, size)
    tensors = y, power, qkv.bias, b, cos, sin, position, q, keys, values, step
    sizes = dict(BIAS=qkv.bias is not None, H=q.shape[1], K=num_kv, D=size, ROWS=rows)
    sizes |= power_sizes(power) | lora_sizes(qkv.lora_b)
    _rotate_and_store[(heads, triton.cdiv(n, rows))](
        *tensors, eps, qkv.scaling, y.stride(0), n, slots, **sizes
    )
    return q


@triton.jit
def _attend(
    q,
    prefix_keys,
    prefix_values,
    keys,
    values,
    pad,
    done,
    step,
    parts,
    sizes,
    scale,
    num_prompts,
    slots,
    suffix_slots,
    chunk,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of QUERIES queries over a stretch of the keys they share: a prompt's or a row's."""
    PER: tl.constexpr = H // K  # query heads of a key-value head
    item, kv = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = (G * PER + QUERIES - 1) // QUERIES
    own_blocks: tl.constexpr = (PER + QUERIES - 1) // QUERIES
    num_prefix = num_prompts * blocks * SPLITS
    if item < num_prefix:
        prompt, block, split = item // (blocks * SPLITS), item // SPLITS % blocks, item % SPLITS
        query = block * QUERIES + tl.arange(0, QUERIES)
        row, there = prompt * G + query // PER, query < G * PER
        empty = tl.load(pad + prompt).to(tl.int32)
        low, high = tl.maximum(split * chunk, empty), tl.minimum((split + 1) * chunk, slots)
        of_prompt = tl.arange(0, G_BLOCK)
        going = tl.load(done + prompt * G + of_prompt, mask=of_prompt < G, other=1) == 0
        high = tl.where(tl.max(going.to(tl.int32)) > 0, high, low)
        base = (prompt.to(tl.int64) * K + kv) * slots * D
        k_base, v_base = prefix_keys + base, prefix_values + base
    else:
        own = item - num_prefix
        query = own % own_blocks * QUERIES + tl.arange(0, QUERIES)
        row, there, split = own // own_blocks + query // PER, query < PER, SPLITS
        high = tl.load(step).to(tl.int32) + 1
        low = tl.where(tl.load(done + own // own_blocks) == 0, 0, high - 1)
        base = ((own // own_blocks).to(tl.int64) * K + kv) * suffix_slots * D
        k_base, v_base = keys + base, values + base
    d, slot = tl.arange(0, D), tl.arange(0, KEYS)
    head = row.to(tl.int64) * H + kv * PER + query % PER
    vectors = tl.load(q + head[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
    most = tl.full((QUERIES,), -1e30, tl.float32)  # not -inf: differences of two are numbers
    total, mixed = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, D), tl.float32)
    for start in range(low, high, KEYS):
        at = (start + slot) * D
        kept = start + slot < high
        k = tl.load(k_base + at[None, :] + d[:, None], mask=kept[None, :], other=0.0)  # (D, KEYS)
        v = tl.load(v_base + at[:, None] + d[None, :], mask=kept[:, None], other=0.0)  # (KEYS, D)
        score = tl.dot(vectors, k, input_precision="ieee") * scale
        score = tl.where(kept[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, axis=1))
        p, shrink = tl.exp2(score - higher[:, None]), tl.exp2(most - higher)
        total, most = total * shrink + tl.sum(p, axis=1), higher
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    at = head * (SPLITS + 1) + split
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


def attend(q, prefix_keys, prefix_values, keys, values, pad, done, step):
    (n, num_heads, size), (num_prompts, num_kv, slots, _) = q.shape, prefix_keys.shape
    group, per = n // num_prompts, num_heads // num_kv
    num_keys = 128 // q.element_size()  # by shared memory
    queries = program_rows(group * per)
    splits = min(MAX_SPLITS, triton.cdiv(slots, 128))
    chunk = triton.cdiv(triton.cdiv(slots, splits), num_keys) * num_keys
    parts = q.new_empty(n, num_heads, splits + 1, size, dtype=torch.float32)
    sums = q.new_empty(n, num_heads, splits + 1, 2, dtype=torch.float32)
    items = num_prompts * triton.cdiv(group * per, queries) * splits + n * triton.cdiv(per, queries)
    tensors = q, prefix_keys, prefix_values, keys, values, pad, done, step, parts, sums
    numbers = size**-0.5 * LOG2E, num_prompts, slots, keys.shape[2], chunk
    sizes = dict(
        G=group, G_BLOCK=triton.next_power_of_2(group), H=num_heads, K=num_kv, D=size, SPLITS=splits
    )
    _attend[(items, num_kv)](*tensors, *numbers, **sizes, QUERIES=queries, KEYS=num_keys)
    out, block = torch.empty_like(q), triton.next_power_of_2(splits + 1)
    _merge[(n * num_heads,)](parts, sums, out, D=size, NUM=splits + 1, BLOCK=block, num_warps=1)
    return out.view(n, -1)
