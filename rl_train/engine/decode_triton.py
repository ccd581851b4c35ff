"""Operations of a decode step as one Triton kernel each.

`attend` is two, `add` comes behind a product; `embed`, `normed` and `choose` are compiled.

The functions are those of `decode_torch`, where their arguments are documented. Sums are float32;
products of two tensors use their dtype, in full precision for float32. Outputs of kernels, of
linears and of silu are rounded to the model's dtype, as in the model. RMSNorm differs: its input
times its weight is rounded, where the model rounds after the division.

Letters: N rows, C width, F MLP width, r LoRA rank.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rl_train.engine import decode_torch

# Operations that have a file of their own.
from rl_train.engine.attention_triton import attend, rotate_and_store  # noqa: F401
from rl_train.engine.linear_triton import (
    COLUMNS,
    linear,
    norm_scale,
    product_of,
    read_linear,
    read_lora_b,
    read_power,
)

if TYPE_CHECKING:
    from rl_train.engine.fused_weights import FusedLinears


# Parts into which a product's inputs are split, added up in `add`: for so few rows cuBLAS does not
# split them well itself.
SUMMANDS = 2


def fits(head_size: int, width: int, mlp_width: int) -> bool:
    """Tell whether the kernels support these sizes."""
    power_of_2 = head_size & (head_size - 1) == 0
    return head_size >= 32 and power_of_2 and width % COLUMNS == mlp_width % COLUMNS == 0


# These run once a token, not once a layer.
PER_TOKEN = decode_torch.embed, decode_torch.normed, decode_torch.choose
embed, normed, choose = map(torch.compile, PER_TOKEN)


@triton.jit
def _add(
    residual, product, weight, x, power, S: tl.constexpr, SUMMANDS: tl.constexpr, C: tl.constexpr
):
    rows = (tl.program_id(1) * S.ROWS + tl.arange(0, S.ROWS)).to(tl.int64)
    block = tl.program_id(0)
    columns, width = block * C + tl.arange(0, C), S.PARTS * C
    dtype = residual.dtype.element_ty
    valid = rows < product.num_rows
    at = rows[:, None] * width + columns[None, :]
    before = tl.load(residual + at, mask=valid[:, None], other=0.0).to(tl.float32)
    scale = tl.load(weight + columns).to(tl.float32)
    b = read_lora_b(product, columns, S)
    delta, inner = read_linear(product, product.y, rows, columns, width, S)
    # Split products are added here, in float32.
    for summand in tl.static_range(1, SUMMANDS):
        y = product.y + summand * product.num_rows * product.stride
        y_summand, inner_summand = read_linear(product, y, rows, columns, width, S)
        delta += y_summand
        inner += inner_summand
    delta = linear(product, delta, inner.to(dtype), b, S)
    # Rounded twice, as the model rounds a linear's output and the sum.
    total = (before + delta.to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual + at, total, mask=valid[:, None])
    total = total.to(tl.float32)
    tl.store(x + at, (total * scale[None, :]).to(dtype), mask=valid[:, None])
    # Each block of columns leaves its part of the mean square; the reader adds them.
    tl.store(power + rows * S.PARTS + block, tl.sum(total * total, axis=1) / width, mask=valid)


def add(residual: torch.Tensor, inputs: torch.Tensor, linear: "FusedLinears", weight: torch.Tensor):
    """Compute `decode_torch.add`."""
    (n, width), y = residual.shape, _product(inputs, linear.weight)
    x, parts = torch.empty_like(residual), width // COLUMNS
    power = residual.new_empty(n, parts, dtype=torch.float32)
    product, sizes = product_of(y, linear, power)
    grid = parts, triton.cdiv(n, sizes.ROWS)
    _add[grid](residual, product, weight, x, power, sizes, len(y), COLUMNS)
    return x, power


def _product(inputs, matrix):
    """Return summands (summands, N, outputs) of inputs @ matrix.T, float32 if more than one."""
    if matrix.dtype == torch.float32 or matrix.shape[1] % (8 * SUMMANDS):
        return F.linear(inputs, matrix)[None]
    inputs = inputs.unflatten(1, (SUMMANDS, -1)).transpose(0, 1)
    matrix = matrix.unflatten(1, (SUMMANDS, -1)).permute(1, 2, 0)
    return torch.bmm(inputs, matrix, out_dtype=torch.float32)  # (SUMMANDS, N, outputs)


@triton.jit
def _gate(product, power, eps, out, width, S: tl.constexpr, C: tl.constexpr):
    rows = (tl.program_id(1) * S.ROWS + tl.arange(0, S.ROWS)).to(tl.int64)
    columns = tl.program_id(0) * C + tl.arange(0, C)
    up_columns, inner = width + columns, 2 * width  # [gate | up | A's outputs of gate | of up]
    dtype = out.dtype.element_ty
    summands = read_power(power, rows, product.num_rows, S)
    g_b, u_b = read_lora_b(product, columns, S), read_lora_b(product, up_columns, S)
    g, g_a = read_linear(product, product.y, rows, columns, inner, S)
    u, u_a = read_linear(product, product.y, rows, up_columns, inner + S.RANK, S)
    scale = norm_scale(summands, eps)
    g = (linear(product, g, g_a, g_b, S) * scale).to(dtype).to(tl.float32)
    u = (linear(product, u, u_a, u_b, S) * scale).to(dtype).to(tl.float32)
    g = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)  # silu
    at = rows[:, None] * width + columns[None, :]
    tl.store(out + at, (g * u).to(dtype), mask=(rows < product.num_rows)[:, None])


def gate(y: torch.Tensor, power: torch.Tensor, eps: float, gate_up: "FusedLinears"):
    """Compute `decode_torch.gate`."""
    n, width = len(y), gate_up.sizes[0]
    # More columns per program read LoRA A's outputs and the norm's summands less often.
    columns, out = COLUMNS if width % (2 * COLUMNS) else 2 * COLUMNS, y.new_empty(n, width)
    product, sizes = product_of(y, gate_up, power)
    grid = width // columns, triton.cdiv(n, sizes.ROWS)
    _gate[grid](product, power, eps, out, width, sizes, columns)
    return out
