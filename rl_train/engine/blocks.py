"""The parts of a decoder layer as functions of packed tokens, without padding.

A linear is y = x W^T + b + s (x A^T) B^T, of which W and b are frozen, A and B are not. What is not
attention is written for torch.compile, which makes few kernels of it, forward and backward.

Attention (m, H*D) is of heads [q, k, v] (m, H + 2K, D).

Letters: m tokens of P sequences, S slots of each, C width, H query heads, K key-value heads,
D head size, F MLP width, r LoRA rank, k linears of one input.
"""

from dataclasses import dataclass

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def rms_norm(x, weight, eps):
    """(m, C); rounded where the model rounds, or, compiled, only what leaves a kernel."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def linear(x, weight, bias, scaling, *lora):
    """(m, outputs) of k linears of one input, side by side.

    Args:
        weight: (outputs, C), frozen; bias: (outputs,) or None; scaling: of the LoRA, alpha / r.
        lora: A (r, C), B (outputs of its own, r) of the first, of the second, ..; or nothing.
    """
    y = F.linear(x, weight, bias)
    if not lora:
        return y
    inner = scaling * F.linear(x, torch.cat(lora[::2]).to(x.dtype))  # r is few beside outputs
    parts = [F.linear(a, b.to(x.dtype)) for a, b in zip(inner.chunk(len(lora) // 2, 1), lora[1::2])]
    return y + torch.cat(parts, dim=1)


def before_attention(residual, delta, cos, sin, num_kv, norm, qkv):
    """(residual + delta (m, C), heads [q, k, v] (m, H + 2K, D), of which q and k are turned).

    Args:
        cos, sin: (m, 1, D/2); norm: weight and epsilon; qkv: what `linear` takes behind x.
    """
    residual = residual + delta
    heads = linear(rms_norm(residual, *norm), *qkv).unflatten(1, (-1, 2 * cos.shape[2]))
    first, second = heads[:, :-num_kv].chunk(2, dim=2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
    return residual, torch.cat([turned, heads[:, -num_kv:]], dim=1)


def behind_attention(residual, mixed, out, norm, gate_up, down):
    """(residual (m, C), what the MLP adds to it (m, C)), given attention `mixed` (m, H*D)."""
    residual = residual + linear(mixed, *out)
    gate, up = linear(rms_norm(residual, *norm), *gate_up).chunk(2, dim=1)
    return residual, linear(F.silu(gate) * up, *down)


def last_norm(residual, delta, weight, eps):
    """(m, C), the norm of what comes behind the last layer."""
    return rms_norm(residual + delta, weight, eps)


FUNCTIONS = before_attention, behind_attention, last_norm


def recompute_gated():
    """Let what feeds a product of the backward too, as the MLP's gated values, be computed again.

    A third less memory where layers keep what they computed. To be said in each thread that
    compiles, of which autograd's own is one.
    """
    config = torch._functorch.config
    if config.ban_recompute_materialized_backward:
        config.ban_recompute_materialized_backward = False


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
