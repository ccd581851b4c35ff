"""The parts of a decode step, each one Triton kernel (`attend`: two; `add`: behind a product). Same functions as `decode_torch`.

Letters: N = P*G rows, H query heads, K key-value heads, D head size, L prompt slots, T suffix slots, C width, F MLP width,
r LoRA rank.
Sums are float32; products of two tensors take their own dtype, in full precision for float32. Rounded to the model's dtype are
what one kernel leaves for another, a linear's output, and silu's, as in the model; but of RMSNorm its input times its weight, which
the model rounds after the division.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rl_train.engine.draw_triton import choose  # noqa: F401, one of the parts

MAX_SPLITS = 8  # pieces of a prompt's keys that run side by side
COLUMNS = 32  # of the width or the MLP's width that a program computes; of the latter twice as many where they divide it
SUMMANDS = 2  # of a product, added up in `add`: for so few rows cuBLAS does not split the inputs well itself
LOG2E = 1.4426950408889634


def fits(head_size: int, width: int, mlp_width: int) -> bool:
    """Are the kernels written for these sizes?"""
    return (
        head_size >= 32
        and head_size & (head_size - 1) == 0
        and width % COLUMNS == 0
        and mlp_width % COLUMNS == 0
    )


# Kernels read all that they need before they compute: what they cost is mostly the wait for the first numbers.


@triton.jit
def _read_linear(
    y, rows, columns, inner, stride, num_rows, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr
):
    """(rows, columns) of y, and the outputs of LoRA A, which start at column `inner`."""
    there = (rows < num_rows)[:, None]
    r = tl.arange(0, RANK_BLOCK)
    found = tl.load(y + rows[:, None] * stride + columns[None, :], mask=there, other=0.0)
    return found, tl.load(
        y + rows[:, None] * stride + inner + r[None, :], mask=there & (r < RANK)[None, :], other=0.0
    )


@triton.jit
def _read_lora_b(lora_b, columns, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """(RANK_BLOCK, columns) LoRA B, transposed."""
    r = tl.arange(0, RANK_BLOCK)
    return tl.load(
        lora_b + columns[None, :] * RANK + r[:, None], mask=(r < RANK)[:, None], other=0.0
    )


@triton.jit
def _linear(found, a, b, scaling, RANK: tl.constexpr):
    """found + scaling a b, float32."""
    total = found.to(tl.float32)
    if RANK > 0:
        total += scaling * tl.dot(a, b, input_precision="ieee")
    return total


@triton.jit
def _read_power(power, rows, num_rows, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    part = tl.arange(0, PARTS_BLOCK)
    return tl.load(
        power + rows[:, None] * PARTS + part[None, :],
        mask=(rows < num_rows)[:, None] & (part < PARTS)[None, :],
        other=0.0,
    )


@triton.jit
def _norm_scale(shares, eps):
    """(rows, 1) by which RMSNorm multiplies."""
    return tl.rsqrt(tl.sum(shares, axis=1) + eps)[:, None]


@triton.jit
def _before_norm(total, weight, at, x, power, rows, num_rows, part, width, PARTS: tl.constexpr):
    """Store what `decode_torch.add` returns, of some columns of the residual stream and of the norm's weight, as float32."""
    there = rows < num_rows
    tl.store(x + at, (total * weight[None, :]).to(x.dtype.element_ty), mask=there[:, None])
    tl.store(power + rows * PARTS + part, tl.sum(total * total, axis=1) / width, mask=there)


@triton.jit
def _embed(
    token,
    table,
    weight,
    residual,
    x,
    power,
    width,
    num_rows,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(0) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    there = (rows < num_rows)[:, None]
    scale = tl.load(weight + columns).to(tl.float32)
    found = tl.load(
        table
        + tl.load(token + rows, mask=rows < num_rows, other=0)[:, None] * width
        + columns[None, :],
        mask=there,
        other=0.0,
    )
    at = rows[:, None] * width + columns[None, :]
    tl.store(residual + at, found, mask=there)
    _before_norm(
        found.to(tl.float32), scale, at, x, power, rows, num_rows, tl.program_id(0), width, PARTS
    )


def embed(token, table, weight):
    n, width, rows = len(token), table.shape[1], _rows(len(token))
    residual, x, power = (
        table.new_empty(n, width),
        table.new_empty(n, width),
        table.new_empty(n, width // COLUMNS, dtype=torch.float32),
    )
    _embed[(width // COLUMNS, triton.cdiv(n, rows))](
        token,
        table,
        weight,
        residual,
        x,
        power,
        width,
        n,
        PARTS=width // COLUMNS,
        ROWS=rows,
        NUM_COLUMNS=COLUMNS,
    )
    return residual, x, power


@triton.jit
def _add(
    residual,
    y,
    lora_b,
    weight,
    x,
    power,
    scaling,
    width,
    stride,
    num_rows,
    SUMMANDS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(0) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    dtype = residual.dtype.element_ty
    there = (rows < num_rows)[:, None]
    at = rows[:, None] * width + columns[None, :]
    before = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns).to(tl.float32)
    b = _read_lora_b(lora_b, columns, RANK, RANK_BLOCK)
    delta, inner = _read_linear(y, rows, columns, width, stride, num_rows, RANK, RANK_BLOCK)
    for summand in tl.static_range(1, SUMMANDS):
        more, more_inner = _read_linear(
            y + summand * num_rows * stride,
            rows,
            columns,
            width,
            stride,
            num_rows,
            RANK,
            RANK_BLOCK,
        )
        delta += more
        inner += more_inner
    delta = _linear(delta, inner.to(dtype), b, scaling, RANK)
    total = (before + delta.to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual + at, total, mask=there)
    _before_norm(
        total.to(tl.float32), scale, at, x, power, rows, num_rows, tl.program_id(0), width, PARTS
    )


def add(residual, inputs, matrix, lora_b, scaling, weight):
    (n, width), rank, rows = (
        residual.shape,
        0 if lora_b is None else lora_b.shape[1],
        _rows(len(residual)),
    )
    y, parts = _product(inputs, matrix), width // COLUMNS
    x, power = torch.empty_like(residual), residual.new_empty(n, parts, dtype=torch.float32)
    _add[(parts, triton.cdiv(n, rows))](
        residual,
        y,
        y if lora_b is None else lora_b,
        weight,
        x,
        power,
        scaling,
        width,
        y.shape[2],
        n,
        SUMMANDS=len(y),
        PARTS=parts,
        RANK=rank,
        RANK_BLOCK=_at_least_16(rank),
        ROWS=rows,
        NUM_COLUMNS=COLUMNS,
    )
    return x, power


def _product(inputs, matrix):
    """(summands, N, outputs) whose sum is inputs @ matrix.T, float32 where there is more than one."""
    if matrix.dtype == torch.float32 or matrix.shape[1] % (8 * SUMMANDS):
        return F.linear(inputs, matrix)[None]
    inputs, matrix = (
        inputs.unflatten(1, (SUMMANDS, -1)).transpose(0, 1),
        matrix.unflatten(1, (SUMMANDS, -1)).permute(1, 2, 0),
    )
    return torch.bmm(inputs, matrix, out_dtype=torch.float32)


@triton.jit
def _normed(
    x, power, out, eps, width, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    row, column, part = (
        tl.program_id(0).to(tl.int64),
        tl.arange(0, BLOCK),
        tl.arange(0, PARTS_BLOCK),
    )
    scale = tl.rsqrt(
        tl.sum(tl.load(power + row * PARTS + part, mask=part < PARTS, other=0.0)) + eps
    )
    at, kept = row * width + column, column < width
    tl.store(
        out + at,
        (tl.load(x + at, mask=kept, other=0.0).to(tl.float32) * scale).to(out.dtype.element_ty),
        mask=kept,
    )


def normed(x, power, eps):
    (n, width), parts, out = x.shape, power.shape[1], torch.empty_like(x)
    _normed[(n,)](
        x,
        power,
        out,
        eps,
        width,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        BLOCK=triton.next_power_of_2(width),
    )
    return out


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
    head = tl.program_id(0)
    rows, half = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, D // 2)
    inner = (
        (H + 2 * K) * D + (head >= H).to(tl.int32) * RANK + (head >= H + K).to(tl.int32) * RANK
    )  # of q, k or v
    column = head * D + half
    dtype = y.dtype.element_ty
    there = (rows < num_rows)[:, None]
    slot = tl.load(step)
    at = tl.load(position + rows, mask=rows < num_rows, other=0)[:, None] * (D // 2) + half[None, :]
    shares = _read_power(power, rows, num_rows, PARTS, PARTS_BLOCK)
    first, a = _read_linear(y, rows, column, inner, stride, num_rows, RANK, RANK_BLOCK)
    second = tl.load(y + rows[:, None] * stride + column[None, :] + D // 2, mask=there, other=0.0)
    first_b = _read_lora_b(lora_b, column, RANK, RANK_BLOCK)
    second_b = _read_lora_b(lora_b, column + D // 2, RANK, RANK_BLOCK)
    c = tl.load(cos + at, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
    scale = _norm_scale(shares, eps)
    first = _linear(first, a, first_b, scaling, RANK) * scale
    second = _linear(second, a, second_b, scaling, RANK) * scale
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


def rotate_and_store(y, power, eps, bias, lora_b, scaling, cos, sin, position, keys, values, step):
    n, num_kv, slots, size = keys.shape
    rank, parts, rows = 0 if lora_b is None else lora_b.shape[1], power.shape[1], _rows(n)
    num_heads = (y.shape[1] - 3 * rank) // size - 2 * num_kv
    q, grid = y.new_empty(n, num_heads, size), (num_heads + 2 * num_kv, triton.cdiv(n, rows))
    _rotate_and_store[grid](
        y,
        power,
        bias,
        y if lora_b is None else lora_b,
        cos,
        sin,
        position,
        q,
        keys,
        values,
        step,
        eps,
        scaling,
        y.stride(0),
        n,
        slots,
        BIAS=bias is not None,
        H=num_heads,
        K=num_kv,
        D=size,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        RANK=rank,
        RANK_BLOCK=_at_least_16(rank),
        ROWS=rows,
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
    step,
    parts,
    sizes,
    scale,
    num_prompts,
    slots,
    suffix_slots,
    chunk,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of QUERIES queries that share keys over one stretch of them: of the prompt, or a row's own."""
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
        base = (prompt.to(tl.int64) * K + kv) * slots * D
        k_base, v_base = prefix_keys + base, prefix_values + base
    else:
        own = item - num_prefix
        query = own % own_blocks * QUERIES + tl.arange(0, QUERIES)
        row, there, split = own // own_blocks + query // PER, query < PER, SPLITS
        low, high = 0, tl.load(step).to(tl.int32) + 1
        base = ((own // own_blocks).to(tl.int64) * K + kv) * suffix_slots * D
        k_base, v_base = keys + base, values + base
    d, slot = tl.arange(0, D), tl.arange(0, KEYS)
    head = row.to(tl.int64) * H + kv * PER + query % PER
    vectors = tl.load(q + head[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
    most = tl.full(
        (QUERIES,), -1e30, tl.float32
    )  # not -inf: the difference of two is then a number
    total, found = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, D), tl.float32)
    for start in range(low, high, KEYS):
        at = (start + slot) * D
        kept = start + slot < high
        k = tl.load(k_base + at[None, :] + d[:, None], mask=kept[None, :], other=0.0)  # (D, KEYS)
        v = tl.load(v_base + at[:, None] + d[None, :], mask=kept[:, None], other=0.0)  # (KEYS, D)
        score = tl.where(
            kept[None, :], tl.dot(vectors, k, input_precision="ieee") * scale, float("-inf")
        )
        higher = tl.maximum(most, tl.max(score, axis=1))
        p, shrink = tl.exp2(score - higher[:, None]), tl.exp2(most - higher)
        total, most = total * shrink + tl.sum(p, axis=1), higher
        found = found * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    at = head * (SPLITS + 1) + split
    tl.store(parts + at[:, None] * D + d[None, :], found, mask=there[:, None])
    tl.store(sizes + at * 2, most, mask=there)
    tl.store(sizes + at * 2 + 1, total, mask=there)


@triton.jit
def _merge(parts, sizes, out, D: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of NUM parts of one query's attention, each with its highest score and its sum of exponentials."""
    head, part, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, D)
    at, kept = head * NUM + part, part < NUM
    most = tl.load(sizes + at * 2, mask=kept, other=-1e30)
    weight = tl.exp2(most - tl.max(most))
    total = tl.sum(weight * tl.load(sizes + at * 2 + 1, mask=kept, other=0.0))
    found = tl.load(parts + at[:, None] * D + d[None, :], mask=kept[:, None], other=0.0)
    tl.store(
        out + head * D + d,
        (tl.sum(found * weight[:, None], axis=0) / total).to(out.dtype.element_ty),
    )


def attend(q, prefix_keys, prefix_values, keys, values, pad, step):
    (n, num_heads, size), (num_prompts, num_kv, slots, _) = q.shape, prefix_keys.shape
    group, per, num_keys = (
        n // num_prompts,
        num_heads // num_kv,
        128 // q.element_size(),
    )  # by shared memory
    queries = _rows(group * per)
    splits = min(MAX_SPLITS, triton.cdiv(slots, 128))
    chunk = triton.cdiv(triton.cdiv(slots, splits), num_keys) * num_keys
    parts = q.new_empty(n, num_heads, splits + 1, size, dtype=torch.float32)
    sizes = q.new_empty(n, num_heads, splits + 1, 2, dtype=torch.float32)
    items = num_prompts * triton.cdiv(group * per, queries) * splits + n * triton.cdiv(per, queries)
    _attend[(items, num_kv)](
        q,
        prefix_keys,
        prefix_values,
        keys,
        values,
        pad,
        step,
        parts,
        sizes,
        size**-0.5 * LOG2E,
        num_prompts,
        slots,
        keys.shape[2],
        chunk,
        G=group,
        H=num_heads,
        K=num_kv,
        D=size,
        SPLITS=splits,
        QUERIES=queries,
        KEYS=num_keys,
    )
    out = torch.empty_like(q)
    _merge[(n * num_heads,)](
        parts,
        sizes,
        out,
        D=size,
        NUM=splits + 1,
        BLOCK=triton.next_power_of_2(splits + 1),
        num_warps=1,
    )
    return out.view(n, -1)


@triton.jit
def _gate(
    y,
    power,
    lora_b,
    out,
    eps,
    scaling,
    width,
    stride,
    num_rows,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(0) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    dtype = out.dtype.element_ty
    shares = _read_power(power, rows, num_rows, PARTS, PARTS_BLOCK)
    g_b = _read_lora_b(lora_b, columns, RANK, RANK_BLOCK)
    u_b = _read_lora_b(lora_b, width + columns, RANK, RANK_BLOCK)
    g, g_a = _read_linear(y, rows, columns, 2 * width, stride, num_rows, RANK, RANK_BLOCK)
    u, u_a = _read_linear(
        y, rows, width + columns, 2 * width + RANK, stride, num_rows, RANK, RANK_BLOCK
    )
    scale = _norm_scale(shares, eps)
    g = _linear(g, g_a, g_b, scaling, RANK) * scale
    u = _linear(u, u_a, u_b, scaling, RANK) * scale
    g = g.to(dtype).to(tl.float32)
    g = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)
    at = rows[:, None] * width + columns[None, :]
    tl.store(out + at, (g * u.to(dtype).to(tl.float32)).to(dtype), mask=(rows < num_rows)[:, None])


def gate(y, power, eps, lora_b, scaling, width):
    n, rank, parts, rows = (
        len(y),
        0 if lora_b is None else lora_b.shape[1],
        power.shape[1],
        _rows(len(y)),
    )
    columns = (
        COLUMNS if width % (2 * COLUMNS) else 2 * COLUMNS
    )  # each program reads LoRA A's outputs and the norm's shares anew
    out, grid = y.new_empty(n, width), (width // columns, triton.cdiv(n, rows))
    _gate[grid](
        y,
        power,
        y if lora_b is None else lora_b,
        out,
        eps,
        scaling,
        width,
        y.stride(0),
        n,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        RANK=rank,
        RANK_BLOCK=_at_least_16(rank),
        ROWS=rows,
        NUM_COLUMNS=columns,
    )
    return out


def _rows(n: int) -> int:
    """Rows of a program: a product on tensor cores has at least 16, more than 64 spill registers."""
    return min(64, _at_least_16(n))


def _at_least_16(n: int) -> int:
    return max(16, triton.next_power_of_2(n))
