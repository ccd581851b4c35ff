"""Dequantisation of int8 weights in Triton.

A program has one row: the kernel that torch.compile makes divides each number's index by the width.
"""

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # that a program reads at a time


@triton.jit
def _multiply(packed, scale, out, width, C: tl.constexpr):
    """Multiply a row by its scale in float32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    for start in range(0, width, C):
        column = start + tl.arange(0, C)
        valid = column < width
        at = row * width + column
        value = tl.load(packed + at, mask=valid, other=0).to(tl.float32)
        tl.store(out + at, (value * factor).to(out.dtype.element_ty), mask=valid)


def multiply(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor):
    """Write packed (out, in) int8 times scale (out,) float32 to `out` (out, in), contiguous."""
    _multiply[(len(packed),)](packed, scale, out, packed.shape[1], COLUMNS)
