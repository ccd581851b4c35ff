"""Log-probs of tokens from hidden states, chunk by chunk of tokens to bound the logits' memory.

Sampler and scorer take their logits from `product`, in float32 also of a bfloat16 model: rounded
to bfloat16, a logit of 10 is up to .03 off, and the two ways to compute differ by as much.

Letters: m scored tokens, c of a chunk, C LLM width, V vocabulary.
"""

import functools

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint

from rl_train.engine.layers import mark_rows_dynamic

CHUNK = 2**26  # logits held at a time, for a vocabulary of any size
NEVER = -1e30  # logit of an index that is no token; -inf times its probability 0 would be NaN


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a (n, k) @ b (k, m) in float32: factors in b's dtype, products added in float32.

    It is not for autograd: on a GPU it has no gradient.
    """
    a = a.to(b.dtype)
    with torch.autocast(a.device.type, enabled=False):
        if b.dtype == torch.float32:
            return a @ b
        if b.is_cuda:
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()  # torch's own has no kernel for the CPU


def _logps_and_derivative(logits, ids, temperature, vocabulary, derivative_dtype=None):
    """Return log-probs (c,) of ids (c,), entropies (c,) and, in a dtype, d logp / d logits * T.

    The distribution is softmax(logits / T), T the temperature, of logits (c, at least V).

    Args:
        derivative_dtype: of the derivatives (c, V); None: leave them out.
    """
    column, token = torch.arange(logits.shape[1], device=logits.device), ids[:, None]
    scaled = logits if temperature == 1 else logits / temperature
    if vocabulary < len(column):
        scaled = torch.where(column < vocabulary, scaled, NEVER)
    scaled = scaled.log_softmax(-1)
    logp, p = scaled.gather(1, token)[:, 0], scaled.exp()
    results = [logp, -(scaled * p).sum(-1)]
    if derivative_dtype is None:
        return results
    # d logp / d scaled = onehot(token) - p
    if p.is_cuda:  # fused by the compiler
        by_scaled = (column == token).float() - p
    else:
        by_scaled = p.neg().scatter_add_(1, token, torch.ones_like(p[:, :1]))
    return [*results, by_scaled.to(derivative_dtype)]


@functools.cache
def _compiled():
    """Return `_logps_and_derivative` compiled: a block of a kernel reads a row of logits twice."""
    kernel = torch.compile(_logps_and_derivative, options=dict(split_reductions=False))
    return lambda logits, ids, *settings: kernel(*mark_rows_dynamic(logits, ids), *settings)


class _TokenLogps(torch.autograd.Function):
    """`token_logps` with derivatives computed in the forward, where the logits are at hand."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ids: torch.Tensor,
        temperature: float,
        vocabulary: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not ctx.needs_input_grad[1], "lm_head is frozen: no gradient is computed for it"
        logp, entropy = (hidden.new_empty(len(ids), dtype=torch.float32) for _ in range(2))
        by_hidden = derivative_dtype = None
        if ctx.needs_input_grad[0]:
            by_hidden = torch.empty_like(hidden, dtype=torch.float32)  # d logp / d hidden, (m, C)
            derivative_dtype = weight.dtype
        logps_and_derivative = _compiled() if hidden.is_cuda else _logps_and_derivative
        for start in range(0, len(ids), rows := max(1, CHUNK // len(weight))):
            chunk = slice(start, start + rows)
            logits = product(hidden[chunk], weight.t())  # (c, V)
            logp[chunk], entropy[chunk], *by_logits = logps_and_derivative(
                logits, ids[chunk], temperature, vocabulary, derivative_dtype
            )
            if by_logits:
                # The chain rule through logits = hidden W^T / temperature; the logits are dropped.
                by_hidden[chunk] = product(by_logits[0], weight).div_(temperature)
        ctx.save_for_backward(by_hidden)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, by_logp: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        # Each row's derivative is known: only the incoming scalar (m,) is missing.
        (by_hidden,) = ctx.saved_tensors
        return (by_logp[:, None] * by_hidden).to(ctx.dtype), *[None] * 4


def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    vocabulary: int,
):
    """Return log-probs (m,) of `ids` (m,) and detached entropies (m,) in nats, both float32.

    The distribution is softmax(hidden @ weight.T / temperature). At most CHUNK logits are held at a
    time, forward and backward.

    Args:
        hidden: (m, C), which gets a gradient.
        weight: (at least V, C) of lm_head; products are computed in its dtype. If it trains, as in
            supervised training, autograd computes its gradient.
        vocabulary: V; rows of `weight` beyond it are zeros that align the matrix.
    """
    if weight.requires_grad:
        logp, entropy = _trained_token_logps(hidden, weight[:vocabulary], ids, temperature)
        return logp, entropy.detach()
    return _TokenLogps.apply(hidden, weight, ids, temperature, vocabulary)


def _trained_token_logps(hidden, weight, ids, temperature):
    """Compute `token_logps` with a gradient for the weight; the backward recomputes each chunk."""

    def chunk_logps(hidden, ids):
        with torch.autocast(hidden.device.type, enabled=False):
            logits = hidden.float() @ weight.float().t()  # (c, V)
        return _logps_and_derivative(logits, ids, temperature, len(weight))

    rows = max(1, CHUNK // len(weight))
    chunks = zip(hidden.split(rows), ids.split(rows))
    results = [checkpoint(chunk_logps, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.cat(values) for values in zip(*results))
