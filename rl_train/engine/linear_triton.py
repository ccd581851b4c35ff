"""Functions that Triton kernels of a decode step share: products with their LoRA, and RMSNorm.

Letters: N rows, C width, F MLP width, r LoRA rank. Rows and columns below are the ones of a
program. Kernels read all their inputs before they compute, except those of `lora_product`: most of
their time is the wait for the first of these.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rl_train.engine.layers import Linears

# Columns of the width that a program computes; of the MLP's width twice as many if these divide it.
COLUMNS = 32


class Normed(NamedTuple):
    """RMSNorm x / sqrt(power.sum(1) + eps).

    As the divisor is one number a row, linears take x and their outputs are divided.
    """

    x: torch.Tensor  # (N, C), its input times its weight
    power: torch.Tensor  # (N, any) summands of its input's mean square
    eps: float


class Projected(NamedTuple):
    """A product with the matrix of linears.

    The kernel that reads it adds the LoRA, divides, and adds the bias.

    Attributes:
        y: (N, outputs + k*r), or summands of it (.., N, outputs + k*r).
        normed: input of the product, if that is a norm.
    """

    y: torch.Tensor
    linears: Linears
    normed: Normed | None = None


def complete(projected: Projected) -> Sequence[torch.Tensor]:
    """Return what `layers.linear` does, in plain torch."""
    y, (_, bias, sizes, scaling, _, b, _, second_b, _), normed = projected
    dtype, outputs = projected.linears.weight.dtype, sum(sizes)
    y = y.sum(0) if y.dim() > 2 else y
    y, inner = y[:, :outputs].float(), y[:, outputs:].to(dtype)
    if second_b:  # each half of the rows has its own LoRA
        (first, _), (_, second) = (half.chunk(2, 1) for half in inner.chunk(2))
        deltas = [lora_outputs(first, b), lora_outputs(second, second_b)]
        y = y + scaling * torch.cat(deltas)
    elif b:
        y = y + scaling * lora_outputs(inner, b)
    if normed is not None:
        y = y * torch.rsqrt(normed.power.sum(1, keepdim=True) + normed.eps)
    if bias is not None:  # behind the division, which must not scale it
        y = y + bias[:outputs]
    return y.to(dtype).split(sizes, 1)


def lora_outputs(inner: torch.Tensor, b: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return (N, outputs) of LoRA B after the outputs (N, k*r) of its A."""
    pairs = zip(inner.chunk(len(b), 1), b)
    return torch.cat([a @ rows.t() for a, rows in pairs], dim=1)


class Product(NamedTuple):
    """Arguments of a kernel that reads a product."""

    y: torch.Tensor  # (.., N, stride), whose last columns are the outputs of LoRA A
    lora_b: torch.Tensor  # (outputs, r) or (2, outputs, r), unread without LoRA
    scaling: float
    num_rows: int  # N
    stride: int
    first_rows: int  # rows of the first LoRA; N if there is one
    second_a: int  # columns of y from the first LoRA's outputs of A to the second's
    second_b: int  # numbers from the first LoRA's B to the second's


class Sizes(NamedTuple):
    """Constants of the compiled kernels."""

    ROWS: int  # of a program
    RANK: int  # 0 without LoRA
    RANK_BLOCK: int
    RANK_STEP: int  # LoRA A's outputs that `lora_product` reads at a time
    NORM_SUMMANDS: int  # summands of a row's power
    NORM_SUMMANDS_BLOCK: int


def product_of(
    projected: Projected, power: torch.Tensor, most_rows: int = 64
) -> tuple[Product, Sizes]:
    """Return the kernels' arguments for a product, and their constants.

    Args:
        power: (N, summands) of a norm that the kernel reads or writes.
        most_rows: of a program.
    """
    y, linears, _ = projected
    num_rows, stride = y.shape[-2:]
    lora_b = linears.joined_b
    rank = 0 if lora_b is None else lora_b.shape[-1]
    num_summands = power.shape[1]
    first_rows, outputs = num_rows, sum(linears.sizes)
    rows = min(most_rows, program_rows(num_rows))
    if linears.second_b:  # then a program's rows have one LoRA
        first_rows = num_rows // 2
        rows = math.gcd(most_rows, first_rows)
        assert rows >= 16, f"halves of {first_rows} rows are no multiple of 16"
    sizes = Sizes(
        rows,
        rank,
        at_least_16(rank),
        min(64, at_least_16(rank)),
        num_summands,
        triton.next_power_of_2(num_summands),
    )
    product = Product(
        y,
        y if lora_b is None else lora_b,
        linears.scaling,
        num_rows,
        stride,
        first_rows,
        rank * len(linears.sizes),
        outputs * rank,
    )
    return product, sizes


def program_rows(n: int) -> int:
    """Return the rows of a program: tensor cores take at least 16, more than 64 spill registers."""
    return min(64, at_least_16(n))


def at_least_16(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@triton.jit
def is_second(product: "Product", S: tl.constexpr):
    """Return 1 if the program's rows, block number program_id(1), have the second LoRA, else 0."""
    return (tl.program_id(1) * S.ROWS >= product.first_rows).to(tl.int64)


@triton.jit
def read_outputs(product: "Product", y: tl.tensor, rows: tl.tensor, columns: tl.tensor):
    """Read (rows, columns) of y."""
    at = y + rows[:, None] * product.stride + columns[None, :]
    return tl.load(at, mask=(rows < product.num_rows)[:, None], other=0.0)


@triton.jit
def read_linear(
    product: "Product",
    y: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    S: tl.constexpr,
):
    """Read (rows, columns) of y, and the outputs of LoRA A.

    Args: inner: column at which these start, of the first LoRA.
    """
    valid, r = (rows < product.num_rows)[:, None], tl.arange(0, S.RANK_BLOCK)
    lora_at = y + rows[:, None] * product.stride + inner + is_second(product, S) * product.second_a
    a = tl.load(lora_at + r[None, :], mask=valid & (r < S.RANK)[None, :], other=0.0)
    return read_outputs(product, y, rows, columns), a


@triton.jit
def lora_product(
    product: "Product", rows: tl.tensor, columns: tl.tensor, inner: tl.tensor, S: tl.constexpr
):
    """Return (rows, columns) of the product of LoRA A's outputs and B, in float32.

    It is for programs of many rows and columns, for which registers can't hold both factors: the
    loop makes Triton read the next part of both into shared memory.

    Args: inner: as in `read_linear`.
    """
    lora_a = product.y + rows[:, None] * product.stride + inner
    lora_a += is_second(product, S) * product.second_a
    lora_b = product.lora_b + is_second(product, S) * product.second_b
    lora_b += columns[None, :] * S.RANK
    valid = (rows < product.num_rows)[:, None]
    ROWS: tl.constexpr = S.ROWS
    total = tl.zeros((ROWS, columns.shape[0]), tl.float32)
    for start in tl.range(0, S.RANK, S.RANK_STEP, num_stages=3):
        r = start + tl.arange(0, S.RANK_STEP)
        a = tl.load(lora_a + r[None, :], mask=valid & (r < S.RANK)[None, :], other=0.0)
        b = tl.load(lora_b + r[:, None], mask=(r < S.RANK)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def read_lora_b(product: "Product", columns: tl.tensor, S: tl.constexpr):
    """Read columns of LoRA B, transposed: (RANK_BLOCK, columns)."""
    r = tl.arange(0, S.RANK_BLOCK)
    lora_b = product.lora_b + is_second(product, S) * product.second_b
    at = lora_b + columns[None, :] * S.RANK + r[:, None]
    return tl.load(at, mask=(r < S.RANK)[:, None], other=0.0)


@triton.jit
def linear(product: "Product", outputs: tl.tensor, a: tl.tensor, b: tl.tensor, S: tl.constexpr):
    """Return outputs + scaling a b, in float32."""
    total = outputs.to(tl.float32)
    if S.RANK > 0:
        total += product.scaling * tl.dot(a, b, input_precision="ieee")
    return total


@triton.jit
def read_power(power: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, S: tl.constexpr):
    """Read the summands (rows, NORM_SUMMANDS_BLOCK) of each row's mean square."""
    summand = tl.arange(0, S.NORM_SUMMANDS_BLOCK)
    valid = (rows < num_rows)[:, None] & (summand < S.NORM_SUMMANDS)[None, :]
    return tl.load(
        power + rows[:, None] * S.NORM_SUMMANDS + summand[None, :], mask=valid, other=0.0
    )


@triton.jit
def norm_scale(summands: tl.tensor, eps: tl.tensor):
    """Return the factor (rows, 1) of RMSNorm."""
    return tl.rsqrt(tl.sum(summands, axis=1) + eps)[:, None]
