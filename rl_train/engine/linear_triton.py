"""What the Triton kernels of a decode step share: reading a product with its LoRA, and RMSNorm.

Letters: N rows, C width, F MLP width, r LoRA rank. Rows and columns below are the ones of a
program. Kernels read all that they need before they compute: what they cost is mostly the wait for
the first numbers.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from rl_train.engine.fused_weights import FusedLinears


# Of the width that a program computes; of the MLP's width twice as many where they divide it.
COLUMNS = 32


class Product(NamedTuple):
    """A product with the matrix of linears, and what finishes it."""

    y: torch.Tensor  # (.., N, stride), whose last columns are the outputs of LoRA A
    lora_b: torch.Tensor  # (outputs, r), or anything if there is none
    scaling: float
    num_rows: int  # N
    stride: int


class Sizes(NamedTuple):
    """What kernels are compiled for."""

    ROWS: int  # of a program
    RANK: int  # 0 without LoRA
    RANK_BLOCK: int
    PARTS: int  # in which a row's power comes
    PARTS_BLOCK: int


def product_of(
    y: torch.Tensor, linears: "FusedLinears", power: torch.Tensor
) -> tuple[Product, Sizes]:
    """What kernels take of a product y (.., N, outputs + k*r), and their sizes."""
    n, stride = y.shape[-2:]
    b, rank = linears.lora_b, 0 if linears.lora_b is None else linears.lora_b.shape[1]
    parts = power.shape[1]
    sizes = Sizes(program_rows(n), rank, at_least_16(rank), parts, triton.next_power_of_2(parts))
    return Product(y, y if b is None else b, linears.scaling, n, stride), sizes


def program_rows(n: int) -> int:
    """Rows of a program: tensor cores multiply at least 16, more than 64 spill registers."""
    return min(64, at_least_16(n))


def at_least_16(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@triton.jit
def read_linear(p, y, rows, columns, inner, S: tl.constexpr):
    """(rows, columns) of y, and the outputs of LoRA A, which start at column `inner`."""
    there, r = (rows < p.num_rows)[:, None], tl.arange(0, S.RANK_BLOCK)
    row = y + rows[:, None] * p.stride
    outputs = tl.load(row + columns[None, :], mask=there, other=0.0)
    at = row + inner + r[None, :]
    return outputs, tl.load(at, mask=there & (r < S.RANK)[None, :], other=0.0)


@triton.jit
def read_lora_b(p, columns, S: tl.constexpr):
    """(RANK_BLOCK, columns) LoRA B, transposed."""
    r = tl.arange(0, S.RANK_BLOCK)
    at = p.lora_b + columns[None, :] * S.RANK + r[:, None]
    return tl.load(at, mask=(r < S.RANK)[:, None], other=0.0)


@triton.jit
def linear(p, outputs, a, b, S: tl.constexpr):
    """outputs + scaling a b, float32."""
    total = outputs.to(tl.float32)
    if S.RANK > 0:
        total += p.scaling * tl.dot(a, b, input_precision="ieee")
    return total


@triton.jit
def read_power(power, rows, num_rows, S: tl.constexpr):
    """(rows, PARTS_BLOCK) shares of the mean square."""
    part = tl.arange(0, S.PARTS_BLOCK)
    there = (rows < num_rows)[:, None] & (part < S.PARTS)[None, :]
    return tl.load(power + rows[:, None] * S.PARTS + part[None, :], mask=there, other=0.0)


@triton.jit
def norm_scale(shares, eps):
    """(rows, 1) by which RMSNorm multiplies."""
    return tl.rsqrt(tl.sum(shares, axis=1) + eps)[:, None]
