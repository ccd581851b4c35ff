"""A token of the sampler in Triton: between two products one kernel.

`attend` is two; `final` and `choose` are compiled. The functions are those of `decode_torch`, and
those of `layers` that are parts of a layer. They hand on what the next kernel completes: a
`Residual` to which a linear is still to be added, a `Normed` and a `Projected`.

Sums are float32; products of two tensors use their dtype, in full precision for float32. Outputs of
kernels, of linears and of silu are rounded to the model's dtype, as in the model. RMSNorm differs:
its input times its weight is rounded, where the model rounds after the division.

Letters: N rows, C width, F MLP width, r LoRA rank.
"""

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rl_train.engine import decode_torch, int8_triton
from rl_train.engine.attention_triton import Rotation as rotation  # noqa: F401
from rl_train.engine.attention_triton import attend, heads  # noqa: F401
from rl_train.engine.layers import Layer, LayerOps, Linears, Norm
from rl_train.engine.linear_triton import (
    COLUMNS,
    Normed,
    Projected,
    lora_product,
    norm_scale,
    product_of,
    read_linear,
    read_lora_b,
    read_outputs,
    read_power,
)
from rl_train.engine.linear_triton import linear as with_lora

# Parts into which `_product` splits the inputs; `norm` adds up their products. For so few rows
# cuBLAS does not split them well itself.
SUMMANDS = 2


def fits(head_size: int, width: int, mlp_width: int) -> bool:
    """Tell whether the kernels support these sizes."""
    power_of_2 = head_size & (head_size - 1) == 0
    return head_size >= 32 and power_of_2 and width % COLUMNS == mlp_width % COLUMNS == 0


def reads_int8(layer: Layer, num_rows: int) -> bool:
    """Tell whether int8 weights need not be dequantised for so many rows."""
    return num_rows <= int8_triton.MOST_ROWS and all(
        int8_triton.fits(sum(linears.sizes), linears.weight.shape[1])
        for linears in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )


class Residual:
    """The residual stream (N, C), to which the output of a linear is still to be added, if any."""

    def __init__(self, value: torch.Tensor, pending: Projected | None = None):
        self.value, self.pending = value, pending


def layer_ops(cache: decode_torch.TokenCache) -> LayerOps:
    """Return what computes a layer whose newest keys and values go to `cache`."""
    return LayerOps(norm, linear, partial(heads, cache), add, gate)


def embed(token: torch.Tensor, table: torch.Tensor) -> Residual:
    """Compute `decode_torch.embed`."""
    return Residual(F.embedding(token, table))


def linear(inputs: torch.Tensor | Normed, linears: Linears) -> Projected:
    """Compute the product of `layers.linear`."""
    if isinstance(inputs, Normed):
        if linears.int8 is not None:
            return Projected(int8_triton.product(inputs.x, linears.int8)[0], linears, inputs)
        return Projected(F.linear(inputs.x, linears.weight), linears, inputs)
    if linears.int8 is not None:
        return Projected(int8_triton.product(inputs, linears.int8, split=True), linears)
    return Projected(_product(inputs, linears.weight), linears)


def add(residual: Residual, projected: Projected) -> Residual:
    """Leave it to the next `norm` to add the output of a linear."""
    return Residual(residual.value, projected)


# These run once a token, not once a layer.


@torch.compile
def _first_norm(residual, weight):
    return residual * weight, residual.float().square().mean(1, keepdim=True)


@torch.compile
def _finish(x, power, eps):
    return (x * torch.rsqrt(power.sum(1, keepdim=True) + eps)).to(x.dtype)


def final(residual: Residual, norm_weights: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `decode_torch.final`."""
    normed = norm(residual, norm_weights)
    return residual.value, _finish(*normed)


choose = torch.compile(decode_torch.choose)


@triton.jit
def _add_norm(
    residual, product, weight, x, power, S: tl.constexpr, SUMMANDS: tl.constexpr, C: tl.constexpr
):
    rows = (tl.program_id(1) * S.ROWS + tl.arange(0, S.ROWS)).to(tl.int64)
    block = tl.program_id(0)
    columns, width = block * C + tl.arange(0, C), S.NORM_SUMMANDS * C
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
    delta = with_lora(product, delta, inner.to(dtype), b, S)
    # Rounded twice, as the model rounds a linear's output and the sum.
    total = (before + delta.to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual + at, total, mask=valid[:, None])
    total = total.to(tl.float32)
    tl.store(x + at, (total * scale[None, :]).to(dtype), mask=valid[:, None])
    # Each block of columns leaves its part of the mean square; the reader adds them.
    tl.store(
        power + rows * S.NORM_SUMMANDS + block, tl.sum(total * total, axis=1) / width, mask=valid
    )


def norm(residual: Residual, weights: Norm) -> Normed:
    """Compute `layers.norm`; first add what is still to be added, in place."""
    value, projected = residual.value, residual.pending
    if projected is None:
        return Normed(*_first_norm(value, weights.weight), weights.eps)
    residual.pending = None
    (n, width), x = value.shape, torch.empty_like(value)
    # Summands of the mean square, one for each block of columns.
    power = value.new_empty(n, width // COLUMNS, dtype=torch.float32)
    # Many programs of few rows and two warps take the least time; in float32 two have too few
    # registers.
    product, sizes = product_of(projected, power, most_rows=16)
    num_warps = 2 if value.element_size() == 2 else 4
    grid = width // COLUMNS, triton.cdiv(n, sizes.ROWS)
    _add_norm[grid](
        value,
        product,
        weights.weight,
        x,
        power,
        sizes,
        len(projected.y),
        COLUMNS,
        num_warps=num_warps,
    )
    return Normed(x, power, weights.eps)


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
    g = read_outputs(product, product.y, rows, columns).to(tl.float32)
    u = read_outputs(product, product.y, rows, up_columns).to(tl.float32)
    if S.RANK > 0:
        g += product.scaling * lora_product(product, rows, columns, inner, S)
        u += product.scaling * lora_product(product, rows, up_columns, inner + S.RANK, S)
    scale = norm_scale(summands, eps)
    g = (g * scale).to(dtype).to(tl.float32)
    u = (u * scale).to(dtype).to(tl.float32)
    g = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)  # silu
    at = rows[:, None] * width + columns[None, :]
    tl.store(out + at, (g * u).to(dtype), mask=(rows < product.num_rows)[:, None])


def gate(projected: Projected) -> torch.Tensor:
    """Compute `layers.gate`."""
    y, normed, width = projected.y, projected.normed, projected.linears.sizes[0]
    # More columns per program read LoRA A's outputs and the norm's summands less often.
    columns = COLUMNS if width % (2 * COLUMNS) else 2 * COLUMNS
    out = y.new_empty(len(y), width)
    product, sizes = product_of(projected, normed.power)
    grid = width // columns, triton.cdiv(len(y), sizes.ROWS)
    _gate[grid](product, normed.power, normed.eps, out, width, sizes, columns)
    return out
