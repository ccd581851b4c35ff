"""The parts of a decoder layer as functions of packed tokens, without padding.

A linear is y = x W^T + b + s (x A^T) B^T, of which W and b are frozen, A and B are not. What is not
attention is written for torch.compile, which makes few kernels of it, forward and backward.

Letters: m tokens of P sequences, S slots of each, C width, H query heads, K key-value heads,
D head size, F MLP width, r LoRA rank, k linears of one input.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sa2va_hf.to_device import to_device


# Records are named tuples: torch.compile takes them as it takes tuples.
class LinearOperands(NamedTuple):
    """Operands of `linear` for k linears that read one input.

    Attributes:
        weight: (outputs, C) frozen, of all linears; LoRA's A are its last rows if there are B and
            no `a`.
        bias: (outputs,) or None.
        sizes: outputs of each linear.
        scaling: of the LoRA, alpha / r.
        a: LoRA's A (r, C) of each, or one of all.
        b: LoRA's B (outputs of its own, r) of each; none: no LoRA.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: list[int]
    scaling: float
    a: Sequence[torch.Tensor] = ()
    b: Sequence[torch.Tensor] = ()


class NormOperands(NamedTuple):
    """Operands of `rms_norm`."""

    weight: torch.Tensor  # (C,)
    eps: float


class LayerOperands(NamedTuple):
    """Operands of one decoder layer before and behind its attention."""

    cos: torch.Tensor  # (m, 1, D/2)
    sin: torch.Tensor  # (m, 1, D/2)
    norm: NormOperands  # before attention
    qkv: LinearOperands
    mlp_norm: NormOperands
    out: LinearOperands
    gate_up: LinearOperands
    down: LinearOperands


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(m, C); rounded where the model rounds, or, compiled, only what leaves a kernel."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def linear(x: torch.Tensor, operands: LinearOperands) -> Sequence[torch.Tensor]:
    """(m, outputs of its own) of each of k linears of one input."""
    weight, bias, sizes, scaling, a, b = operands
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


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (m, heads, D), turned by angles of cos, sin (m, 1, D/2)."""
    first, second = x.chunk(2, dim=2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)


def before_attention(
    residual: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: NormOperands,
    qkv: LinearOperands,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (m, H, D), k, v (m, K, D), of which q and k are turned by cos, sin (m, 1, D/2)."""
    heads = linear(rms_norm(residual, norm.weight, norm.eps), qkv)
    q, k, v = (part.unflatten(1, (-1, 2 * cos.shape[2])) for part in heads)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def behind_attention(
    residual: torch.Tensor,
    mixed: torch.Tensor,
    norm: NormOperands,
    out: LinearOperands,
    gate_up: LinearOperands,
    down: LinearOperands,
) -> torch.Tensor:
    """(m, C) the residual of the layer that follows, given attention `mixed` (m, H*D)."""
    residual = residual + linear(mixed, out)[0]
    gate, up = linear(rms_norm(residual, norm.weight, norm.eps), gate_up)
    return residual + linear(F.silu(gate) * up, down)[0]


def before_attention_vjp(
    d_residual: torch.Tensor,
    d_heads: tuple[torch.Tensor, ...],
    residual: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: NormOperands,
    qkv: LinearOperands,
) -> tuple[torch.Tensor, ...]:
    """Derivatives by the residual, to which `d_residual` is added, and by each of qkv's LoRA.

    Args:
        d_residual: by the residual behind attention; d_heads: by q, k, v; the rest as in
            `before_attention`, of which the LoRA's A are rows of the weights.
    """
    frozen, lora = _apart(qkv)

    def function(residual, lora):
        return before_attention(residual, cos, sin, norm, _with_lora(frozen, lora))

    by_residual, lora = torch.func.vjp(function, residual, lora)[1](d_heads)
    return d_residual + by_residual, *_of_each(*lora)


def behind_attention_vjp(
    d: torch.Tensor,
    residual: torch.Tensor,
    mixed: torch.Tensor,
    norm: NormOperands,
    out: LinearOperands,
    gate_up: LinearOperands,
    down: LinearOperands,
) -> tuple[torch.Tensor, ...]:
    """Derivatives by residual, mixed and each LoRA of the linears in turn.

    Compiled, it does not compute what `down` puts out.
    """
    frozen, loras = zip(*[_apart(operands) for operands in (out, gate_up, down)])

    def function(residual, mixed, loras):
        out, gate_up, down = map(_with_lora, frozen, loras)
        return behind_attention(residual, mixed, norm, out, gate_up, down)

    by_residual, by_mixed, loras = torch.func.vjp(function, residual, mixed, loras)[1](d)
    return by_residual, by_mixed, *[d for lora in loras for d in _of_each(*lora)]


def _apart(operands: LinearOperands):
    """(operands without LoRA, (A, B) of the LoRA), of which A were the last rows of weight."""
    weight, bias, sizes, scaling, a, b = operands
    outputs = sum(sizes)
    bias = None if bias is None else bias[:outputs]
    frozen = LinearOperands(weight[:outputs], bias, sizes, scaling)
    return frozen, ((weight[outputs:],) if b else a, b)


def _with_lora(frozen: LinearOperands, lora) -> LinearOperands:
    """The operands with a LoRA (A, B)."""
    a, b = lora
    return LinearOperands(frozen.weight, frozen.bias, frozen.sizes, frozen.scaling, a, b)


def _of_each(a, b):
    """Float32 derivatives by A, B of the first linear, of the second, .."""
    by_a = a[0].float().chunk(len(b)) if b else ()
    return [d for pair in zip(by_a, b) for d in (pair[0], pair[1].float())]


class LayerFunctions(NamedTuple):
    """Functions of a layer, plain or compiled."""

    before_attention: Callable
    behind_attention: Callable
    rms_norm: Callable
    before_attention_vjp: Callable
    behind_attention_vjp: Callable


FUNCTIONS = LayerFunctions(
    before_attention, behind_attention, rms_norm, before_attention_vjp, behind_attention_vjp
)


def any_number(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, of which torch.compile shall not take the number of rows for a constant."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


@dataclass
class VarlenSegments:
    """Tokens as runs: a prompt, or what was fed of a row, which sees its prompt too."""

    slots: torch.Tensor  # (m,) where each token is among the P*S slots
    keys: torch.Tensor  # the tokens that the first run sees, the second, ..
    query_ends: torch.Tensor  # (runs + 1,) int32, from 0
    key_ends: torch.Tensor  # (runs + 1,) int32, from 0
    most_queries: int  # of a run
    most_keys: int  # of a run
    bias: torch.Tensor | None  # (P, 1, S, S), where flash attention does not compute


def varlen_segments(
    part: torch.Tensor, device: torch.device | str, bias: torch.Tensor | None = None
) -> VarlenSegments:
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
    return VarlenSegments(
        slots=to_device(torch.from_numpy(slots), device),
        keys=to_device(torch.from_numpy(np.concatenate(keys)), device),
        query_ends=to_device(torch.from_numpy(ends.astype(np.int32)), device),
        key_ends=to_device(torch.from_numpy(key_ends.astype(np.int32)), device),
        most_queries=int(np.diff(ends).max()),
        most_keys=int(np.diff(key_ends).max()),
        bias=bias,
    )


def by_flash(x: torch.Tensor) -> bool:
    """Whether flash attention takes such tensors."""
    return x.is_cuda and x.dtype == torch.bfloat16


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenSegments
) -> tuple[torch.Tensor, ...]:
    """(attention (m, H*D), and what else flash attention's backward takes), without gradient.

    For flash attention the keys of a prompt are repeated for its rows, but kept once.
    """
    if runs.bias is not None:
        return (dense_attention(q, k, v, runs),)
    # At the end: no dropout, causal, no debugging mask.
    out, *kept, _ = torch.ops.aten._flash_attention_forward(
        q,
        k[runs.keys],
        v[runs.keys],
        runs.query_ends,
        runs.key_ends,
        runs.most_queries,
        runs.most_keys,
        0.0,
        True,
        False,
    )
    return out.flatten(1), *kept


def attend_vjp(
    d: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    runs: VarlenSegments,
    mixed: torch.Tensor,
    *kept: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Derivatives by q, k, v, given what `attend` returned."""
    if runs.bias is not None:
        return torch.func.vjp(lambda *heads: dense_attention(*heads, runs), q, k, v)[1](d)
    sums, *state = kept
    dq, *d_kv = torch.ops.aten._flash_attention_backward(
        d.reshape(q.shape),
        q,
        k[runs.keys],
        v[runs.keys],
        mixed.view(q.shape),
        sums,
        runs.query_ends,
        runs.key_ends,
        runs.most_queries,
        runs.most_keys,
        0.0,
        True,
        *state,
    )
    # Up to G + 1 numbers add up, in float32.
    totals = [torch.zeros_like(k, dtype=torch.float32) for _ in d_kv]
    added = [t.index_add_(0, runs.keys, each.float()) for t, each in zip(totals, d_kv)]
    return dq, *[total.to(k.dtype) for total in added]


class Attention(torch.autograd.Function):
    """(m, H*D) of q, k, v, with gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        runs: VarlenSegments,
    ):
        mixed, *kept = attend(q, k, v, runs)
        ctx.runs = runs
        ctx.save_for_backward(q, k, v, mixed, *kept)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, d: torch.Tensor):
        q, k, v, *attended = ctx.saved_tensors
        return *attend_vjp(d, q, k, v, ctx.runs, *attended), None


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenSegments
) -> torch.Tensor:
    """The same over the padded sequences with a bias: what flash does not know."""
    q, k, v = (_padded(x, runs) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=runs.bias, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[runs.slots].flatten(1)


def _padded(x, runs):
    """(P, heads, S, D) of x (m, heads, D), 0 at the padding."""
    size = len(runs.bias), runs.bias.shape[-1]
    slots = x.new_zeros(size[0] * size[1], *x.shape[1:]).index_copy(0, runs.slots, x)
    return slots.unflatten(0, size).transpose(1, 2)
