"""Log-probs of completions with little work and memory: rows share their prompt's forward, the vocabulary passes in chunks.

Letters: n rows about P prompts, L prompt length, T completion tokens, M tokens behind a prompt, S = L + M, m scored tokens, C LLM width,
V vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.function import once_differentiable

from rl_train.engine import forward
from rl_train.engine.packing import Packed, pack, share
from rl_train.engine.sampler import decoder_for, decoder_of
from sa2va_hf.modeling_sa2va import positions

CHUNK = 2**26  # logits that are held at a time, however large the vocabulary is
NEVER = -1e30  # logit of what is no token: not -inf, which times its probability 0 is NaN


class _TokenLogps(torch.autograd.Function):
    """Each token's derivative is known as soon as its logits are, up to the factor that backward brings: nothing is computed twice."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature, vocabulary):
        assert not ctx.needs_input_grad[1], "lm_head is frozen: no gradient is computed for it"
        logp, entropy = (hidden.new_empty(len(ids), dtype=torch.float32) for _ in range(2))
        slope = (
            torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        )  # (m, C) d logp / d hidden
        for start in range(0, len(ids), rows := max(1, CHUNK // len(weight))):
            chunk = slice(start, start + rows)
            token = ids[chunk, None]
            logits = (
                (hidden[chunk].to(weight.dtype) @ weight.t()).float().div_(temperature)
            )  # (c, V)
            logits[:, vocabulary:] = NEVER
            every = torch.log_softmax(logits, dim=-1)
            logp[chunk] = every.gather(1, token)[:, 0]
            p = torch.exp(every, out=logits)
            entropy[chunk] = -every.mul_(p).sum(-1)
            if slope is not None:
                p.scatter_add_(1, token, -torch.ones_like(p[:, :1]))
                slope[chunk] = (p.to(weight.dtype) @ weight).div_(-temperature)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        (slope,) = ctx.saved_tensors
        return (grad[:, None] * slope).to(slope.dtype), None, None, None, None


def token_logps_from_hidden(
    hidden, weight, ids, temperature, vocabulary=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """((m,) log-probs of `ids` (m,), (m,) entropies in nats, detached) under softmax(hidden @ weight.T / temperature), in float32.

    As `grpo.token_logps_from_logits` and `entropy_from_logits`, but never with more than CHUNK logits at a time, forward or backward.

    Args:
        hidden: (m, C), the only input that gets a gradient; weight: (V, C) of lm_head, in whose dtype the logits are computed.
        vocabulary: number of weight's rows that are tokens; the others, which only align it, are zeros.

    Raises:
        AssertionError: weight wants a gradient.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return _TokenLogps.apply(
            hidden, weight, ids, temperature, len(weight) if vocabulary is None else vocabulary
        )


@dataclass
class Answers:
    """What one forward says of n rows."""

    logp: torch.Tensor  # (n, T), 0 where not valid
    entropy: torch.Tensor  # (n, T), detached, 0 where not valid
    hidden: torch.Tensor  # (P, S, C) last hidden states, after the final norm
    packed: Packed

    def hidden_of(self, tokens) -> torch.Tensor:
        """(m, C) hidden states of tokens (n, T) bool that were fed, row-major."""
        return self.packed.hidden_before(self.hidden, tokens.roll(1, 1))


def score_answers(
    language_model,
    embeds,
    mask,
    prompt,
    ids,
    valid,
    *,
    pad_id,
    temperature,
    gradient_checkpointing=False,
    how=None,
) -> Answers:
    """Log-probs of n answers by one forward of a causal language model; carries gradient.

    Args:
        embeds, mask: (P, L, C), (P, L) of the prompts, padded on the left; prompt: (n,) prompt of each row, not decreasing.
        ids, valid: (n, T) tokens and which of them are the answer; those of a row come first.
        how: `by_modules` or `by_kernels`; default the latter on CUDA for the models that it knows, unless their base trains.
    """
    head = language_model.lm_head
    assert type(head) is torch.nn.Linear and head.bias is None and not head.weight.requires_grad, (
        "lm_head is more than a frozen matrix"
    )
    packed = pack(mask, prompt, ids, valid, pad_id)
    if how is None:
        decoder = decoder_for(language_model, embeds)
        how = (
            by_modules
            if decoder is None or decoder.trains_base
            else partial(by_kernels, decoder=decoder)
        )
    hidden, weight = how(
        language_model, follow(language_model, embeds, packed.ids), packed, gradient_checkpointing
    )
    found = token_logps_from_hidden(
        packed.hidden_before(hidden, valid), weight, ids[valid], temperature, len(head.weight)
    )
    logp, entropy = (
        torch.zeros_like(ids, dtype=torch.float32).masked_scatter(valid, values) for values in found
    )
    return Answers(logp, entropy, hidden, packed)


@torch.no_grad()
def read(language_model, embeds, mask, same=None, num_last=1) -> torch.Tensor:
    """(P, num_last, C) hidden states at the end of sequences embeds (P, L, C), padded on the left as mask (P, L) says.

    Args:
        same: see `packing.share`.
    """
    decoder = decoder_for(language_model, embeds)
    if decoder is not None:
        shared = share(mask, same)
        return shared.last(
            forward.hidden_states(decoder, shared.gather(embeds), shared.layout), num_last
        )
    return hidden_states(language_model, embeds, mask)[:, -num_last:]


@torch.no_grad()
def frozen_logps(language_model, hidden, ids, temperature) -> torch.Tensor:
    """(m,) log-probs of ids (m,) after hidden states (m, C), without gradient."""
    head, decoder = language_model.lm_head, decoder_for(language_model, hidden)
    weight = head.weight if decoder is None else decoder.padded_head
    return token_logps_from_hidden(hidden, weight, ids, temperature, len(head.weight))[0]


def follow(language_model, embeds, ids) -> torch.Tensor:
    """(P, L+M, C) embeddings (P, L, C) with those of ids (P, M) behind them: an `<IMG_CONTEXT>` there is a token like any other."""
    return torch.cat([embeds, language_model.get_input_embeddings()(ids).to(embeds.dtype)], dim=1)


def by_kernels(language_model, embeds, packed, gradient_checkpointing, decoder=None):
    """((P, S, C) last hidden states, 0 at the padding, by `forward`; lm_head's matrix, aligned, since an odd V makes slow products)."""
    decoder = decoder or decoder_of(language_model)
    assert decoder is not None, "there are no kernels for this model"
    assert not decoder.trains_base, "the kernels give base weights no gradient"
    return forward.hidden_states(
        decoder, embeds, packed, gradient_checkpointing
    ), decoder.padded_head


def by_modules(language_model, embeds, packed, gradient_checkpointing):
    """((P, S, C) last hidden states by the model's own modules; lm_head's matrix)."""
    hidden = hidden_states(
        language_model,
        embeds,
        packed.bias(embeds.dtype),
        packed.position_ids,
        gradient_checkpointing,
    )
    return hidden, language_model.lm_head.weight


def prepare_checkpointing(language_model):
    """Set a model of transformers up for `gradient_checkpointing` of `hidden_states`."""
    enable = (
        getattr(language_model, "activation_checkpointing_enable", None)
        or language_model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})  # the second is its name before transformers 5.23


def hidden_states(
    language_model, embeds, mask, position_ids=None, gradient_checkpointing=False
) -> torch.Tensor:
    """(P, L, C) last hidden states after the final norm, by the model's own modules.

    Args:
        mask: (P, L), or a bias (P, 1, L, L) of the attention scores; position_ids: (P, L), default counts the attended tokens.
        gradient_checkpointing: recompute each layer in the backward, for which `prepare_checkpointing` has set the model up.
    """
    # Checkpointing acts on layers in training mode, and there it also drops the KV cache: so only for this forward, and
    # only the layers' own flag, which turns no dropout on.
    layers = (
        language_model.model.layers if gradient_checkpointing and torch.is_grad_enabled() else []
    )
    for layer in layers:
        layer.training = True
    position_ids = positions(mask) if position_ids is None else position_ids
    hidden = language_model.model(
        inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state
    for layer in layers:
        layer.training = False
    return hidden
