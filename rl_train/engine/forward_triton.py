"""The parts of the training forward that are not matrix products, as one Triton kernel each.

The same functions as `forward_torch`, which says what they take and return. Sums are float32;
rounding to the tensors' dtype happens where the model rounds.

Letters: m tokens, C width, H query heads, K key-value heads, D head size, F MLP width.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # numbers of a program that works on them one by one


@triton.jit
def _read(x, at, kept):
    """Numbers as float32, 0 where not kept."""
    return tl.load(x + at, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _add_norm(residual, delta, weight, total, out, eps, width, delta_stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dtype = residual.dtype.element_ty
    kept, at = column < width, row * width + column
    x = _read(residual, at, kept)
    x = (x + _read(delta, row * delta_stride + column, kept)).to(dtype)
    tl.store(total + at, x, mask=kept)
    x = x.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x) / width + eps)).to(dtype).to(tl.float32)
    tl.store(out + at, (x * _read(weight, column, kept)).to(dtype), mask=kept)


def add_norm(residual, delta, weight, eps):
    (m, width), block = residual.shape, triton.next_power_of_2(residual.shape[1])
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    tensors = residual, delta, weight, total, out
    _add_norm[(m,)](*tensors, eps, width, delta.stride(0), BLOCK=block, num_warps=8)
    return total, out


@triton.jit
def _add_norm_backward(
    d_normed,
    d_residual,
    residual,
    weight,
    out,
    eps,
    width,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    at, kept = tl.program_id(0).to(tl.int64) * width + column, column < width
    x = _read(residual, at, kept)
    d = _read(d_normed, at, kept) * _read(weight, column, kept)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    x *= scale
    d = scale * (d - x * (tl.sum(d * x) / width))
    if HAS_RESIDUAL:
        d += _read(d_residual, at, kept)
    tl.store(out + at, d.to(out.dtype.element_ty), mask=kept)


def add_norm_backward(d_normed, d_residual, residual, weight, eps):
    (m, width), out = residual.shape, torch.empty_like(residual)
    has, block = d_residual is not None, triton.next_power_of_2(width)
    d_normed = d_normed.contiguous()
    d_residual = d_residual.contiguous() if has else d_normed
    tensors = d_normed, d_residual, residual, weight, out
    _add_norm_backward[(m,)](*tensors, eps, width, HAS_RESIDUAL=has, BLOCK=block, num_warps=8)
    return out


@triton.jit
def _rotate(
    heads,
    cos,
    sin,
    out,
    num_turned,
    stride,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[:, None]
    half = tl.arange(0, HALF)[None, :]
    kept, turned = head < NUM, head < num_turned
    at = head * 2 * HALF + half
    first = _read(heads, row * stride + at, kept)
    second = _read(heads, row * stride + at + HALF, kept)
    c = tl.load(cos + row * HALF + half).to(tl.float32)
    s = tl.load(sin + row * HALF + half).to(tl.float32)
    dtype = out.dtype.element_ty
    out += row * NUM * 2 * HALF + at
    tl.store(out, tl.where(turned, first * c - second * s, first).to(dtype), mask=kept)
    tl.store(out + HALF, tl.where(turned, second * c + first * s, second).to(dtype), mask=kept)


def rotate(heads, cos, sin, num_turned):
    m, num, size = heads.shape
    out, block = heads.new_empty(m, num, size), triton.next_power_of_2(num)
    tensors, numbers = (heads, cos, sin, out), (num_turned, heads.stride(0))
    _rotate[(m,)](*tensors, *numbers, NUM=num, BLOCK=block, HALF=size // 2)
    return out


@triton.jit
def _gate(y, out, width, stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < width
    dtype = out.dtype.element_ty
    g, u = _read(y, row * stride + column, kept), _read(y, row * stride + width + column, kept)
    g = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (g * u).to(dtype), mask=kept)


def gate(y, width):
    out = y.new_empty(len(y), width)
    _gate[(len(y), triton.cdiv(width, BLOCK))](y, out, width, y.stride(0), BLOCK=BLOCK)
    return out


@triton.jit
def _gate_backward(d, y, dy, out, width, stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < width
    dtype = out.dtype.element_ty
    g, u = _read(y, row * stride + column, kept), _read(y, row * stride + width + column, kept)
    by = _read(d, row * width + column, kept)
    share = 1 / (1 + tl.exp(-g))
    silu = g * share
    d_gate = by * u * (share + silu * (1 - share))
    at = dy + row * 2 * width + column
    tl.store(at, d_gate.to(dtype), mask=kept)
    tl.store(at + width, (by * silu).to(dtype), mask=kept)
    tl.store(out + row * width + column, (silu.to(dtype).to(tl.float32) * u).to(dtype), mask=kept)


def gate_backward(d, y):
    m, width = d.shape
    dy, out = d.new_empty(m, 2 * width), torch.empty_like(d)
    _gate_backward[(m, triton.cdiv(width, BLOCK))](d, y, dy, out, width, y.stride(0), BLOCK=BLOCK)
    return dy, out
