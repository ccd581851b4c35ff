"""Product of few rows with int8 weights in Triton, without a dequantised copy of them.

A token of the sampler reads each weight once: its time is that of the bytes read.

Letters: N rows, C inputs, a rows of LoRA's A.
"""

import torch
import triton
import triton.language as tl

from rl_train.engine.layers import Int8Weights
from rl_train.engine.linear_triton import at_least_16

MOST_ROWS = 128  # with more rows weights are dequantised; what is faster there was not measured
ROWS = 64  # of a program at most
COLUMNS = 64  # of a program
INPUTS = 64  # that a program reads at a time; twice as many of 16 bits, if that divides its inputs
# Numbers of parts into which `product` can split the inputs; it takes the first one that the width
# allows. More parts are more programs, which read at the same time.
SPLITS = (4, 2, 1)


@triton.jit
def _int8_product(
    x,
    values,
    scale,
    lora_a,
    y,
    num_rows,
    width,
    outputs,
    stride,
    summand_width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute columns of a summand of y, of LoRA's A or of the weights.

    The first programs multiply with LoRA's A, the others with the weights. A number of A takes two
    bytes (in float32 four), one of the weights takes one: a program of A has half as many columns,
    so that it reads as many bytes as the others and does not end after them.
    """
    num_lora_a = tl.cdiv(stride - outputs, COLUMNS // 2)
    item = tl.program_id(0)
    sizes = num_rows, width, stride, summand_width
    if item < num_lora_a:
        lora_columns = (item * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)).to(tl.int64)
        num_columns = stride - outputs
        _columns(x, lora_a, scale, y + outputs, lora_columns, num_columns, *sizes, ROWS, INPUTS)
    else:
        block = item - num_lora_a
        weight_columns = (block * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        _columns(x, values, scale, y, weight_columns, outputs, *sizes, ROWS, INPUTS)


@triton.jit
def _columns(
    x,
    matrix,
    scale,
    y,
    columns,
    num_columns,
    num_rows,
    width,
    stride,
    summand_width,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute columns of a summand of y: x times rows of a matrix in int8 or in the dtype of x.

    The product is W x^T: tensor cores take their first factor, the weights, from registers.
    """
    dtype = x.dtype.element_ty
    in_int8: tl.constexpr = matrix.dtype.element_ty == tl.int8
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row, is_column = (rows < num_rows)[None, :], (columns < num_columns)[:, None]
    summand = tl.program_id(2)
    at = summand * summand_width + tl.arange(0, INPUTS)
    x += rows[None, :] * width + at[:, None]
    matrix += columns[:, None] * width + at[None, :]
    if in_int8:
        factor = tl.load(scale + columns)[:, None]
    total = tl.zeros((columns.shape[0], ROWS), tl.float32)
    for start in range(0, summand_width, INPUTS):
        inputs = tl.load(x + start, mask=is_row, other=0.0)
        if in_int8:
            # Rounded as in `quantize_triton`: sampler and scorer have the same weights.
            weights = (tl.load(matrix + start).to(tl.float32) * factor).to(dtype)
        else:
            weights = tl.load(matrix + start, mask=is_column, other=0.0)
        total = tl.dot(weights, inputs, total, input_precision="ieee")
    y += (summand * num_rows + rows[None, :]) * stride + columns[:, None]
    tl.store(y, total.to(y.dtype.element_ty), mask=is_row & is_column)


def fits(outputs: int, width: int) -> bool:
    """Tell whether `product` supports these sizes."""
    return outputs % COLUMNS == width % INPUTS == 0


def product(x: torch.Tensor, weights: Int8Weights, split: bool = False) -> torch.Tensor:
    """Return x (N, C) times the dequantised weights and LoRA's A: (summands, N, outputs + a).

    Args:
        split: whether to split the inputs into several parts. Their summands are float32; a single
            one has the dtype of x.
    """
    (num_rows, width), outputs = x.shape, len(weights.values)
    summands = next(n for n in SPLITS if width % (n * INPUTS) == 0) if split else 1
    stride, summand_width = outputs + len(weights.lora_a), width // summands
    y = x.new_empty(summands, num_rows, stride, dtype=torch.float32 if summands > 1 else x.dtype)
    rows = min(ROWS, at_least_16(num_rows))
    twice = x.element_size() == 2 and summand_width % (2 * INPUTS) == 0
    column_blocks = triton.cdiv(stride - outputs, COLUMNS // 2) + outputs // COLUMNS
    grid = column_blocks, triton.cdiv(num_rows, rows), summands
    _int8_product[grid](
        x,
        *weights,
        y,
        num_rows,
        width,
        outputs,
        stride,
        summand_width,
        rows,
        COLUMNS,
        2 * INPUTS if twice else INPUTS,
        num_stages=3 if twice else 4,  # reads in flight: fewer of more bytes
    )
    return y
