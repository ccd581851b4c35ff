"""Token sampling with its own log-probs: one prefill per prompt, G rows share it, each row stops by itself.

Letters: P prompts, G samples each, N = P*G rows, L prompt length, T new tokens, C width, V vocabulary.
"""
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from sa2va_hf.modeling_sa2va import positions

STOP_TAIL = 8      # tokens of the decoded tail in which the stop text must show; `<|end|>` is 4 to 5 tokens


@dataclass
class Completions:
    ids: torch.Tensor       # (N, T) long, pad after a row's end
    logp: torch.Tensor      # (N, T) float32 log-probs under the distribution they were drawn from
    valid: torch.Tensor     # (N, T) bool, up to and including the token that completes the stop text
    stopped: torch.Tensor   # (N,) bool, False = cut at the length limit
    hidden: torch.Tensor    # (N, T, C) last hidden state at each completion token as input; zero where never fed


class StopText:
    """Per-row test for the template's stop text, which is plain BPE text whose ids depend on what precedes it.

    A row is decoded only when its newest token holds the stop text's last character.
    """

    def __init__(self, tokenizer, stop_texts: list[str], vocab_size: int):
        self.tokenizer, self.stop_texts = tokenizer, stop_texts
        last = {text[-1] for text in stop_texts}
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.may_end = torch.zeros(vocab_size, dtype=torch.bool)       # a model may have more rows than its tokenizer has tokens
        self.may_end[:len(tokens)] = torch.tensor([any(c in (token or "") for c in last) for token in tokens])
        self.eos_id = tokenizer.eos_token_id

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) bool: does the completion `ids` (N, t) of each row end here?"""
        newest = ids[:, -1].cpu()
        done = newest == self.eos_id
        for row in torch.nonzero(self.may_end[newest] & ~done)[:, 0].tolist():
            tail = self.tokenizer.decode(ids[row, -STOP_TAIL:].tolist())
            done[row] = any(text in tail for text in self.stop_texts)
        return done.to(ids.device)


@torch.no_grad()
def generate(language_model, embeds, attention_mask, *, num_generations, max_new_tokens, stop, pad_id, temperature=1.0,
             uniforms=None) -> Completions:
    """Sample `num_generations` completions of each prompt.

    Sampling is by inverse CDF of softmax(logits / temperature): no top-k, no top-p, no clipping, so the returned
    log-probs are those of the distribution that was sampled, and equal `grpo.token_logps_from_logits`.

    Args:
        embeds: (P, L, C) prompt embeddings, left-padded; attention_mask: (P, L).
        stop: callable (N, t) ids -> (N,) bool.
        uniforms: (N, max_new_tokens) in [0, 1), one number a token, or None for greedy decoding.

    Returns:
        Completions whose T is the longest row's length.
    """
    num_rows = len(embeds) * num_generations
    if uniforms is not None and uniforms.shape != (num_rows, max_new_tokens):
        raise ValueError(f"uniforms {tuple(uniforms.shape)}, expected {(num_rows, max_new_tokens)}")
    cache = DynamicCache(config=language_model.config)
    out = language_model.model(inputs_embeds=embeds, attention_mask=attention_mask, position_ids=positions(attention_mask),
                               past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(num_generations)
    mask = attention_mask.repeat_interleave(num_generations, 0)                                  # (N, L)
    hidden = out.last_hidden_state[:, -1].repeat_interleave(num_generations, 0)                  # (N, C)
    position = mask.sum(1, keepdim=True)                                                         # (N, 1)
    done = torch.zeros(num_rows, dtype=torch.bool, device=embeds.device)
    ids, logps, valids, hiddens = [], [], [], []
    for t in range(max_new_tokens):
        logp = torch.log_softmax(language_model.lm_head(hidden).float() / temperature, dim=-1)   # (N, V)
        token = logp.argmax(-1) if uniforms is None else _inverse_cdf(logp, uniforms[:, t].to(logp.device))
        token = torch.where(done, pad_id, token)
        ids.append(token)
        logps.append(torch.where(done, 0.0, logp.gather(1, token[:, None])[:, 0]))
        valids.append(~done)
        done = done | stop(torch.stack(ids[-STOP_TAIL:], 1))
        if t + 1 == max_new_tokens or done.all():
            hiddens.append(torch.zeros_like(hidden))
            break
        mask = torch.cat([mask, valids[-1][:, None].to(mask.dtype)], dim=1)
        embed = language_model.get_input_embeddings()(token)[:, None].to(embeds.dtype)
        hidden = language_model.model(inputs_embeds=embed, attention_mask=mask, position_ids=position,
                                      past_key_values=cache, use_cache=True).last_hidden_state[:, 0]
        position = position + 1
        hiddens.append(hidden)
    return Completions(torch.stack(ids, 1), torch.stack(logps, 1), torch.stack(valids, 1), done, torch.stack(hiddens, 1))


def _inverse_cdf(logp, u):
    """(N,) index of the first class whose cumulative probability exceeds u (N,); float64 sums over the vocabulary."""
    cdf = logp.double().exp().cumsum(-1)
    return torch.searchsorted(cdf, u.double()[:, None] * cdf[:, -1:], right=True)[:, 0].clamp(max=logp.shape[1] - 1)
