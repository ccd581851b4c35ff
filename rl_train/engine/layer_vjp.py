"""Derivatives of the two halves of a layer, for a backward that recomputes it.

Letters: m tokens, C width, H query heads, K key-value heads, D head size, r LoRA rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from rl_train.engine import layers
from rl_train.engine.layers import Layer, Linears, Rotation


def before_attention_vjp(
    d_residual: torch.Tensor,
    d_heads: tuple[torch.Tensor, ...],
    residual: torch.Tensor,
    layer: Layer,
    rotation: Rotation,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the residual, `d_residual` added, and of A, B of each linear of qkv.

    Args:
        d_residual: gradient of the residual that goes past attention; d_heads: of q, k, v; the rest
            as in `layers.before_attention`, where LoRA's A are rows of the weights.
    """
    norm, qkv, head_norms, *behind = layer
    frozen, lora = _apart(qkv)

    def function(residual, lora):
        replaced = Layer(norm, _with_lora(frozen, lora), head_norms, *behind)
        return layers.before_attention(residual, replaced, rotation)

    # The residual also goes past attention: both derivatives are added.
    d_by_attention, d_lora = torch.func.vjp(function, residual, lora)[1](d_heads)
    return d_residual + d_by_attention, *_of_each(*d_lora)


def after_attention_vjp(
    d: torch.Tensor, residual: torch.Tensor, attn_output: torch.Tensor, layer: Layer
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of residual, of attn_output and of A, B of each linear in turn.

    Compiled, it does not compute the output of `down`. d: gradient of the layer's output.
    """
    *before, out, mlp_norm, gate_up, down = layer
    frozen, loras = zip(*[_apart(linears) for linears in (out, gate_up, down)])

    def function(residual, attn_output, loras):
        out, gate_up, down = map(_with_lora, frozen, loras)
        replaced = Layer(*before, out, mlp_norm, gate_up, down)
        return layers.after_attention(residual, attn_output, replaced)

    # The derivative does not depend on the output, so the compiler drops the last product.
    vjp = torch.func.vjp(function, residual, attn_output, loras)[1]
    d_residual, d_attn_output, d_loras = vjp(d)
    return d_residual, d_attn_output, *[d for d_lora in d_loras for d in _of_each(*d_lora)]


def _apart(linears: Linears):
    """Return the linears without LoRA, and (A, B), where A were the last rows of weight."""
    weight, bias, sizes, scaling, a, b, *_ = linears
    outputs = sum(sizes)
    bias = None if bias is None else bias[:outputs]  # without the zeros of LoRA's A
    frozen = Linears(weight[:outputs], bias, sizes, scaling)
    return frozen, ((weight[outputs:],) if b else a, b)


def _with_lora(frozen: Linears, lora) -> Linears:
    """Return the linears with a LoRA (A, B)."""
    a, b = lora
    return Linears(frozen.weight, frozen.bias, frozen.sizes, frozen.scaling, a, b)


def _of_each(a, b):
    """Return float32 derivatives by A, B of the first linear, of the second, .."""
    d_a = a[0].float().chunk(len(b)) if b else ()  # (k*r, C) in k parts
    return [d for pair in zip(d_a, b) for d in (pair[0], pair[1].float())]


class LayerFunctions(NamedTuple):
    """Functions of a layer, plain or compiled."""

    before_attention: Callable
    after_attention: Callable
    norm: Callable
    before_attention_vjp: Callable
    after_attention_vjp: Callable


FUNCTIONS = LayerFunctions(
    layers.before_attention,
    layers.after_attention,
    layers.norm,
    before_attention_vjp,
    after_attention_vjp,
)
