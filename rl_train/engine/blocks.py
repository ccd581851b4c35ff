"""The parts of a decoder layer as functions of packed tokens, without padding.

A linear is y = x W^T + b + s (x A^T) B^T, of which W and b are frozen, A and B are not. What is not
attention is written for torch.compile, which makes few kernels of it, forward and backward.

Letters: m tokens of P sequences, S slots of each, C width, H query heads, K key-value heads,
D head size, F MLP width, r LoRA rank, k linears of one input.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sa2va_hf.transfer import send


def rms_norm(x, weight, eps):
    """(m, C); rounded where the model rounds, or, compiled, only what leaves a kernel."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def linear(x, weight, bias, sizes, scaling, a=(), b=()):
    """(m, outputs of its own) of each of k linears of one input.

    Args:
        weight: (outputs, C), frozen, of all; bias: (outputs,) or None; sizes: outputs of each.
        scaling: of the LoRA, alpha / r.
        a: LoRA's A (r, C) of each, or one of all; without, they are the last rows of weight.
        b: B (outputs of its own, r) of each; none: no LoRA.
    """
    if b and not a:
        y = F.linear(x, weight, bias)
        own, inner = y[:, : sum(sizes)].split(sizes, 1), y[:, sum(sizes) :]
    elif bias is None and min(sizes) > weight.shape[1]:
        # Wide ones, as the MLP's: else their derivatives were copied side by side first.
        own = [F.linear(x, rows) for rows in weight.split(sizes)]
    else:
        own = F.linear(x, weight, bias).split(sizes, 1)
    if not b:
        return own
    if a:
        inner = F.linear(x, (torch.cat(a) if len(a) > 1 else a[0]).to(x.dtype))
    inner = scaling * inner  # r is few beside the outputs
    parts = zip(own, inner.chunk(len(sizes), 1), b)
    return [y + F.linear(part, rows.to(x.dtype)) for y, part, rows in parts]


def turned(x, cos, sin):
    """x (m, heads, D), turned by angles of cos, sin (m, 1, D/2)."""
    first, second = x.chunk(2, dim=2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)


def before_attention(residual, cos, sin, norm, qkv):
    """q (m, H, D), k, v (m, K, D), of which q and k are turned.

    Args:
        cos, sin: (m, 1, D/2); norm: weight and epsilon; qkv: what `linear` takes behind x.
    """
    heads = linear(rms_norm(residual, *norm), *qkv)
    q, k, v = (part.unflatten(1, (-1, 2 * cos.shape[2])) for part in heads)
    return turned(q, cos, sin), turned(k, cos, sin), v.contiguous()


def behind_attention(residual, mixed, norm, out, gate_up, down):
    """(m, C) the residual of the layer that follows, given attention `mixed` (m, H*D)."""
    residual = residual + linear(mixed, *out)[0]
    gate, up = linear(rms_norm(residual, *norm), *gate_up)
    return residual + linear(F.silu(gate) * up, *down)[0]


def before_attention_vjp(d_residual, d_heads, residual, *others_and_qkv):
    """Derivatives by the residual, to which `d_residual` is added, and by each of qkv's LoRA.

    Args:
        d_residual: by the residual behind attention; d_heads: by q, k, v; the rest as there, of
            which the LoRA's A are rows of the weights.
    """
    *others, qkv = others_and_qkv
    qkv, lora = _apart(*qkv)

    def function(residual, lora):
        return before_attention(residual, *others, (*qkv, *lora))

    by_residual, lora = torch.func.vjp(function, residual, lora)[1](d_heads)
    return d_residual + by_residual, *_of_each(*lora)


def behind_attention_vjp(d, residual, mixed, norm, *linears):
    """Derivatives by residual, mixed and each LoRA of the linears in turn.

    Compiled, it does not compute what `down` puts out.
    """
    linears, loras = zip(*[_apart(*one) for one in linears])

    def function(residual, mixed, loras):
        trained = [(*one, *lora) for one, lora in zip(linears, loras)]
        return behind_attention(residual, mixed, norm, *trained)

    by_residual, by_mixed, loras = torch.func.vjp(function, residual, mixed, loras)[1](d)
    return by_residual, by_mixed, *[d for lora in loras for d in _of_each(*lora)]


def _apart(weight, bias, sizes, scaling, a, b):
    """What `linear` takes: what is frozen; the LoRA, of which A are the last rows of weight."""
    outputs = sum(sizes)
    frozen = weight[:outputs], None if bias is None else bias[:outputs], sizes, scaling
    return frozen, ((weight[outputs:],) if b else a, b)


def _of_each(a, b):
    """Float32 derivatives by A, B of the first linear, of the second, .."""
    by_a = a[0].float().chunk(len(b)) if b else ()
    return [d for pair in zip(by_a, b) for d in (pair[0], pair[1].float())]


FUNCTIONS = before_attention, behind_attention, rms_norm, before_attention_vjp, behind_attention_vjp


def any_number(*tensors):
    """The tensors, of which torch.compile shall not take the number of rows for a constant."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


@dataclass
class Runs:
    """Tokens as runs: a prompt, or what was fed of a row, which sees its prompt too."""

    slots: torch.Tensor  # (m,) where each token is among the P*S slots
    keys: torch.Tensor  # the tokens that the first run sees, the second, ..
    query_ends: torch.Tensor  # (runs + 1,) int32, from 0
    key_ends: torch.Tensor  # (runs + 1,) int32, from 0
    longest: tuple[int, int]  # queries of a run, keys of a run
    bias: torch.Tensor | None  # (P, 1, S, S), where flash attention does not compute

    @property
    def ends(self):
        """As flash attention takes them."""
        return self.query_ends, self.key_ends, *self.longest


def runs(part: torch.Tensor, device, bias=None) -> Runs:
    """The runs of `packing.Layout.part` (P, S), on `device`."""
    part = part.numpy()  # for so few numbers torch takes twice as long
    slots = np.flatnonzero(part >= 0)
    named = part.ravel()[slots], slots // part.shape[1]
    new = np.flatnonzero((np.diff(named, prepend=-1) != 0).any(0))
    ends = np.append(new, len(slots))
    keys, prompt = [], None
    for name, start, end in zip(named[0][new], ends, ends[1:]):
        own = np.arange(start, end)
        if name == 0:
            prompt = own
        keys.append(own if name == 0 else np.concatenate([prompt, own]))
    key_ends = np.cumsum([0, *map(len, keys)])
    longest = int(np.diff(ends).max()), int(np.diff(key_ends).max())
    numbers = slots, np.concatenate(keys), ends.astype(np.int32), key_ends.astype(np.int32)
    return Runs(*(send(torch.from_numpy(n), device) for n in numbers), longest, bias)


def by_flash(x) -> bool:
    """Whether flash attention takes such tensors."""
    return x.is_cuda and x.dtype == torch.bfloat16


def attend(q, k, v, runs):
    """(attention (m, H*D), and what else flash attention's backward takes), without gradient.

    For flash attention the keys of a prompt are repeated for its rows, but kept once.
    """
    if runs.bias is not None:
        return (dense_attention(q, k, v, runs),)
    repeated = k[runs.keys], v[runs.keys]
    # Behind the ends: no dropout, causal, no debugging mask.
    out, *kept, _ = torch.ops.aten._flash_attention_forward(
        q, *repeated, *runs.ends, 0.0, True, False
    )
    return out.flatten(1), *kept


def attend_vjp(d, q, k, v, runs, mixed, *kept):
    """Derivatives by q, k, v, given what `attend` returned."""
    if runs.bias is not None:
        return torch.func.vjp(lambda *heads: dense_attention(*heads, runs), q, k, v)[1](d)
    sums, *state = kept
    d, mixed, repeated = d.reshape(q.shape), mixed.view(q.shape), (k[runs.keys], v[runs.keys])
    dq, *d_kv = torch.ops.aten._flash_attention_backward(
        d, q, *repeated, mixed, sums, *runs.ends, 0.0, True, *state
    )
    # Up to G + 1 numbers add up, in float32.
    totals = [torch.zeros_like(k, dtype=torch.float32) for _ in d_kv]
    added = [t.index_add_(0, runs.keys, each.float()) for t, each in zip(totals, d_kv)]
    return dq, *[total.to(k.dtype) for total in added]


class Attention(torch.autograd.Function):
    """(m, H*D) of q, k, v, with gradient."""

    @staticmethod
    def forward(ctx, q, k, v, runs):
        mixed, *kept = attend(q, k, v, runs)
        ctx.runs = runs
        ctx.save_for_backward(q, k, v, mixed, *kept)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        q, k, v, *attended = ctx.saved_tensors
        return *attend_vjp(d, q, k, v, ctx.runs, *attended), None


def dense_attention(q, k, v, runs):
    """The same over the padded sequences with a bias: what flash does not know."""
    q, k, v = (_padded(x, runs) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=runs.bias, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[runs.slots].flatten(1)


def _padded(x, runs):
    """(P, heads, S, D) of x (m, heads, D), 0 at the padding."""
    size = len(runs.bias), runs.bias.shape[-1]
    slots = x.new_zeros(size[0] * size[1], *x.shape[1:]).index_copy(0, runs.slots, x)
    return slots.unflatten(0, size).transpose(1, 2)
