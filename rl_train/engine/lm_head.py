"""Log-probs of tokens from hidden states: the vocabulary passes in chunks and never stands whole.

Sampler and scorer take their logits from `product`, in float32 also of a bfloat16 model: rounded
to bfloat16, a logit of 10 is .06 off, and the two ways to compute differ by as much.

Letters: m scored tokens, c of a chunk, C LLM width, V vocabulary.
"""

import functools

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rl_train.engine.layers import any_number

CHUNK = 2**26  # logits that are held at a time, however large the vocabulary is
NEVER = -1e30  # logit of what is no token: not -inf, which times its probability 0 is NaN


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(n, m) float32 a (n, k) @ b (k, m): numbers in b's dtype, their products added in float32.

    Without gradient of its own.
    """
    a = a.to(b.dtype)
    with torch.autocast(a.device.type, enabled=False):
        if b.dtype == torch.float32:
            return a @ b
        if b.is_cuda:
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()  # torch's own has no kernel for the CPU


def _read(logits, ids, temperature, vocabulary, dtype=None, derivatives=0):
    """[log-probs (c,) of ids (c,), entropies (c,), d log-prob, d entropy (c, V) by logits / T].

    Under softmax(logits / T), T the temperature, of logits (c, at least V).

    Args:
        derivatives: how many of the two, in `dtype`.
    """
    column, token = torch.arange(logits.shape[1], device=logits.device), ids[:, None]
    every = logits if temperature == 1 else logits / temperature
    if vocabulary < len(column):
        every = torch.where(column < vocabulary, every, NEVER)
    every = every.log_softmax(-1)
    logp, p = every.gather(1, token)[:, 0], every.exp()
    terms = every * p
    found = [logp, -terms.sum(-1)]
    if derivatives > 0 and p.is_cuda:  # the compiler makes it a part of its kernel
        found.append(((column == token).float() - p).to(dtype))
    elif derivatives > 0:
        found.append(p.neg().scatter_add_(1, token, torch.ones_like(p[:, :1])).to(dtype))
    if derivatives > 1:
        found.append(terms.addcmul_(p, found[1][:, None]).neg_().to(dtype))
    return found


@functools.cache
def _compiled():
    """`_read` by a kernel that goes over logits twice: each row is one block's, not many's."""
    kernel = torch.compile(_read, options=dict(split_reductions=False))
    return lambda logits, ids, *how: kernel(*any_number(logits, ids), *how)


class _TokenLogps(torch.autograd.Function):
    """A token's derivative is known with its logits, up to a factor: nothing is computed twice."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature, vocabulary, entropy_gradient):
        assert not ctx.needs_input_grad[1], "lm_head is frozen: no gradient is computed for it"
        logp, entropy = (hidden.new_empty(len(ids), dtype=torch.float32) for _ in range(2))
        many = ctx.needs_input_grad[0] * (1 + entropy_gradient)  # d logp, d entropy / d hidden
        by_hidden = [torch.empty_like(hidden, dtype=torch.float32) for _ in range(many)]
        read = _compiled() if hidden.is_cuda else _read
        for start in range(0, len(ids), rows := max(1, CHUNK // len(weight))):
            chunk = slice(start, start + rows)
            logits = product(hidden[chunk], weight.t())  # (c, V)
            logp[chunk], entropy[chunk], *slopes = read(
                logits, ids[chunk], temperature, vocabulary, weight.dtype, many
            )
            for result, by_logits in zip(by_hidden, slopes):
                result[chunk] = product(by_logits, weight).div_(temperature)
        ctx.save_for_backward(*by_hidden)
        ctx.dtype = hidden.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, *d):
        d = sum(by_value[:, None] * slope for by_value, slope in zip(d, ctx.saved_tensors))
        return d.to(ctx.dtype), *[None] * 5


def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    vocabulary: int,
    entropy_gradient: bool = False,
):
    """((m,) log-probs of `ids` (m,), (m,) entropies in nats), both float32.

    Under softmax(hidden @ weight.T / temperature). Never with more than CHUNK logits at a time,
    forward or backward.

    Args:
        hidden: (m, C), which gets a gradient.
        weight: (at least V, C) of lm_head, in whose dtype the numbers are that are multiplied. If
            it trains, as in supervised training, torch's own operations give it its gradient.
        vocabulary: V; the rows behind it only align the matrix and are zeros.
        entropy_gradient: whether the entropies carry one too, for one more product; else they are
            detached.
    """
    if weight.requires_grad:
        logp, entropy = _trained_token_logps(hidden, weight[:vocabulary], ids, temperature)
        return logp, entropy if entropy_gradient else entropy.detach()
    return _TokenLogps.apply(hidden, weight, ids, temperature, vocabulary, entropy_gradient)


def _trained_token_logps(hidden, weight, ids, temperature):
    """`token_logps` with a gradient for the weight; the backward computes each chunk again."""

    def some(hidden, ids):
        with torch.autocast(hidden.device.type, enabled=False):
            logits = hidden.float() @ weight.float().t()  # (c, V)
        return _read(logits, ids, temperature, len(weight))

    rows = max(1, CHUNK // len(weight))
    chunks = zip(hidden.split(rows), ids.split(rows))
    parts = [checkpoint(some, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.cat(part) for part in zip(*parts))
