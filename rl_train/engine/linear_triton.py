"""What the Triton kernels of a decode step share: reading a product with its LoRA, and RMSNorm.

Letters: N rows, H query heads, K key-value heads, D head size, C width, F MLP width, r LoRA rank.
Rows and columns below are the ones of a program. Kernels read all that they need before they
compute: what they cost is mostly the wait for the first numbers.
"""

import triton
import triton.language as tl

# Of the width that a program computes; of the MLP's width twice as many where they divide it.
COLUMNS = 32


def program_rows(n: int) -> int:
    """Rows of a program: tensor cores multiply at least 16, more than 64 spill registers."""
    return min(64, at_least_16(n))


def at_least_16(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def lora_sizes(lora_b) -> dict[str, int]:
    """The kernels' RANK, 0 without LoRA, and RANK_BLOCK."""
    rank = 0 if lora_b is None else lora_b.shape[1]
    return dict(RANK=rank, RANK_BLOCK=at_least_16(rank))


def power_sizes(power) -> dict[str, int]:
    """The kernels' PARTS, in which a row's power comes, and PARTS_BLOCK."""
    return dict(PARTS=power.shape[1], PARTS_BLOCK=triton.next_power_of_2(power.shape[1]))


@triton.jit
def read_linear(
    y, rows, columns, inner, stride, num_rows, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr
):
    """(rows, columns) of y, and the outputs of LoRA A, which start at column `inner`."""
    there = (rows < num_rows)[:, None]
    r = tl.arange(0, RANK_BLOCK)
    outputs = tl.load(y + rows[:, None] * stride + columns[None, :], mask=there, other=0.0)
    at = y + rows[:, None] * stride + inner + r[None, :]
    return outputs, tl.load(at, mask=there & (r < RANK)[None, :], other=0.0)


@triton.jit
def read_lora_b(lora_b, columns, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """(RANK_BLOCK, columns) LoRA B, transposed."""
    r = tl.arange(0, RANK_BLOCK)
    at = lora_b + columns[None, :] * RANK + r[:, None]
    return tl.load(at, mask=(r < RANK)[:, None], other=0.0)


@triton.jit
def linear(outputs, a, b, scaling, RANK: tl.constexpr):
    """outputs + scaling a b, float32."""
    total = outputs.to(tl.float32)
    if RANK > 0:
        total += scaling * tl.dot(a, b, input_precision="ieee")
    return total


@triton.jit
def read_power(power, rows, num_rows, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """(rows, PARTS_BLOCK) shares of the mean square."""
    part = tl.arange(0, PARTS_BLOCK)
    there = (rows < num_rows)[:, None] & (part < PARTS)[None, :]
    return tl.load(power + rows[:, None] * PARTS + part[None, :], mask=there, other=0.0)


@triton.jit
def norm_scale(shares, eps):
    """(rows, 1) by which RMSNorm multiplies."""
    return tl.rsqrt(tl.sum(shares, axis=1) + eps)[:, None]


@triton.jit
def before_norm(total, weight, at, x, power, rows, num_rows, part, width, PARTS: tl.constexpr):
    """Store what `decode_torch.add` returns.

    total: some columns of the residual stream, weight: of the norm's weight, both float32.
    """
    there = rows < num_rows
    tl.store(x + at, (total * weight[None, :]).to(x.dtype.element_ty), mask=there[:, None])
    tl.store(power + rows * PARTS + part, tl.sum(total * total, axis=1) / width, mask=there)
