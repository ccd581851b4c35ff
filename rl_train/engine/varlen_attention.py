"""Attention of packed tokens to their prompt and to the tokens before them, with its gradient.

Letters: m tokens of P sequences, S slots of each, H query heads, K key-value heads, D head size.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sa2va_hf.to_device import to_device


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
    """Tell whether such tensors are computed by flash attention: bfloat16 on a GPU."""
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
