"""The parts of a decode step that are not matrix products as one Triton kernel each (attention: two). Same functions as `decode_torch`.

Letters: N = P*G rows, H query heads, K key-value heads, D head size, L prompt slots, T suffix slots, C width, F MLP width, r LoRA rank.
Sums are float32; products of two tensors take their own dtype, in full precision for float32. Rounding to the model's dtype
happens where the model rounds.
"""
import torch
import triton
import triton.language as tl

MAX_SPLITS = 8        # pieces of a prompt's keys that run side by side
COLUMNS = 32          # of the MLP that a program computes
LOG2E = 1.4426950408889634


def fits(head_size: int, mlp_width: int) -> bool:
    """Are the kernels written for these sizes?"""
    return head_size >= 32 and head_size & (head_size - 1) == 0 and mlp_width % COLUMNS == 0


@triton.jit
def _add_norm(residual, delta, weight, out, eps, width, delta_stride, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dtype = residual.dtype.element_ty
    kept = column < width
    x = tl.load(residual + row * width + column, mask=kept, other=0.0).to(tl.float32)
    if HAS_DELTA:
        total = (x + tl.load(delta + row * delta_stride + column, mask=kept, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + row * width + column, total, mask=kept)
        x = total.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x) / width + eps)).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (x * tl.load(weight + column, mask=kept, other=0.0).to(tl.float32)).to(dtype), mask=kept)


def add_norm(residual, delta, weight, eps):
    n, width = residual.shape
    out = torch.empty_like(residual)
    _add_norm[(n,)](residual, residual if delta is None else delta, weight, out, eps, width, 0 if delta is None else delta.stride(0),
                    HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(width), num_warps=8)
    return out


@triton.jit
def _linear(y, lora_b, rows, columns, inner, stride, num_rows, scaling, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """(rows, columns) of y with LoRA B added, as float32 that is rounded to y's dtype; the outputs of LoRA A start at column `inner`."""
    dtype = y.dtype.element_ty
    there = (rows < num_rows)[:, None]
    found = tl.load(y + rows[:, None] * stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
    if RANK > 0:
        r = tl.arange(0, RANK_BLOCK)
        a = tl.load(y + rows[:, None] * stride + inner + r[None, :], mask=there & (r < RANK)[None, :], other=0.0)
        b = tl.load(lora_b + columns[None, :] * RANK + r[:, None], mask=(r < RANK)[:, None], other=0.0)
        found += scaling * tl.dot(a, b, input_precision="ieee")
    return found.to(dtype).to(tl.float32)


@triton.jit
def _rotate_and_store(y, lora_b, cos, sin, q, keys, values, step, scaling, stride, num_rows, slots, H: tl.constexpr, K: tl.constexpr,
                      D: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(0)
    rows, half = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, D // 2)
    inner = (H + 2 * K) * D + (head >= H).to(tl.int32) * RANK + (head >= H + K).to(tl.int32) * RANK       # of q, k or v
    first = _linear(y, lora_b, rows, head * D + half, inner, stride, num_rows, scaling, RANK, RANK_BLOCK)
    second = _linear(y, lora_b, rows, head * D + D // 2 + half, inner, stride, num_rows, scaling, RANK, RANK_BLOCK)
    there = (rows < num_rows)[:, None]
    at = rows[:, None] * (D // 2) + half[None, :]
    if head < H + K:
        c, s = tl.load(cos + at, mask=there, other=0.0).to(tl.float32), tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    dtype = y.dtype.element_ty
    if head < H:
        at = (rows[:, None] * H + head) * D + half[None, :]
        tl.store(q + at, first.to(dtype), mask=there)
        tl.store(q + at + D // 2, second.to(dtype), mask=there)
    else:
        at = ((rows[:, None] * K + (head - H) % K) * slots + tl.load(step)) * D + half[None, :]
        if head < H + K:
            tl.store(keys + at, first.to(dtype), mask=there)
            tl.store(keys + at + D // 2, second.to(dtype), mask=there)
        else:
            tl.store(values + at, first.to(dtype), mask=there)
            tl.store(values + at + D // 2, second.to(dtype), mask=there)


def rotate_and_store(y, lora_b, scaling, cos, sin, keys, values, step):
    n, num_kv, slots, size = keys.shape
    rank = 0 if lora_b is None else lora_b.shape[1]
    num_heads = (y.shape[1] - 3 * rank) // size - 2 * num_kv
    q, rows = y.new_empty(n, num_heads, size), _rows(n)
    _rotate_and_store[(num_heads + 2 * num_kv, triton.cdiv(n, rows))](
        y, y if lora_b is None else lora_b, cos, sin, q, keys, values, step, scaling, y.stride(0), n, slots, H=num_heads, K=num_kv, D=size,
        RANK=rank, RANK_BLOCK=_at_least_16(rank), ROWS=rows)
    return q


@triton.jit
def _attend(q, prefix_keys, prefix_values, keys, values, pad, step, parts, sizes, scale, num_prompts, slots, suffix_slots, chunk,
            G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr,
            KEYS: tl.constexpr):
    """Attention of QUERIES queries that share keys over one stretch of them: of the prompt, or a row's own."""
    PER: tl.constexpr = H // K                                  # query heads of a key-value head
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
    most = tl.full((QUERIES,), -1e30, tl.float32)               # not -inf: the difference of two is then a number
    total, found = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, D), tl.float32)
    for start in range(low, high, KEYS):
        at = (start + slot) * D
        kept = start + slot < high
        k = tl.load(k_base + at[None, :] + d[:, None], mask=kept[None, :], other=0.0)           # (D, KEYS)
        v = tl.load(v_base + at[:, None] + d[None, :], mask=kept[:, None], other=0.0)           # (KEYS, D)
        score = tl.where(kept[None, :], tl.dot(vectors, k, input_precision="ieee") * scale, float("-inf"))
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
    tl.store(out + head * D + d, (tl.sum(found * weight[:, None], axis=0) / total).to(out.dtype.element_ty))


def attend(q, prefix_keys, prefix_values, keys, values, pad, step):
    (n, num_heads, size), (num_prompts, num_kv, slots, _) = q.shape, prefix_keys.shape
    group, per, queries, num_keys = n // num_prompts, num_heads // num_kv, 16, 128 // q.element_size()       # by shared memory
    splits = min(MAX_SPLITS, triton.cdiv(slots, 128))
    chunk = triton.cdiv(triton.cdiv(slots, splits), num_keys) * num_keys
    parts = q.new_empty(n, num_heads, splits + 1, size, dtype=torch.float32)
    sizes = q.new_empty(n, num_heads, splits + 1, 2, dtype=torch.float32)
    items = num_prompts * triton.cdiv(group * per, queries) * splits + n * triton.cdiv(per, queries)
    _attend[(items, num_kv)](q, prefix_keys, prefix_values, keys, values, pad, step, parts, sizes, size ** -0.5 * LOG2E, num_prompts, slots,
                             keys.shape[2], chunk, G=group, H=num_heads, K=num_kv, D=size, SPLITS=splits, QUERIES=queries, KEYS=num_keys)
    out = torch.empty_like(q)
    _merge[(n * num_heads,)](parts, sizes, out, D=size, NUM=splits + 1, BLOCK=triton.next_power_of_2(splits + 1), num_warps=1)
    return out.view(n, -1)


@triton.jit
def _gate(y, lora_b, out, scaling, width, stride, num_rows, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr,
          NUM_COLUMNS: tl.constexpr):
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(0) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    g = _linear(y, lora_b, rows, columns, 2 * width, stride, num_rows, scaling, RANK, RANK_BLOCK)
    u = _linear(y, lora_b, rows, width + columns, 2 * width + RANK, stride, num_rows, scaling, RANK, RANK_BLOCK)
    dtype = out.dtype.element_ty
    g = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(out + rows[:, None] * width + columns[None, :], (g * u).to(dtype), mask=(rows < num_rows)[:, None])


def gate(y, lora_b, scaling, width):
    n, rank, rows = len(y), 0 if lora_b is None else lora_b.shape[1], _rows(len(y))
    out = y.new_empty(n, width)
    _gate[(width // COLUMNS, triton.cdiv(n, rows))](y, y if lora_b is None else lora_b, out, scaling, width, y.stride(0), n, RANK=rank,
                                                    RANK_BLOCK=_at_least_16(rank), ROWS=rows, NUM_COLUMNS=COLUMNS)
    return out


def _rows(n: int) -> int:
    """Rows of a program: a product on tensor cores has at least 16, more than 64 spill registers."""
    return min(64, _at_least_16(n))


def _at_least_16(n: int) -> int:
    return max(16, triton.next_power_of_2(n))
