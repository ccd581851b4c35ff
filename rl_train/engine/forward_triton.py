"""The parts of the training forward that are not matrix products as one Triton kernel each. Same functions as `forward_torch`.

Letters: m tokens, C width, H query heads, K key-value heads, D head size, F MLP width. Sums are float32; rounding to the tensors' dtype
happens where the model rounds.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # numbers of a program that works on them one by one


@triton.jit
def _add_norm(residual, delta, weight, total, out, eps, width, delta_stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dtype = residual.dtype.element_ty
    kept = column < width
    x = tl.load(residual + row * width + column, mask=kept, other=0.0).to(tl.float32)
    x = (x + tl.load(delta + row * delta_stride + column, mask=kept, other=0.0).to(tl.float32)).to(
        dtype
    )
    tl.store(total + row * width + column, x, mask=kept)
    x = x.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x) / width + eps)).to(dtype).to(tl.float32)
    tl.store(
        out + row * width + column,
        (x * tl.load(weight + column, mask=kept, other=0.0).to(tl.float32)).to(dtype),
        mask=kept,
    )


def add_norm(residual, delta, weight, eps):
    m, width = residual.shape
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    _add_norm[(m,)](
        residual,
        delta,
        weight,
        total,
        out,
        eps,
        width,
        delta.stride(0),
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
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
    at, column = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    kept = column < width
    x = tl.load(residual + at + column, mask=kept, other=0.0).to(tl.float32)
    d = tl.load(d_normed + at + column, mask=kept, other=0.0).to(tl.float32) * tl.load(
        weight + column, mask=kept, other=0.0
    ).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    x *= scale
    d = scale * (d - x * (tl.sum(d * x) / width))
    if HAS_RESIDUAL:
        d += tl.load(d_residual + at + column, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + at + column, d.to(out.dtype.element_ty), mask=kept)


def add_norm_backward(d_normed, d_residual, residual, weight, eps):
    (m, width), out = residual.shape, torch.empty_like(residual)
    d_normed = d_normed.contiguous()
    d_residual = None if d_residual is None else d_residual.contiguous()
    _add_norm_backward[(m,)](
        d_normed,
        d_normed if d_residual is None else d_residual,
        residual,
        weight,
        out,
        eps,
        width,
        HAS_RESIDUAL=d_residual is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
    return out


@triton.jit
def _rotate(
    qkv,
    cos,
    sin,
    out,
    num_turned,
    stride,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    row, heads, half = (
        tl.program_id(0).to(tl.int64),
        tl.arange(0, BLOCK)[:, None],
        tl.arange(0, HALF)[None, :],
    )
    kept, turned = heads < NUM, heads < num_turned
    at = heads * 2 * HALF + half
    first = tl.load(qkv + row * stride + at, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(qkv + row * stride + at + HALF, mask=kept, other=0.0).to(tl.float32)
    c, s = (
        tl.load(cos + row * HALF + half).to(tl.float32),
        tl.load(sin + row * HALF + half).to(tl.float32),
    )
    dtype = out.dtype.element_ty
    out += row * NUM * 2 * HALF + at
    tl.store(out, tl.where(turned, first * c - second * s, first).to(dtype), mask=kept)
    tl.store(out + HALF, tl.where(turned, second * c + first * s, second).to(dtype), mask=kept)


def rotate(qkv, cos, sin, num_turned):
    m, num, size = qkv.shape
    out = qkv.new_empty(m, num, size)
    _rotate[(m,)](
        qkv,
        cos,
        sin,
        out,
        num_turned,
        qkv.stride(0),
        NUM=num,
        BLOCK=triton.next_power_of_2(num),
        HALF=size // 2,
    )
    return out


@triton.jit
def _gate(y, out, width, stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < width
    dtype = out.dtype.element_ty
    g = tl.load(y + row * stride + column, mask=kept, other=0.0).to(tl.float32)
    u = tl.load(y + row * stride + width + column, mask=kept, other=0.0).to(tl.float32)
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
    g = tl.load(y + row * stride + column, mask=kept, other=0.0).to(tl.float32)
    u = tl.load(y + row * stride + width + column, mask=kept, other=0.0).to(tl.float32)
    by = tl.load(d + row * width + column, mask=kept, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-g))
    silu = g * share
    tl.store(
        dy + row * 2 * width + column, (by * u * (share + silu * (1 - share))).to(dtype), mask=kept
    )
    tl.store(dy + row * 2 * width + width + column, (by * silu).to(dtype), mask=kept)
    tl.store(out + row * width + column, (silu.to(dtype).to(tl.float32) * u).to(dtype), mask=kept)


def gate_backward(d, y):
    m, width = d.shape
    dy, out = d.new_empty(m, 2 * width), torch.empty_like(d)
    _gate_backward[(m, triton.cdiv(width, BLOCK))](d, y, dy, out, width, y.stride(0), BLOCK=BLOCK)
    return dy, out
