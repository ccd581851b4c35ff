"""Sampling and scoring by a language model's own modules, on the CPU and for unsupported models.

The fast path is tested against it.

Letters: P prompts, G samples each, N = P*G rows, L prompt length, T new tokens, M tokens behind a
prompt, C width, A axes of a position.
"""

import torch
from torch import nn
from transformers import DynamicCache

from rl_train.engine.lm_head import product
from rl_train.engine.packing import next_positions
from rl_train.engine.sampling import Completions, SamplingParams, sample_token
from sa2va_hf.to_device import to_device


def append_token_embeds(
    language_model: nn.Module, embeds: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return embeddings (P, L+M, C): embeds (P, L, C) followed by those of ids (P, M).

    An image placeholder among the ids is embedded like any other token.
    """
    following = language_model.get_input_embeddings()(to_device(ids, embeds.device))
    return torch.cat([embeds, following.to(embeds.dtype)], dim=1)


def prepare_checkpointing(language_model: nn.Module):
    """Set a model of transformers up for `gradient_checkpointing` of `hidden_states`."""
    model = language_model.model
    # The first is its name from transformers 5.23 on.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def hidden_states(
    language_model: nn.Module,
    embeds: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    gradient_checkpointing: bool = False,
) -> torch.Tensor:
    """Return the last hidden states (P, L, C), as the model returns them: mostly normed.

    Args:
        mask: (P, L), or a bias (P, 1, L, L) of the attention scores; position_ids: (A, P, L).
        gradient_checkpointing: recompute each layer in the backward, for which
            `prepare_checkpointing` has set the model up.
    """
    # Checkpointing acts on layers in training mode, and there it also drops the KV cache: so only
    # for this forward, and only the layers' own flag, which turns no dropout on.
    checkpointing = gradient_checkpointing and torch.is_grad_enabled()
    layers = language_model.model.layers if checkpointing else []
    for layer in layers:
        layer.training = True
    try:
        hidden = language_model.model(
            inputs_embeds=embeds,
            attention_mask=mask.to(embeds.device),
            position_ids=_of_transformers(position_ids.to(embeds.device)),
            use_cache=False,
        ).last_hidden_state
    finally:
        for layer in layers:
            layer.training = False
    return hidden


def _of_transformers(position_ids):
    """Drop the first axis of positions (A, P, L) if A is 1, as transformers takes them."""
    return position_ids[0] if len(position_ids) == 1 else position_ids


@torch.no_grad()
def generate(
    language_model: nn.Module,
    embeds: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    params: SamplingParams,
    head_norm: nn.Module | None = None,
) -> Completions:
    """Sample a token at a time with the cache of transformers; see `Engine.generate`.

    Args: head_norm: see `Engine`.
    """
    mask, positions = (t.to(embeds.device) for t in (attention_mask, position_ids))
    num_generations, stop = params.num_generations, params.stop
    cache, inputs = DynamicCache(config=language_model.config), embeds
    ids, logps, valids, hiddens = [], [], [], []
    for t in range(params.max_new_tokens):
        hidden = language_model.model(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=_of_transformers(positions),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        # `hiddens` are states at new tokens; the first forward gives that at the prompt's end.
        if t:
            hiddens.append(hidden)
            positions = positions + 1
        else:
            # A prompt is computed once; its keys and values serve G rows.
            cache.batch_repeat_interleave(num_generations)
            next_position = next_positions(positions, mask).repeat_interleave(num_generations)
            positions = next_position[None, :, None]  # (1, N, 1)
            mask, hidden = (x.repeat_interleave(num_generations, 0) for x in (mask, hidden))
            state, done = (
                torch.zeros_like(next_position),
                torch.zeros_like(next_position, dtype=torch.bool),
            )
        u = None if params.uniforms is None else params.uniforms[:, t].to(hidden.device)
        normed = head_norm(hidden) if head_norm else hidden
        logits = product(normed, language_model.lm_head.weight.t())
        token, logp = sample_token(logits, params.temperature, u)
        # Rows that are done go on with pads, which `valid` marks.
        token = torch.where(done, params.pad_id, token)
        ids.append(token)
        logps.append(torch.where(done, 0.0, logp))
        valids.append(~done)
        if stop:
            state, ends = stop.step(state, token)
            done = done | ends
        if done.all():
            break
        mask = torch.cat([mask, valids[-1][:, None].to(mask.dtype)], dim=1)
        inputs = language_model.get_input_embeddings()(token)[:, None].to(embeds.dtype)
    # The last token is never an input.
    hiddens.append(torch.zeros_like(hidden))
    ids, logps, valids, hiddens = (torch.stack(c, 1) for c in (ids, logps, valids, hiddens))
    return Completions(ids.cpu(), logps, valids.cpu(), done.cpu(), hiddens)
