"""Attention of packed tokens to their prompt and to the tokens before them, with its gradient.

Letters: m tokens of P sequences, S slots of each, H query heads, K key-value heads, D head size.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sa2va_hf.to_device import to_device

TOKEN_MULTIPLE = 128  # multiple to which `padded` rounds up


@dataclass
class VarlenSegments:
    """Packed tokens in segments.

    A segment is the beginning of a sequence, as a prompt, or one continuation, as the inputs of a
    row, which also attends to the beginning. The names that begin with cu_ and max_ are flash
    attention's.
    """

    slots: torch.Tensor  # (m,) index of each token among the P*S slots
    keys: torch.Tensor  # index of the tokens that the first segment attends to, the second, ..
    cu_seqlens_q: torch.Tensor  # (segments + 1,) int32, from 0: where each segment's queries end
    cu_seqlens_k: torch.Tensor  # the same of its keys
    max_seqlen_q: int  # largest number of queries of a segment
    max_seqlen_k: int  # of keys
    num_tokens: int  # m, or more if `padded`
    bias: torch.Tensor | None = None  # (P, 1, S, S) if flash attention is not used

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that flash attention takes beside q, k and v."""
        return [self.keys, self.cu_seqlens_q, self.cu_seqlens_k]

    def with_tensors(self, tensors: list[torch.Tensor], **changes) -> "VarlenSegments":
        """Return the same with other `tensors`."""
        keys, cu_seqlens_q, cu_seqlens_k = tensors
        return replace(
            self, keys=keys, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **changes
        )

    def to(self, device: torch.device | str) -> "VarlenSegments":
        """Return the same on a device."""
        tensors = [to_device(tensor, device) for tensor in self.tensors]
        return self.with_tensors(tensors, slots=to_device(self.slots, device))

    def padded(self) -> "VarlenSegments":
        """Return the same with segments of padding behind the m tokens, so that few sizes occur.

        Padding attends only to padding: it gets no gradient of real tokens and gives them none. The
        number of tokens becomes a multiple of TOKEN_MULTIPLE; the numbers of segments and keys,
        `max_seqlen_q` and `max_seqlen_k` become powers of 2. Padding keys are split into segments
        of at most `max_seqlen_k`, each with at least one token. Empty segments fill up the number
        of segments. Tensors are on the CPU.
        """
        # The first segment of padding has at most TOKEN_MULTIPLE tokens, and needs as many keys.
        num_keys = power_of_2(len(self.keys) + 2 * TOKEN_MULTIPLE)
        max_seqlen_k = power_of_2(max(self.max_seqlen_k, 2 * TOKEN_MULTIPLE))
        more_keys = num_keys - len(self.keys)
        more_segments = -(-more_keys // max_seqlen_k)
        num_tokens = len(self.slots) + more_segments
        num_tokens += -num_tokens % TOKEN_MULTIPLE
        # The first segment takes the tokens that the others, with one each, leave. All but the last
        # have max_seqlen_k keys.
        queries = np.ones(more_segments, dtype=np.int32)
        queries[0] = num_tokens - len(self.slots) - (more_segments - 1)
        keys = np.full(more_segments, max_seqlen_k, dtype=np.int32)
        keys[-1] = more_keys - max_seqlen_k * (more_segments - 1)
        assert queries[0] <= keys[0]
        more_empty = power_of_2(len(self.cu_seqlens_q) - 1 + more_segments)
        more_empty -= len(self.cu_seqlens_q) - 1 + more_segments

        # Keys are all of these tokens in turn, so that a sum over keys adds few to each.
        padding = torch.arange(more_keys) % (num_tokens - len(self.slots)) + len(self.slots)

        def longer(ends, sizes):
            sizes = torch.from_numpy(np.pad(sizes, (0, more_empty)))
            return torch.cat([ends, ends[-1] + sizes.cumsum(0, dtype=torch.int32)])

        return replace(
            self,
            keys=torch.cat([self.keys, padding]),
            cu_seqlens_q=longer(self.cu_seqlens_q, queries),
            cu_seqlens_k=longer(self.cu_seqlens_k, keys),
            max_seqlen_q=power_of_2(max(self.max_seqlen_q, TOKEN_MULTIPLE)),
            max_seqlen_k=max_seqlen_k,
            num_tokens=num_tokens,
        )


def power_of_2(number: int) -> int:
    """Return the next power of 2, or the number itself if it is one."""
    return 1 << (int(number) - 1).bit_length()


def varlen_segments(part: torch.Tensor) -> VarlenSegments:
    """Return the segments of `packing.Layout.part` (P, S), on the CPU."""
    part = part.numpy()  # twice as fast as torch for so few numbers
    slots = np.flatnonzero(part >= 0)
    labels = part.ravel()[slots], slots // part.shape[1]  # part and sequence of each token, (m,)
    # A segment begins where part or sequence changes.
    starts = np.flatnonzero((np.diff(labels, prepend=-1) != 0).any(0))
    ends = np.append(starts, len(slots))
    keys, prompt_indices = [], None
    for label, start, end in zip(labels[0][starts], ends, ends[1:]):
        indices = np.arange(start, end)
        if label == 0:  # a beginning, which precedes its continuations
            prompt_indices = indices
        keys.append(indices if label == 0 else np.concatenate([prompt_indices, indices]))
    cu_seqlens_k = np.cumsum([0, *map(len, keys)])
    return VarlenSegments(
        slots=torch.from_numpy(slots),
        keys=torch.from_numpy(np.concatenate(keys)),
        cu_seqlens_q=torch.from_numpy(ends.astype(np.int32)),
        cu_seqlens_k=torch.from_numpy(cu_seqlens_k.astype(np.int32)),
        max_seqlen_q=int(np.diff(ends).max()),
        max_seqlen_k=int(np.diff(cu_seqlens_k).max()),
        num_tokens=len(slots),
    )


def by_flash(x: torch.Tensor) -> bool:
    """Tell whether such tensors are computed by flash attention: bfloat16 on a GPU."""
    return x.is_cuda and x.dtype == torch.bfloat16


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenSegments
) -> tuple[torch.Tensor, ...]:
    """Return attention's output (m, H*D) and what else the backward of flash attention takes.

    That is the log-sum-exp and the random state; with a bias nothing. Autograd does not follow. A
    prompt's keys are repeated for each of its rows during the call; they are kept once.
    """
    if segments.bias is not None:
        # Dense attention recomputes its state in the backward.
        return (dense_attention(q, k, v, segments),)
    # The last three arguments: no dropout, causal, no debugging mask.
    out, *saved, _ = torch.ops.aten._flash_attention_forward(
        q,
        k[segments.keys],
        v[segments.keys],
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_seqlen_q,
        segments.max_seqlen_k,
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
    segments: VarlenSegments,
    attn_output: torch.Tensor,
    *saved: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return derivatives by q, k and v; `attn_output` and `saved` are what `attend` returned."""
    if segments.bias is not None:
        return torch.func.vjp(lambda *heads: dense_attention(*heads, segments), q, k, v)[1](d)
    logsumexp, *state = saved
    dq, *d_kv = torch.ops.aten._flash_attention_backward(
        d.reshape(q.shape),
        q,
        k[segments.keys],
        v[segments.keys],
        attn_output.view(q.shape),
        logsumexp,
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_seqlen_q,
        segments.max_seqlen_k,
        0.0,
        True,
        *state,
    )
    # Sums in float32: a key of a prompt is in its own segment and in that of each of its rows.
    totals = [torch.zeros_like(k, dtype=torch.float32) for _ in d_kv]
    for total, gradient in zip(totals, d_kv):
        total.index_add_(0, segments.keys, gradient.float())
    return dq, *[total.to(k.dtype) for total in totals]


class Attention(torch.autograd.Function):
    """Attention (m, H*D) of q, k and v, with gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: VarlenSegments,
    ):
        attn_output, *saved = attend(q, k, v, segments)
        ctx.segments = segments
        ctx.save_for_backward(q, k, v, attn_output, *saved)
        return attn_output

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, d: torch.Tensor):
        q, k, v, *attended = ctx.saved_tensors
        return *attend_vjp(d, q, k, v, ctx.segments, *attended), None


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenSegments
) -> torch.Tensor:
    """Compute attention over padded sequences with a bias, where flash attention is not used."""
    q, k, v = (_padded(x, segments) for x in (q, k, v))  # (P, heads, S, D)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=segments.bias, enable_gqa=True)
    # (P, H, S, D) -> (m, H*D), without the padding
    return out.transpose(1, 2).flatten(0, 1)[segments.slots].flatten(1)


def _padded(x, segments):
    """Return x (m, heads, D) as padded sequences (P, heads, S, D), 0 at the padding."""
    size = len(segments.bias), segments.bias.shape[-1]
    slots = x.new_zeros(size[0] * size[1], *x.shape[1:]).index_copy(0, segments.slots, x)
    return slots.unflatten(0, size).transpose(1, 2)
