"""The parts of a decode step as one kernel each, of Triton.

`attend` is two, `add` comes behind a product; `embed`, `normed` and `choose` (three) are compiled.

The same functions as `decode_torch`, which says what they take and return. Sums are float32;
products of two tensors take their own dtype, in full precision for float32. Rounded to the model's
dtype are what one kernel leaves for another, a linear's output, and silu's, as in the model; but of
RMSNorm its input times its weight, which the model rounds after the division.

Letters: N rows, C width, F MLP width, r LoRA rank.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rl_train.engine import decode_torch

# Parts that have a file of their own.
from rl_train.engine.attention_triton import attend, rotate_and_store  # noqa: F401
from rl_train.engine.linear_triton import (
    COLUMNS,
    before_norm,
    linear,
    lora_sizes,
    norm_scale,
    power_sizes,
    program_rows,
    read_linear,
    read_lora_b,
    read_power,
)

# Of a product, added up in `add`: for so few rows cuBLAS does not split the inputs well itself.
SUMMANDS = 2


def fits(head_size: int, width: int, mlp_width: int) -> bool:
    """Are the kernels written for these sizes?"""
    power_of_2 = head_size & (head_size - 1) == 0
    return head_size >= 32 and power_of_2 and width % COLUMNS == mlp_width % COLUMNS == 0


# Once a token, not once a layer.
PER_TOKEN = decode_torch.embed, decode_torch.normed, decode_torch.choose
embed, normed, choose = map(torch.compile, PER_TOKEN)


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
    part = tl.program_id(0)
    columns = part * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    dtype = residual.dtype.element_ty
    there = (rows < num_rows)[:, None]
    at = rows[:, None] * width + columns[None, :]
    before = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns).to(tl.float32)
    b = read_lora_b(lora_b, columns, RANK, RANK_BLOCK)
    delta, inner = read_linear(y, rows, columns, width, stride, num_rows, RANK, RANK_BLOCK)
    for summand in tl.static_range(1, SUMMANDS):
        more_y = y + summand * num_rows * stride
        more, more_inner = read_linear(
            more_y, rows, columns, width, stride, num_rows, RANK, RANK_BLOCK
        )
        delta += more
        inner += more_inner
    delta = linear(delta, inner.to(dtype), b, scaling, RANK)
    total = (before + delta.to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual + at, total, mask=there)
    before_norm(total.to(tl.float32), scale, at, x, power, rows, num_rows, part, width, PARTS)


def add(residual, inputs, linear, weight):
    (n, width), rows, y = (
        residual.shape,
        program_rows(len(residual)),
        _product(inputs, linear.weight),
    )
    parts, b = width // COLUMNS, y if linear.lora_b is None else linear.lora_b
    x, power = torch.empty_like(residual), residual.new_empty(n, parts, dtype=torch.float32)
    sizes = dict(SUMMANDS=len(y), PARTS=parts, ROWS=rows, NUM_COLUMNS=COLUMNS)
    sizes |= lora_sizes(linear.lora_b)
    _add[(parts, triton.cdiv(n, rows))](
        residual, y, b, weight, x, power, linear.scaling, width, y.shape[2], n, **sizes
    )
    return x, power


def _product(inputs, matrix):
    """(summands, N, outputs) whose sum is inputs @ matrix.T, float32 if there is more than one."""
    if matrix.dtype == torch.float32 or matrix.shape[1] % (8 * SUMMANDS):
        return F.linear(inputs, matrix)[None]
    inputs = inputs.unflatten(1, (SUMMANDS, -1)).transpose(0, 1)
    matrix = matrix.unflatten(1, (SUMMANDS, -1)).permute(1, 2, 0)
    return torch.bmm(inputs, matrix, out_dtype=torch.float32)


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
    up_columns = width + columns
    dtype = out.dtype.element_ty
    shares = read_power(power, rows, num_rows, PARTS, PARTS_BLOCK)
    g_b = read_lora_b(lora_b, columns, RANK, RANK_BLOCK)
    u_b = read_lora_b(lora_b, up_columns, RANK, RANK_BLOCK)
    inner = 2 * width
    g, g_a = read_linear(y, rows, columns, inner, stride, num_rows, RANK, RANK_BLOCK)
    inner += RANK
    u, u_a = read_linear(y, rows, up_columns, inner, stride, num_rows, RANK, RANK_BLOCK)
    scale = norm_scale(shares, eps)
    g = linear(g, g_a, g_b, scaling, RANK) * scale
    u = linear(u, u_a, u_b, scaling, RANK) * scale
    g = g.to(dtype).to(tl.float32)
    g = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)
    at = rows[:, None] * width + columns[None, :]
    tl.store(out + at, (g * u.to(dtype).to(tl.float32)).to(dtype), mask=(rows < num_rows)[:, None])


def gate(y, power, eps, gate_up):
    n, width, rows = len(y), gate_up.sizes[0], program_rows(len(y))
    # Each program reads LoRA A's outputs and the norm's shares anew.
    columns = COLUMNS if width % (2 * COLUMNS) else 2 * COLUMNS
    out, b = y.new_empty(n, width), y if gate_up.lora_b is None else gate_up.lora_b
    sizes = power_sizes(power) | lora_sizes(gate_up.lora_b)
    numbers = eps, gate_up.scaling, width, y.stride(0), n
    _gate[(width // columns, triton.cdiv(n, rows))](
        y, power, b, out, *numbers, ROWS=rows, NUM_COLUMNS=columns, **sizes
    )
    return out
