"""Log-probs of tokens from hidden states: the vocabulary passes in chunks and never stands whole.

Sampler and scorer take their logits from `product`, in float32 also of a bfloat16 model: rounded
to bfloat16, a logit of 10 is .06 off, and the two ways to compute differ by as much.

Letters: m scored tokens, c of a chunk, C LLM width, V vocabulary.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

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


class _TokenLogps(torch.autograd.Function):
    """A token's derivative is known with its logits, up to the factor that backward brings.

    So nothing is computed twice.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature, vocabulary, entropy_gradient):
        assert not ctx.needs_input_grad[1], "lm_head is frozen: no gradient is computed for it"
        logp, entropy = (hidden.new_empty(len(ids), dtype=torch.float32) for _ in range(2))
        slope = bend = None  # (m, C) d logp / d hidden, d entropy / d hidden
        if ctx.needs_input_grad[0]:
            slope = torch.empty_like(hidden, dtype=torch.float32)
            bend = torch.empty_like(slope) if entropy_gradient else None
        for start in range(0, len(ids), rows := max(1, CHUNK // len(weight))):
            chunk = slice(start, start + rows)
            token = ids[chunk, None]
            logits = product(hidden[chunk], weight.t()).div_(temperature)  # (c, V)
            logits[:, vocabulary:] = NEVER
            every = torch.log_softmax(logits, dim=-1)
            logp[chunk] = every.gather(1, token)[:, 0]
            p = torch.exp(every, out=logits)
            entropy[chunk] = -every.mul_(p).sum(-1)
            if bend is not None:  # by a logit: -p (log p + entropy)
                every.addcmul_(p, entropy[chunk, None])
                bend[chunk] = product(every, weight).div_(-temperature)
            if slope is not None:
                p.scatter_add_(1, token, -torch.ones_like(p[:, :1]))
                slope[chunk] = product(p, weight).div_(-temperature)
        ctx.save_for_backward(slope, bend)
        ctx.dtype = hidden.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, by_entropy):
        slope, bend = ctx.saved_tensors
        d = grad[:, None] * slope
        if bend is not None:
            d = d.addcmul_(by_entropy[:, None], bend)
        return d.to(ctx.dtype), *[None] * 5


def token_logps(hidden, weight, ids, temperature, vocabulary, entropy_gradient=False):
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
            logits = hidden.float() @ weight.float().t() / temperature  # (c, V)
        every = torch.log_softmax(logits, dim=-1)
        entropy = -(every.exp() * every).sum(-1)
        return every.gather(1, ids[:, None])[:, 0], entropy

    rows = max(1, CHUNK // len(weight))
    chunks = zip(hidden.split(rows), ids.split(rows))
    parts = [checkpoint(some, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.cat(part) for part in zip(*parts))
