"""A decoder layer in plain torch, defined once for the update, the prompts and the sampler.

    q, k, v = heads(linear(norm(x), qkv))
    x = x + linear(attention(q, k, v), out)
    x = x + linear(gate(linear(norm(x), gate_up)), down)

Tokens are packed, without padding. A linear is y = x W^T + b + s (x A^T) B^T, of which W and b are
frozen, A and B are not. The caller of a layer chooses its attention, and the `LayerOps` that
compute the rest: TORCH_OPS, which torch.compile fuses into few kernels, or the sampler's kernels.

Letters: m tokens, C width, H query heads, K key-value heads, D head size, F MLP width, r LoRA rank,
k linears of one input.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F


# Records are named tuples, which torch.compile supports as it supports tuples.
class Norm(NamedTuple):
    """An RMSNorm."""

    weight: torch.Tensor  # (C,), or (D,) of each head
    eps: float


class Int8Weights(NamedTuple):
    """Frozen weights of k linears in int8, and their LoRA's A, from which a kernel multiplies."""

    values: torch.Tensor  # (outputs, C) int8
    scale: torch.Tensor  # (outputs,) float32
    lora_a: torch.Tensor  # (rows of LoRA's A, C)


class Linears(NamedTuple):
    """k linears that read one input, with their LoRA.

    Attributes:
        weight: (outputs, C) frozen, of all linears, C the width of their input; behind these rows,
            if there are B and `a` is empty, LoRA's A.
        bias: as many numbers as weight has rows, 0 for those of LoRA's A; or None.
        sizes: outputs of each linear.
        scaling: of the LoRA, alpha / r.
        a: LoRA's A (r, C) of each, or one of all.
        b: LoRA's B (outputs of its own, r) of each; none: no LoRA.
        joined_b: `b` as one tensor (outputs, r), which kernels read, or None.
        second_b: B of a second LoRA, which the second half of the rows has: only the sampler's
            operations take it. Its A are the last rows of weight, and `joined_b` is (2, outputs,
            r).
        int8: the rows of weight in int8, which the sampler's kernels then read in its place.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: list[int]
    scaling: float
    a: Sequence[torch.Tensor] = ()
    b: Sequence[torch.Tensor] = ()
    joined_b: torch.Tensor | None = None
    second_b: Sequence[torch.Tensor] = ()
    int8: Int8Weights | None = None


class Layer(NamedTuple):
    """Weights of a decoder layer."""

    norm: Norm  # before attention
    qkv: Linears
    head_norms: tuple[Norm, ...]  # of each head of q and of k, or none
    out: Linears
    mlp_norm: Norm
    gate_up: Linears
    down: Linears


class Rotation(NamedTuple):
    """Rotary embedding of m tokens, (m, 1, D/2) each."""

    cos: torch.Tensor
    sin: torch.Tensor


class LayerOps(NamedTuple):
    """Functions that compute a layer, as the ones below of the same names do."""

    norm: Callable
    linear: Callable
    heads: Callable
    add: Callable
    gate: Callable


def norm(x: torch.Tensor, weights: Norm) -> torch.Tensor:
    """Return the RMSNorm (.., C) of x (.., C).

    It rounds where the model rounds; compiled, it rounds only the kernels' outputs.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + weights.eps)
    return weights.weight * y.to(x.dtype)  # rounded before the weight, as by Qwen2RMSNorm


def linear(x: torch.Tensor, linears: Linears) -> Sequence[torch.Tensor]:
    """Return the output (m, outputs) of each of k linears of one input."""
    weight, bias, sizes, scaling, a, b, *_ = linears
    # LoRA's A are rows of weight: one product gives the outputs and A's (m, k*r).
    if b and not a:
        y = F.linear(x, weight, bias)
        outputs, inner = y[:, : sum(sizes)].split(sizes, 1), y[:, sum(sizes) :]
    elif bias is None and min(sizes) > weight.shape[1]:
        # Wide linears, as the MLP's, one by one: their derivatives need not be concatenated.
        outputs = [F.linear(x, rows) for rows in weight.split(sizes)]
    else:
        outputs = F.linear(x, weight, bias).split(sizes, 1)  # (m, sizes[i]) each
    if not b:
        return outputs
    if a:
        # Autograd follows A, a float32 parameter or a copy of it, by a product of its own.
        inner = F.linear(x, (torch.cat(a) if len(a) > 1 else a[0]).to(x.dtype))
    inner = scaling * inner  # scaled here: r is small beside the outputs
    # B differs from linear to linear, so each has a product with its r columns of `inner`.
    lora_inputs = zip(outputs, inner.chunk(len(sizes), 1), b)
    return [y + F.linear(lora_input, rows.to(x.dtype)) for y, lora_input, rows in lora_inputs]


def heads(
    projected: Sequence[torch.Tensor], norms: tuple[Norm, ...], rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q (m, H, D), k and v (m, K, D); q and k are rotated, and normed before if `norms`."""
    size = 2 * rotation.cos.shape[2]
    q, k, v = (part.unflatten(1, (-1, size)) for part in projected)
    if norms:
        q, k = (norm(x, weights) for x, weights in zip((q, k), norms))
    # Copied: a view would keep the product of q, k and v in memory for as long as v.
    return rotate(q, *rotation), rotate(k, *rotation), v.contiguous()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (m, heads, D) by angles with cos, sin (m, 1, D/2)."""
    first, second = x.chunk(2, dim=2)  # halves, not pairs of neighbours: transformers' rotate_half
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)


def add(residual: torch.Tensor, delta: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the residual (m, C) plus the output of a linear."""
    return residual + delta[0]


def gate(projected: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return silu(gate) * up (m, F)."""
    gate, up = projected
    return F.silu(gate) * up


TORCH_OPS = LayerOps(norm, linear, heads, add, gate)


def decoder_layer(
    x: torch.Tensor,
    layer: Layer,
    rotation: Rotation,
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ops: LayerOps = TORCH_OPS,
) -> torch.Tensor:
    """Return the residual (m, C) after a layer.

    Args:
        x: residual (m, C) before it, in the form that `ops` take.
        rotation: of the tokens, likewise.
        attention: returns (m, H*D) from q (m, H, D), k and v (m, K, D).
    """
    attn_output = attention(*before_attention(x, layer, rotation, ops))
    return after_attention(x, attn_output, layer, ops)


def before_attention(
    x: torch.Tensor, layer: Layer, rotation: Rotation, ops: LayerOps = TORCH_OPS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q (m, H, D), k and v (m, K, D) of a layer."""
    projected = ops.linear(ops.norm(x, layer.norm), layer.qkv)
    return ops.heads(projected, layer.head_norms, rotation)


def after_attention(
    x: torch.Tensor, attn_output: torch.Tensor, layer: Layer, ops: LayerOps = TORCH_OPS
) -> torch.Tensor:
    """Return the residual (m, C) after a layer, given its attention `attn_output` (m, H*D)."""
    x = ops.add(x, ops.linear(attn_output, layer.out))
    inner = ops.gate(ops.linear(ops.norm(x, layer.mlp_norm), layer.gate_up))
    return ops.add(x, ops.linear(inner, layer.down))


def mark_rows_dynamic(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors, marked so that torch.compile keeps their number of rows dynamic."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors
