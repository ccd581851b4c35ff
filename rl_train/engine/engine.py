"""The one object through which a policy samples and scores: all that makes it fast is behind it.

Letters: P prompts, G samples each, N = P*G rows, n scored rows, L prompt length, T completion
tokens, C LLM width, m tokens, A axes of a position (1, or 3 where images have time, height, width).
"""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from rl_train.engine import hf_backend, packed_forward
from rl_train.engine.decode import Decoder
from rl_train.engine.fused_weights import FusedModel, unsupported
from rl_train.engine.lm_head import token_logps
from rl_train.engine.packing import Packed, pack, positions, shared_prefix_layout
from rl_train.engine.sampling import Completions, SamplingParams, StopText
from sa2va_hf.to_device import to_device


@dataclass
class ScoreOutput:
    """What one forward says of n rows."""

    logp: torch.Tensor  # (n, T), 0 where not valid
    entropy: torch.Tensor  # (n, T), detached unless asked, 0 where not valid
    hidden: torch.Tensor  # (P, S, C) last hidden states, after the final norm
    packed: Packed

    def hidden_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """(m, C) hidden states of tokens (n, T) bool, on the CPU, that were fed, row-major."""
        return self.packed.hidden_before(self.hidden, tokens.roll(1, 1))


class Engine:
    """Samples from and scores with one decoder LLM, under softmax(logits / temperature).

    Embeddings are on its device, everything else that it takes on the CPU, where sequences are laid
    out (what is not is fetched, for which the GPU waits); so are ids of answers and their ends.

    On CUDA it samples by kernels and graphs of its own and scores by compiled layers, if it knows
    the model (else it logs one warning); on the CPU by the model's own modules, which there are as
    fast. At its first use on CUDA it takes the frozen weights over: the model's parameters become
    views of larger matrices, and compute as before. Whoever saves, moves, merges or unloads the
    model calls `release` first.

    Args:
        language_model: has .model, .lm_head, .config and get_input_embeddings() as a causal LM of
            transformers, is frozen but for its LoRA, which is attached already.
        pad_id: stands behind the end of an answer.
        gradient_checkpointing: recompute each layer in the backward of `score`.
    """

    def __init__(
        self,
        language_model: nn.Module,
        *,
        pad_id: int,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
    ):
        self.language_model, self.pad_id, self.temperature = language_model, pad_id, temperature
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            hf_backend.prepare_checkpointing(language_model)
        reason = unsupported(language_model)
        if reason:
            logging.getLogger(__name__).warning("slow token sampling and scoring: %s", reason)
        self.fast_on = () if reason else ("cuda",)  # types of devices
        self._fused = self._decoder = None

    def fused(self, tensor: torch.Tensor) -> FusedModel | None:
        """Return the model's fused matrices, made at first use; None where its modules compute."""
        if tensor.device.type not in self.fast_on:
            return None
        if self._fused is None:
            self._fused = FusedModel(self.language_model)
            self._decoder = Decoder(self._fused)
        self._fused.check()
        return self._fused

    def release(self):
        """Give the model's parameters storage of their own again; free what the engine holds."""
        if self._fused is not None:
            self._fused.release()
        self._fused = self._decoder = None

    def forget(self):
        """Free the sampler's cache and graphs, which its next use makes anew."""
        if self._decoder is not None:
            self._decoder = Decoder(self._fused)

    @torch.no_grad()
    def generate(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        num_generations: int,
        max_new_tokens: int,
        stop: StopText | None,
        uniforms: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        shared_prefix_lengths: list[int] | None = None,
    ) -> Completions:
        """G sampled completions of each prompt, whose T is the longest row's length.

        Sampling is by inverse CDF of softmax(logits / temperature): no top-k, no top-p, no
        clipping, so the returned log-probs are those of the distribution that was sampled.

        Args:
            embeds: (P, L, C) prompt embeddings, left-padded; attention_mask: (P, L).
            stop: says where a row ends; None: nowhere before `max_new_tokens`.
            uniforms: (N, max_new_tokens) in [0, 1), one number a token; None: greedy decoding.
            position_ids: (A, P, L); default counts the attended tokens.
            shared_prefix_lengths: how many leading embeddings each prompt has in common with the
                one before it, which are then computed once; None: 0.

        Raises:
            ValueError: `uniforms` has another shape.
        """
        shape = (len(embeds) * num_generations, max_new_tokens)
        if uniforms is not None and uniforms.shape != shape:
            raise ValueError(f"uniforms {tuple(uniforms.shape)}, expected {shape}")
        mask, placed = _laid_out(attention_mask, position_ids)
        draws = SamplingParams(
            num_generations=num_generations,
            max_new_tokens=max_new_tokens,
            stop=stop and stop.to(embeds.device),
            pad_id=self.pad_id,
            temperature=self.temperature,
            uniforms=uniforms,
        )
        if self.fused(embeds) is None:
            return hf_backend.generate(self.language_model, embeds, mask, placed, draws)
        shared = shared_prefix_layout(mask, placed, shared_prefix_lengths)
        return self._decoder.generate(embeds, mask, placed, shared, draws)

    def score(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        prompt: torch.Tensor,
        ids: torch.Tensor,
        valid: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        entropy_gradient: bool = False,
    ) -> ScoreOutput:
        """Log-probs of n answers by one forward over their prompts; carries gradient.

        Args:
            embeds, attention_mask: (P, L, C), (P, L) of the prompts, padded on the left.
            prompt: (n,) prompt of each row, not decreasing.
            ids, valid: (n, T) tokens and which of them are the answer; those of a row come first.
            position_ids: (A, P, L) of the prompts; default counts the attended tokens.
            entropy_gradient: whether the entropies carry gradient too.
        """
        model, device = self.language_model, embeds.device
        prompt, ids, valid = (t.cpu() for t in (prompt, ids, valid))
        mask, placed = _laid_out(attention_mask, position_ids)
        packed = pack(mask, placed, prompt, ids, valid, self.pad_id)
        embeds, fused = hf_backend.follow(model, embeds, packed.ids), self.fused(embeds)
        if fused is None:
            bias, placed = packed.bias(embeds.dtype, device), packed.position_ids
            hidden = hf_backend.hidden_states(
                model, embeds, bias, placed, self.gradient_checkpointing
            )
        else:
            hidden = packed_forward.hidden_states(
                fused, embeds, packed, self.gradient_checkpointing
            )
        before, said = packed.hidden_before(hidden, valid), ids[valid]
        at = to_device(valid.flatten().nonzero()[:, 0], device)
        logp, entropy = (
            values.new_zeros(ids.numel()).index_copy(0, at, values).view(ids.shape)
            for values in self._token_logps(before, said, fused, entropy_gradient)
        )
        return ScoreOutput(logp, entropy, hidden, packed)

    @torch.no_grad()
    def read(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        num_last: int = 1,
        position_ids: torch.Tensor | None = None,
        shared_prefix_lengths: list[int] | None = None,
    ) -> torch.Tensor:
        """(P, num_last, C) hidden states at the end of prompts, without gradient.

        Args: see `generate`.
        """
        mask, placed = _laid_out(attention_mask, position_ids)
        fused = self.fused(embeds)
        if fused is None:
            hidden = hf_backend.hidden_states(self.language_model, embeds, mask, placed)
            return hidden[:, -num_last:]
        shared = shared_prefix_layout(mask, placed, shared_prefix_lengths)
        hidden = packed_forward.hidden_states(fused, shared.gather(embeds), shared.layout)
        return shared.last(hidden, num_last)

    @torch.no_grad()
    def logps(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """(m,) log-probs of ids (m,) after hidden states (m, C), without gradient."""
        return self._token_logps(hidden, ids, self.fused(hidden))[0]

    def _token_logps(self, hidden, ids, fused, entropy_gradient=False):
        weight = self.language_model.lm_head.weight
        matrix = weight if fused is None else fused.padded_head
        return token_logps(
            hidden,
            matrix,
            to_device(ids, hidden.device),
            temperature=self.temperature,
            vocabulary=len(weight),
            entropy_gradient=entropy_gradient,
        )


def _laid_out(attention_mask, position_ids):
    """Both on the CPU; positions that are None count the attended tokens."""
    mask = attention_mask.cpu()
    return mask, positions(mask) if position_ids is None else position_ids.cpu()
