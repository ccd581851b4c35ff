"""The parts of a decoder layer as differentiable functions of packed tokens, without padding.

A linear is y = x W^T + b + s (x A^T) B^T, of which W and b are frozen, A and B are not. Linears of
one input (`fused.FusedLinears`) share x, and their y's stand side by side.

Attention (m, H*D) is of heads [q, k, v] (m, H + 2K, D).

Letters: m tokens of P sequences, S slots of each, C width, H query heads, K key-value heads,
D head size, F MLP width, r LoRA rank, k linears of one input.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


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
    if linears.lora_b is not None:
        sizes = linears.sizes
        *outs, inner = y.split_with_sizes([*sizes, y.shape[1] - sum(sizes)], 1)
        inners = inner.chunk(len(sizes), 1)
        for out, a, b in zip(outs, inners, linears.lora_b.split_with_sizes(sizes)):
            out.addmm_(a, b.t(), alpha=linears.scaling)
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


@dataclass
class Runs:
    """Tokens as runs: a prompt, or what was fed of a row, which sees its prompt too."""

    num_slots: int  # S of each sequence
    slots: torch.Tensor  # (m,) where each token is among the P*S slots
    keys: torch.Tensor  # the tokens that the first run sees, the second, ..
    query_ends: torch.Tensor  # (runs + 1,) int32, from 0
    key_ends: torch.Tensor  # (runs + 1,) int32, from 0
    longest: tuple[int, int]  # queries of a run, keys of a run


def runs(part: torch.Tensor, device) -> Runs:
    """The runs of `packing.Layout.part` (P, S), on `device`."""
    many = int(part.max()) + 1
    slots = (part >= 0).flatten().nonzero()[:, 0]
    run = part.flatten()[slots] + slots // part.shape[1] * many
    names, counts = (t.tolist() for t in run.unique_consecutive(return_counts=True))
    at, keys, prompt = 0, [], None
    for name, count in zip(names, counts):
        own = torch.arange(at, at + count)
        if name % many == 0:
            prompt = own
        keys.append(own if own is prompt else torch.cat([prompt, own]))
        at += count
    lengths = [len(seen) for seen in keys]
    ends = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (counts, lengths))
    of_device = (t.to(device, non_blocking=True) for t in (slots, torch.cat(keys), *ends))
    return Runs(part.shape[1], *of_device, (max(counts), max(lengths)))


def split(heads, num_kv):
    """q (m, H, D), k (m, K, D), v (m, K, D)."""
    return heads.split_with_sizes([heads.shape[1] - 2 * num_kv, num_kv, num_kv], 1)


def by_flash(x) -> bool:
    """Whether flash attention takes such tensors."""
    return x.is_cuda and x.dtype == torch.bfloat16


class Flash(torch.autograd.Function):
    """By flash attention for runs of different length.

    The keys of a prompt are repeated for its rows, but kept once.
    """

    @staticmethod
    def forward(ctx, heads, num_kv, runs):
        q, k, v = split(heads, num_kv)
        k, v, ends = k[runs.keys], v[runs.keys], (runs.query_ends, runs.key_ends, *runs.longest)
        # Behind the ends: no dropout, causal, no debugging mask.
        out, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, 0.0, True, False
        )
        ctx.save_for_backward(heads, out, sums, state, unused)
        ctx.num_kv, ctx.runs = num_kv, runs
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        (heads, out, sums, state, unused), runs = ctx.saved_tensors, ctx.runs
        q, k, v = split(heads, ctx.num_kv)
        k, v, ends = k[runs.keys], v[runs.keys], (runs.query_ends, runs.key_ends, *runs.longest)
        dq, *d_kv = torch.ops.aten._flash_attention_backward(
            d.reshape(out.shape), q, k, v, out, sums, *ends, 0.0, True, state, unused
        )
        d_heads = torch.empty_like(heads)
        first, *parts = split(d_heads, ctx.num_kv)
        first.copy_(dq)
        for part, repeated in zip(parts, d_kv):  # up to G + 1 numbers add up, in float32
            total = torch.zeros_like(part, dtype=torch.float32)
            part.copy_(total.index_add_(0, runs.keys, repeated.float()))
        return d_heads, None, None


def dense_attention(heads, num_kv, runs, bias):
    """The same over the padded sequences with a bias (P, 1, S, S): what flash does not know."""
    q, k, v = (_padded(x, runs, len(bias)) for x in split(heads, num_kv))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[runs.slots].flatten(1)


def _padded(x, runs, num_prompts):
    """(P, heads, S, D) of x (m, heads, D), 0 at the padding."""
    slots = x.new_zeros(num_prompts * runs.num_slots, *x.shape[1:]).index_copy(0, runs.slots, x)
    return slots.unflatten(0, (num_prompts, -1)).transpose(1, 2)
