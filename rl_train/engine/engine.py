"""Engine of a decoder LLM: samples answers and computes their log-probs, fast on CUDA.

Letters: P prompts, G samples each, N = P*G rows, n scored rows, L prompt length, T completion
tokens, C LLM width, m tokens, A axes of a position (1, or 3 where images have time, height, width).
"""

import logging
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rl_train.distributed.fsdp import ShardedLayers
from rl_train.engine import hf_backend, packed_forward
from rl_train.engine.decode import Decoder, PrefilledPrompts
from rl_train.engine.fused_weights import FusedModel, unsupported
from rl_train.engine.lm_head import token_logps
from rl_train.engine.packing import Packed, pack, positions, shared_prefix_layout
from rl_train.engine.sampling import Completions, SamplingParams, StopText
from sa2va_hf.to_device import to_device


@dataclass
class ScoreOutput:
    """Log-probs, entropies and hidden states of n scored rows."""

    logp: torch.Tensor  # (n, T), 0 where not valid
    entropy: torch.Tensor  # (n, T), detached, 0 where not valid
    hidden: torch.Tensor  # (P, S, C) last hidden states, as the model returns them
    packed: Packed

    def hidden_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return hidden states (m, C) at the tokens (n, T) bool, which were inputs, row-major.

        Args:
            tokens: on the CPU.
        """
        # The token that predicts token t + 1 is token t itself.
        return self.packed.hidden_before(self.hidden, tokens.roll(1, 1))


class Engine:
    """Samples from and scores with one decoder LLM, under softmax(logits / temperature).

    Embeddings are on the model's device. All other inputs are on the CPU, where sequences are laid
    out; an input on the GPU is copied to the CPU, which waits for it. Returned ids, `valid` and
    `stopped` are on the CPU.

    On CUDA it samples by kernels and CUDA graphs of its own and scores by compiled layers. For a
    model that these do not support it logs one warning and uses the model's own modules, as it does
    on the CPU. At its first use on CUDA the frozen weights, unless they are in 4 bits, move into
    larger matrices, of which the model's parameters become views. Call `release` before saving,
    moving, merging or unloading the model.

    After `shard` this rank keeps a part of each layer. `unshard` then comes before forwards without
    gradient, `reshard` before those with gradient.

    Args:
        language_model: has .model, .lm_head, .config and get_input_embeddings() as a causal LM of
            transformers, is frozen but for its LoRA, which is attached already.
        pad_id: token after the end of an answer.
        gradient_checkpointing: recompute each layer in the backward of `score`. CUDA graphs of few
            tokens and quantised layers do so whatever it says.
        head_norm: norm before lm_head, where the model returns its last states before the final
            norm; None: it returns them after it.
    """

    def __init__(
        self,
        language_model: nn.Module,
        *,
        pad_id: int,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        head_norm: nn.Module | None = None,
    ):
        self.language_model, self.pad_id, self.temperature = language_model, pad_id, temperature
        self.gradient_checkpointing, self.head_norm = gradient_checkpointing, head_norm
        if gradient_checkpointing:
            hf_backend.prepare_checkpointing(language_model)
        reason = unsupported(language_model)
        if reason:
            logging.getLogger(__name__).warning("slow token sampling and scoring: %s", reason)
        self.fast_on = () if reason else ("cuda",)  # types of devices
        # Beyond these, dynamic rotary embeddings depend on the longest row of a batch.
        config = language_model.config
        dynamic = config.rope_parameters["rope_type"] == "dynamic"
        self.max_positions = config.max_position_embeddings if dynamic else None
        self._fused = self._decoder = None
        self._delayed: DelayedCompletions | None = None  # whose prompts are computed
        self.sharded: ShardedLayers | None = None
        self.gathered_at: list[int] = []  # addresses of the matrices at the last `unshard`

    def shard(self, mesh: DeviceMesh):
        """Keep this rank's shard of each layer from now on; before the engine's first use.

        A collective.
        """
        assert self._fused is None and self.gradient_checkpointing
        model = self.language_model.model
        self.sharded = ShardedLayers(model, model.layers, mesh)
        self.fused(self.language_model.lm_head.weight)  # moves the parts, before any gather

    def unshard(self):
        """Gather the layers in shards until `reshard`: a collective, if they are not gathered."""
        if self.sharded is None:
            return
        fused = self.fused(self.language_model.lm_head.weight)
        if fused is None:
            self.sharded.unshard()
        elif not fused.is_whole:
            fused.unshard()
            if self.gathered_at != (addresses := fused.addresses()):
                self.gathered_at = addresses
                self.free_cache()  # its graphs read the former addresses

    def reshard(self):
        """Free the gathered layers; those with gradient gather each layer while it computes."""
        if self.sharded is not None:
            self.sharded.reshard()
            if self._fused is not None:
                self._fused.reshard()

    def take_part(self):
        """Gather the layers as another rank does in a `score` with gradient and its backward."""
        self.reshard()
        self.sharded.take_part()

    def _check_sharded(self, fused: FusedModel | None):
        """Raise AssertionError if layers in shards are not as the next forward needs them."""
        if self.sharded is not None:
            is_whole = (fused or self.sharded).is_whole
            assert is_whole != torch.is_grad_enabled(), (
                "call unshard() before forwards without gradient, reshard() before those with it"
            )

    def fused(self, tensor: torch.Tensor) -> FusedModel | None:
        """Return the fused matrices, made at first use; None if the model's own modules compute."""
        if tensor.device.type not in self.fast_on:
            return None
        if self._fused is None:
            before_norm = self.head_norm is not None
            self._fused = FusedModel(self.language_model, before_norm, self.sharded)
            self._decoder = Decoder(self._fused)
        self._fused.check()
        return self._fused

    def release(self):
        """Give the model's parameters storage of their own again; free what the engine holds."""
        assert self.sharded is None, "layers in shards cannot be saved: load the base anew"
        if self._fused is not None:
            self._fused.release()
        self._fused = self._decoder = self._delayed = None

    def free_cache(self):
        """Free the sampler's cache and all graphs, which their next use makes anew."""
        if self._decoder is not None:
            self._decoder = Decoder(self._fused)
            if self._fused.graphs is not None:
                self._fused.graphs.clear()

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
        delay: bool = False,
    ) -> "Completions | DelayedCompletions":
        """Sample G completions of each prompt; their T is the longest row's length.

        Sampling is by inverse CDF of softmax(logits / temperature): no top-k, no top-p, no
        clipping, so the returned log-probs are those of the distribution that was sampled.

        Args:
            embeds: (P, L, C) prompt embeddings, left-padded; attention_mask: (P, L).
            stop: test for the end of a row; None: rows end at `max_new_tokens`.
            uniforms: (N, max_new_tokens) in [0, 1), one number a token; None: greedy decoding.
            position_ids: (A, P, L); default counts the attended tokens.
            shared_prefix_lengths: how many leading embeddings each prompt has in common with the
                one before it, which are then computed once; None: 0.
            delay: return `DelayedCompletions`, sampled together with the next that are not, by the
                LoRA in use now, whatever is in use then. They are sampled at once where the
                model's own modules compute, and of layers in shards.

        Raises:
            ValueError: `uniforms` has another shape; an answer may pass `max_positions`.
        """
        shape = (len(embeds) * num_generations, max_new_tokens)  # (N, T)
        if uniforms is not None and uniforms.shape != shape:
            raise ValueError(f"uniforms {tuple(uniforms.shape)}, expected {shape}")
        mask, position_ids_cpu = _to_cpu(attention_mask, position_ids)
        self._check_positions(position_ids_cpu, max_new_tokens)
        params = SamplingParams(
            num_generations=num_generations,
            max_new_tokens=max_new_tokens,
            stop=stop and stop.to(embeds.device),
            pad_id=self.pad_id,
            temperature=self.temperature,
            uniforms=uniforms,
        )
        if delay:
            self.answer_delayed()  # one at a time
        fused = self.fused(embeds)
        self._check_sharded(fused)
        if fused is None:  # the model's own modules
            completions = hf_backend.generate(
                self.language_model, embeds, mask, position_ids_cpu, params, self.head_norm
            )
            return DelayedCompletions(completions) if delay else completions
        prefix_layout = shared_prefix_layout(mask, position_ids_cpu, shared_prefix_lengths)
        with torch.autocast(embeds.device.type, enabled=False):
            prompts = self._decoder.prefill(embeds, mask, position_ids_cpu, prefix_layout, params)
        if delay and self.sharded is None:
            return self._delay(prompts)
        completions = self._sample(prompts)
        return DelayedCompletions(completions) if delay else completions

    def _delay(self, prompts: PrefilledPrompts) -> "DelayedCompletions":
        """Hold the LoRA that computed some prompts, until they are answered."""
        if self._fused.hold_lora():
            self.free_cache()  # its graphs read the former matrices
        self._delayed = DelayedCompletions(None, self, prompts)
        return self._delayed

    def _sample(self, prompts: PrefilledPrompts) -> Completions:
        """Return the answers to prompts just computed; if they fit, also answer delayed ones."""
        delayed = self._delayed
        both = delayed and self._decoder.joined(prompts, delayed.prompts)
        if not both:
            return self._decoder.sample([prompts])[0]
        self._delayed = None
        completions, delayed.completions = self._decoder.sample(both)
        return completions

    def answer_delayed(self):
        """Sample the delayed completions by themselves, if there are any."""
        delayed, self._delayed = self._delayed, None
        if delayed is not None:
            self._fused.restore_lora()
            (delayed.completions,) = self._decoder.sample([delayed.prompts])

    def score(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        prompt_index: torch.Tensor,
        ids: torch.Tensor,
        valid: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> ScoreOutput:
        """Return log-probs of n answers, with gradient, by one forward over prompts and answers.

        Args:
            embeds, attention_mask: (P, L, C), (P, L) of the prompts, padded on the left.
            prompt_index: (n,) prompt of each row, not decreasing.
            ids, valid: (n, T) tokens and which of them are the answer; those of a row come first.
            position_ids: (A, P, L) of the prompts; default counts the attended tokens.
        """
        model, device = self.language_model, embeds.device
        prompt_index, ids, valid = (t.cpu() for t in (prompt_index, ids, valid))
        mask, position_ids_cpu = _to_cpu(attention_mask, position_ids)
        # One sequence for each prompt and its rows: embeds (P, L, C) -> (P, S, C).
        packed = pack(mask, position_ids_cpu, prompt_index, ids, valid, self.pad_id)
        self._check_positions(packed.position_ids)
        embeds, fused = (
            hf_backend.append_token_embeds(model, embeds, packed.ids),
            self.fused(embeds),
        )
        self._check_sharded(fused)
        if fused is None:
            bias, position_ids_cpu = packed.bias(embeds.dtype, device), packed.position_ids
            hidden = hf_backend.hidden_states(
                model, embeds, bias, position_ids_cpu, self.gradient_checkpointing
            )
        else:
            hidden = packed_forward.hidden_states(
                fused, embeds, packed, self.gradient_checkpointing
            )
        # Only valid tokens go through lm_head, the largest product: (m, C), (m,).
        predicting, target_ids = packed.hidden_before(hidden, valid), ids[valid]
        valid_indices = to_device(valid.flatten().nonzero()[:, 0], device)
        # Back to rows: (m,) -> (n, T), by indices that were made on the CPU.
        logp, entropy = (
            values.new_zeros(ids.numel()).index_copy(0, valid_indices, values).view(ids.shape)
            for values in self._token_logps(predicting, target_ids, fused)
        )
        return ScoreOutput(logp, entropy, hidden, packed)

    @torch.no_grad()
    def last_hidden_states(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        num_last: int = 1,
        position_ids: torch.Tensor | None = None,
        shared_prefix_lengths: list[int] | None = None,
    ) -> torch.Tensor:
        """Return hidden states (P, num_last, C) at the end of prompts, without gradient.

        Args: see `generate`.
        """
        mask, position_ids_cpu = _to_cpu(attention_mask, position_ids)
        self._check_positions(position_ids_cpu)
        fused = self.fused(embeds)
        self._check_sharded(fused)
        if fused is None:
            hidden = hf_backend.hidden_states(self.language_model, embeds, mask, position_ids_cpu)
            return hidden[:, -num_last:]  # prompts are padded on the left
        prefix_layout = shared_prefix_layout(mask, position_ids_cpu, shared_prefix_lengths)
        hidden = packed_forward.hidden_states(
            fused, prefix_layout.gather(embeds), prefix_layout.layout
        )
        return prefix_layout.last(hidden, num_last)

    @torch.no_grad()
    def logps(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return log-probs (m,) of ids (m,) after hidden states (m, C), without gradient."""
        return self._token_logps(hidden, ids, self.fused(hidden))[0]

    def _check_positions(self, position_ids: torch.Tensor, num_tokens: int = 0):
        """Raise ValueError if positions, with those of `num_tokens` behind them, pass the limit."""
        if self.max_positions is None:
            return
        length = int(position_ids.max()) + 1 + num_tokens
        if length > self.max_positions:
            raise ValueError(
                f"{length} tokens of prompt and answer: beyond the model's "
                f"max_position_embeddings of {self.max_positions} its dynamic rotary embeddings "
                "would stretch all positions: use fewer tiles, a shorter caption or a smaller "
                "--max_completion_length"
            )

    def _token_logps(self, hidden, ids, fused):
        weight = self.language_model.lm_head.weight  # (V, C)
        matrix = weight if fused is None else fused.padded_head
        hidden = self.head_norm(hidden) if self.head_norm else hidden
        return token_logps(
            hidden,
            matrix,
            to_device(ids, hidden.device),
            temperature=self.temperature,
            vocabulary=len(weight),
        )


@dataclass
class DelayedCompletions:
    """Completions that are sampled together with the engine's next, or when they are read."""

    completions: Completions | None
    engine: Engine | None = None
    prompts: PrefilledPrompts | None = None

    def read(self) -> Completions:
        """Return the completions, sampled now if no others came.

        Raises:
            RuntimeError: the engine was released before; its prompts' keys and values are gone.
        """
        if self.completions is None:
            self.engine.answer_delayed()
        if self.completions is None:
            raise RuntimeError("the engine was released before these completions were read")
        return self.completions


def _to_cpu(attention_mask, position_ids):
    """Return both on the CPU; positions that are None count the attended tokens."""
    mask = attention_mask.cpu()
    return mask, positions(mask) if position_ids is None else position_ids.cpu()
