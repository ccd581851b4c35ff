"""Token sampling with its own log-probs: one prefill per prompt, that of an image shared, G rows share it, each row stops by itself.

On CUDA `rl_train.engine.decode` samples, with a cache of its own, CUDA graphs and no sync per token. What it does not know, and
the CPU, take the plain path below, which is also what it is tested against.

Letters: P prompts, G samples each, N = P*G rows, L prompt length, T new tokens, C width, V vocabulary.
"""

import logging
import weakref

import torch
from transformers import DynamicCache

from rl_train.engine.decode import Decoder
from rl_train.engine.fused import unsupported
from rl_train.engine.tokens import Completions, StopText, draw
from sa2va_hf.modeling_sa2va import positions

_DECODERS = weakref.WeakKeyDictionary()  # language model -> its Decoder
_REASONS = set()  # for which the plain path was taken, to say each once


@torch.no_grad()
def generate(
    language_model,
    embeds,
    attention_mask,
    *,
    num_generations,
    max_new_tokens,
    stop: StopText | None,
    pad_id,
    temperature=1.0,
    uniforms=None,
    same=None,
) -> Completions:
    """Sample `num_generations` completions of each prompt.

    Sampling is by inverse CDF of softmax(logits / temperature): no top-k, no top-p, no clipping, so the returned
    log-probs are those of the distribution that was sampled, and equal `grpo.token_logps_from_logits`.

    Args:
        embeds: (P, L, C) prompt embeddings, left-padded; attention_mask: (P, L).
        stop: says where a row ends; None: nowhere before `max_new_tokens`.
        uniforms: (N, max_new_tokens) in [0, 1), one number a token, or None for greedy decoding.
        same: how many leading embeddings each prompt has in common with the one before it, which are then computed once; None: 0.

    Returns:
        Completions whose T is the longest row's length.
    """
    num_rows = len(embeds) * num_generations
    if uniforms is not None and uniforms.shape != (num_rows, max_new_tokens):
        raise ValueError(f"uniforms {tuple(uniforms.shape)}, expected {(num_rows, max_new_tokens)}")
    how = dict(
        num_generations=num_generations,
        max_new_tokens=max_new_tokens,
        stop=stop and stop.to(embeds.device),
        pad_id=pad_id,
        temperature=temperature,
        uniforms=uniforms,
    )
    decoder = decoder_for(language_model, embeds)
    if decoder is not None:
        return decoder.generate(language_model, embeds, attention_mask, same=same, **how)
    return generate_plain(language_model, embeds, attention_mask, **how)


def decoder_for(language_model, embeds) -> Decoder | None:
    """`decoder_of` for embeddings on CUDA; None on the CPU, where the model's own forward is as fast."""
    return decoder_of(language_model) if embeds.is_cuda else None


def decoder_of(language_model) -> Decoder | None:
    """The model's Decoder, built on first use and again when it is stale; None, and one warning, if it would compute something else."""
    decoder = _DECODERS.get(language_model)
    if decoder is not None and not decoder.stale(language_model):
        return decoder
    if decoder is not None:
        decoder.graphs.clear()  # frees their buffers before there are new ones
        del _DECODERS[language_model], decoder
    reason = unsupported(language_model)
    if reason is None:
        decoder = _DECODERS[language_model] = Decoder(language_model)
        return decoder
    if reason not in _REASONS:
        _REASONS.add(reason)
        logging.getLogger(__name__).warning("slow token sampling and scoring: %s", reason)
    return None


@torch.no_grad()
def generate_plain(
    language_model,
    embeds,
    attention_mask,
    *,
    num_generations,
    max_new_tokens,
    stop,
    pad_id,
    temperature,
    uniforms,
) -> Completions:
    """`generate` by the model's own forward, a token at a time."""
    num_rows = len(embeds) * num_generations
    cache = DynamicCache(config=language_model.config)
    out = language_model.model(
        inputs_embeds=embeds,
        attention_mask=attention_mask,
        position_ids=positions(attention_mask),
        past_key_values=cache,
        use_cache=True,
    )
    cache.batch_repeat_interleave(num_generations)
    mask = attention_mask.repeat_interleave(num_generations, 0)  # (N, L)
    hidden = out.last_hidden_state[:, -1].repeat_interleave(num_generations, 0)  # (N, C)
    position = mask.sum(1, keepdim=True)  # (N, 1)
    done = torch.zeros(num_rows, dtype=torch.bool, device=embeds.device)
    state = stop and stop.start(num_rows)
    ids, logps, valids, hiddens = [], [], [], []
    for t in range(max_new_tokens):
        token, logp = draw(
            language_model.lm_head(hidden),
            temperature,
            None if uniforms is None else uniforms[:, t].to(hidden.device),
        )
        token = torch.where(done, pad_id, token)
        ids.append(token)
        logps.append(torch.where(done, 0.0, logp))
        valids.append(~done)
        if stop:
            state, ends = stop.step(state, token)
            done = done | ends
        if t + 1 == max_new_tokens or done.all():
            hiddens.append(torch.zeros_like(hidden))
            break
        mask = torch.cat([mask, valids[-1][:, None].to(mask.dtype)], dim=1)
        embed = language_model.get_input_embeddings()(token)[:, None].to(embeds.dtype)
        hidden = language_model.model(
            inputs_embeds=embed,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, 0]
        position = position + 1
        hiddens.append(hidden)
    return Completions(
        torch.stack(ids, 1),
        torch.stack(logps, 1),
        torch.stack(valids, 1),
        done,
        torch.stack(hiddens, 1),
    )
