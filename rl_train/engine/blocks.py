"""The parts of a decoder layer but attention, as differentiable functions of all tokens.

A linear is y = x W^T + b + s (x A^T) B^T, of which W and b are frozen, A and B are not. Linears of
one input (`fused.FusedLinears`) share x, and their y's stand side by side.

Letters: m tokens, C width, H query heads, K key-value heads, D head size, F MLP width, r LoRA rank,
k linears of one input.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from rl_train.engine.decode_torch import add_lora


class AddNorm(torch.autograd.Function):
    """(residual + delta, its RMSNorm), both (m, C)."""

    @staticmethod
    def forward(ctx, residual, delta, norm, ops):
        weight, ctx.eps, ctx.ops = norm.weight, norm.variance_epsilon, ops
        residual, x = ops.add_norm(residual, delta, weight, ctx.eps)
        ctx.save_for_backward(residual, weight)
        ctx.set_materialize_grads(False)
        return residual, x

    @staticmethod
    @once_differentiable
    def backward(ctx, d_residual, d_x):
        d = ctx.ops.add_norm_backward(d_x, d_residual, *ctx.saved_tensors, ctx.eps)
        return d, d, None, None


def _forward(linears, x):
    """(m, outputs + k*r): the outputs of k linears, then x A^T of each."""
    y = F.linear(x, linears.weight, linears.bias)
    add_lora(y, linears)
    return y


def _backward(linears, weight, lora_b, dy, inner):
    """(derivative by x, by x A^T or None, by each B), given dy (m, outputs), inner = x A^T."""
    sizes = linears.sizes
    outputs = sum(sizes)
    dx = dy @ weight[:outputs]  # (m, inputs)
    if lora_b is None:
        return dx, None, []
    d_inner, d_b, k = torch.empty_like(inner), [], len(sizes)
    d_outs, bs = dy.split_with_sizes(sizes, 1), lora_b.split_with_sizes(sizes)
    for d_out, d_in, x_in, b in zip(d_outs, d_inner.chunk(k, 1), inner.chunk(k, 1), bs):
        d_in.addmm_(d_out, b, beta=0, alpha=linears.scaling)
        d_b.append((d_out.t() @ x_in).float().mul_(linears.scaling))
    return dx.addmm_(d_inner, weight[outputs:]), d_inner, d_b


def _gradients(d_inner, x, d_b) -> list[torch.Tensor]:
    """Of A, B of the first linear, of the second, .., in float32."""
    if d_inner is None:
        return []
    d_a = (d_inner.t() @ x).float().chunk(len(d_b))
    return [d for pair in zip(d_a, d_b) for d in pair]


class Linear(torch.autograd.Function):
    """(m, outputs) of linears; `lora`: their `sources`, of which weight and lora_b hold copies."""

    @staticmethod
    def forward(ctx, x, linears, *lora):
        y = _forward(linears, x)
        outputs = sum(linears.sizes)
        ctx.save_for_backward(x, y[:, outputs:].clone(), linears.weight, linears.lora_b)
        ctx.linears = linears
        return y[:, :outputs]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, inner, weight, lora_b = ctx.saved_tensors
        dx, d_inner, d_b = _backward(ctx.linears, weight, lora_b, dy, inner)
        return dx, None, *_gradients(d_inner, x, d_b)


class MLP(torch.autograd.Function):
    """(m, C) down(silu(gate(x)) * up(x)).

    The product in the brackets is computed again in the backward.
    """

    @staticmethod
    def forward(ctx, x, gate_up, down, ops, *lora):
        y = _forward(gate_up, x)  # (m, 2F + 2r)
        outputs = sum(down.sizes)
        z = _forward(down, ops.gate(y, gate_up.sizes[0]))
        ctx.save_for_backward(
            x, y, z[:, outputs:].clone(), gate_up.weight, gate_up.lora_b, down.weight, down.lora_b
        )
        ctx.gate_up, ctx.down, ctx.ops = gate_up, down, ops
        return z[:, :outputs]

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        x, y, inner, weight, lora_b, down_weight, down_b = ctx.saved_tensors
        d_gated, d_inner, d_b = _backward(ctx.down, down_weight, down_b, dz, inner)
        dy, gated = ctx.ops.gate_backward(d_gated, y)
        down = _gradients(d_inner, gated, d_b)
        dx, d_inner, d_b = _backward(ctx.gate_up, weight, lora_b, dy, y[:, dy.shape[1] :])
        return dx, None, None, None, *_gradients(d_inner, x, d_b), *down


class Rotate(torch.autograd.Function):
    """Heads [q, k, v] (m, H + 2K, D) with the rotary positions of q and k; cos, sin: (m, D/2)."""

    @staticmethod
    def forward(ctx, heads, cos, sin, num_kv, ops):
        ctx.save_for_backward(cos, sin)
        ctx.num_turned, ctx.ops = heads.shape[1] - num_kv, ops
        return ops.rotate(heads, cos, sin, ctx.num_turned)

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        cos, sin = ctx.saved_tensors
        return ctx.ops.rotate(d, cos, -sin, ctx.num_turned), None, None, None, None
