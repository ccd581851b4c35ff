"""Parts of a decoder layer as functions of packed tokens, without padding.

A linear is y = x W^T + b + s (x A^T) B^T, of which W and b are frozen, A and B are not. Everything
but attention is written for torch.compile, which fuses it into few kernels.

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


# Records are named tuples, which torch.compile supports as it supports tuples.
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
    head_norms: tuple[NormOperands, ...] = ()  # of each head of q and of k, if any

    @property
    def before_attention(self) -> tuple:
        """Operands of the function of this name, behind its residual."""
        return self.cos, self.sin, self.norm, self.qkv, self.head_norms


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm (.., C) of x (.., C), scaled by weight (C,).

    It rounds where the model rounds; compiled, it rounds only the kernels' outputs.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)  # rounded before the weight, as by Qwen2RMSNorm


def linear(x: torch.Tensor, operands: LinearOperands) -> Sequence[torch.Tensor]:
    """Return the output (m, outputs) of each of k linears of one input."""
    weight, bias, sizes, scaling, a, b = operands
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
        # Autograd follows A itself, a parameter in float32, by a product of its own.
        inner = F.linear(x, (torch.cat(a) if len(a) > 1 else a[0]).to(x.dtype))
    inner = scaling * inner  # scaled here: r is small beside the outputs
    # B differs from linear to linear, so each has a product with its r columns of `inner`.
    lora_inputs = zip(outputs, inner.chunk(len(sizes), 1), b)
    return [y + F.linear(lora_input, rows.to(x.dtype)) for y, lora_input, rows in lora_inputs]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (m, heads, D) by angles with cos, sin (m, 1, D/2)."""
    first, second = x.chunk(2, dim=2)  # halves, not pairs of neighbours: transformers' rotate_half
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)


def before_attention(
    residual: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: NormOperands,
    qkv: LinearOperands,
    head_norms: tuple[NormOperands, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q (m, H, D), k and v (m, K, D); q and k are rotated by cos, sin (m, 1, D/2).

    Args: head_norms: of each head of q and of k, before the rotation; (): none.
    """
    heads = linear(rms_norm(residual, norm.weight, norm.eps), qkv)
    # A view of v would keep the product of q, k and v in memory for as long as v.
    q, k, v = (part.unflatten(1, (-1, 2 * cos.shape[2])) for part in heads)
    if head_norms:
        q, k = (rms_norm(x, head.weight, head.eps) for x, head in zip((q, k), head_norms))
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def behind_attention(
    residual: torch.Tensor,
    mixed: torch.Tensor,
    norm: NormOperands,
    out: LinearOperands,
    gate_up: LinearOperands,
    down: LinearOperands,
) -> torch.Tensor:
    """Return the residual (m, C) after the layer, given attention `mixed` (m, H*D)."""
    residual = residual + linear(mixed, out)[0]
    gate, up = linear(rms_norm(residual, norm.weight, norm.eps), gate_up)  # (m, F)
    return residual + linear(F.silu(gate) * up, down)[0]


def before_attention_vjp(
    d_residual: torch.Tensor,
    d_heads: tuple[torch.Tensor, ...],
    residual: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: NormOperands,
    qkv: LinearOperands,
    head_norms: tuple[NormOperands, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Return derivatives by the residual, plus `d_residual`, and by each LoRA of qkv.

    Args:
        d_residual: by the residual behind attention; d_heads: by q, k, v; the rest as in
            `before_attention`, of which the LoRA's A are rows of the weights.
    """
    frozen, lora = _apart(qkv)

    def function(residual, lora):
        return before_attention(residual, cos, sin, norm, _with_lora(frozen, lora), head_norms)

    # The residual also goes past attention: both derivatives are added.
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
    """Return derivatives by residual, by mixed and by each LoRA of the linears in turn.

    Compiled, it does not compute the output of `down`.
    """
    frozen, loras = zip(*[_apart(operands) for operands in (out, gate_up, down)])

    def function(residual, mixed, loras):
        out, gate_up, down = map(_with_lora, frozen, loras)
        return behind_attention(residual, mixed, norm, out, gate_up, down)

    # The derivative does not depend on the output, so the compiler drops the last product.
    by_residual, by_mixed, loras = torch.func.vjp(function, residual, mixed, loras)[1](d)
    return by_residual, by_mixed, *[d for lora in loras for d in _of_each(*lora)]


def _apart(operands: LinearOperands):
    """Return the operands without LoRA, and (A, B), where A were the last rows of weight."""
    weight, bias, sizes, scaling, a, b = operands
    outputs = sum(sizes)
    bias = None if bias is None else bias[:outputs]  # without the zeros of LoRA's A
    frozen = LinearOperands(weight[:outputs], bias, sizes, scaling)
    return frozen, ((weight[outputs:],) if b else a, b)


def _with_lora(frozen: LinearOperands, lora) -> LinearOperands:
    """Return the operands with a LoRA (A, B)."""
    a, b = lora
    return LinearOperands(frozen.weight, frozen.bias, frozen.sizes, frozen.scaling, a, b)


def _of_each(a, b):
    """Return float32 derivatives by A, B of the first linear, of the second, .."""
    by_a = a[0].float().chunk(len(b)) if b else ()  # (k*r, C) in k parts
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
    """Return the tensors, marked so that torch.compile keeps their number of rows dynamic."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


@dataclass
class VarlenSegments:
    """Tokens as runs: a prompt, or the inputs of one row, which attend to their prompt too."""

    slots: torch.Tensor  # (m,) index of each token among the P*S slots
    keys: torch.Tensor  # tokens that the first run attends to, the second, ..
    query_ends: torch.Tensor  # (runs + 1,) int32, from 0
    key_ends: torch.Tensor  # (runs + 1,) int32, from 0
    most_queries: int  # of a run
    most_keys: int  # of a run
    bias: torch.Tensor | None  # (P, 1, S, S) if flash attention is not used


def varlen_segments(
    part: torch.Tensor, device: torch.device | str, bias: torch.Tensor | None = None
) -> VarlenSegments:
    """Return the runs of `packing.Layout.part` (P, S), on `device`."""
    part = part.numpy()  # twice as fast as torch for so few numbers
    slots = np.flatnonzero(part >= 0)
    labels = part.ravel()[slots], slots // part.shape[1]  # part and sequence of each token, (m,)
    # A run begins where part or sequence changes.
    starts = np.flatnonzero((np.diff(labels, prepend=-1) != 0).any(0))
    ends = np.append(starts, len(slots))
    keys, prompt_indices = [], None
    for label, start, end in zip(labels[0][starts], ends, ends[1:]):
        indices = np.arange(start, end)
        if label == 0:  # a beginning, which precedes its continuations
            prompt_indices = indices
        keys.append(indices if label == 0 else np.concatenate([prompt_indices, indices]))
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
    """Tell whether flash attention supports such tensors."""
    return x.is_cuda and x.dtype == torch.bfloat16


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenSegments
) -> tuple[torch.Tensor, ...]:
    """Return attention (m, H*D) and the other inputs of flash attention's backward, no gradient.

    Flash attention reads a prompt's keys repeated for each of its rows; they are stored once.
    """
    if runs.bias is not None:
        # Dense attention recomputes its state in the backward.
        return (dense_attention(q, k, v, runs),)
    # The last three arguments: no dropout, causal, no debugging mask.
    out, *saved, _ = torch.ops.aten._flash_attention_forward(
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
    return out.flatten(1), *saved


def attend_vjp(
    d: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    runs: VarlenSegments,
    mixed: torch.Tensor,
    *saved: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return derivatives by q, k and v; `mixed` and `saved` are what `attend` returned."""
    if runs.bias is not None:
        return torch.func.vjp(lambda *heads: dense_attention(*heads, runs), q, k, v)[1](d)
    sums, *state = saved
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
    # Sums of up to G + 1 numbers, in float32.
    totals = [torch.zeros_like(k, dtype=torch.float32) for _ in d_kv]
    gradients = [t.index_add_(0, runs.keys, gradient.float()) for t, gradient in zip(totals, d_kv)]
    return dq, *[total.to(k.dtype) for total in gradients]


class Attention(torch.autograd.Function):
    """Attention (m, H*D) of q, k and v, with gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        runs: VarlenSegments,
    ):
        mixed, *saved = attend(q, k, v, runs)
        ctx.runs = runs
        ctx.save_for_backward(q, k, v, mixed, *saved)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, d: torch.Tensor):
        q, k, v, *attended = ctx.saved_tensors
        return *attend_vjp(d, q, k, v, ctx.runs, *attended), None


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenSegments
) -> torch.Tensor:
    """Compute attention over padded sequences with a bias, where flash attention is not used."""
    q, k, v = (_padded(x, runs) for x in (q, k, v))  # (P, heads, S, D)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=runs.bias, enable_gqa=True)
    # (P, H, S, D) -> (m, H*D), without the padding
    return out.transpose(1, 2).flatten(0, 1)[runs.slots].flatten(1)


def _padded(x, runs):
    """Return x (m, heads, D) as padded sequences (P, heads, S, D), 0 at the padding."""
    size = len(runs.bias), runs.bias.shape[-1]
    slots = x.new_zeros(size[0] * size[1], *x.shape[1:]).index_copy(0, runs.slots, x)
    return slots.unflatten(0, size).transpose(1, 2)
