"""The same step as TRL would do it, by a policy and an engine of its own.

`generate` of transformers; old and reference log-probs by a full forward each, of a sequence per
row, with the vision encoder and the completions' logits as one tensor; a teacher in batches that
answers for itself and encodes the image of every row.

Letters: P prompts, G samples, N = P*G rows, n of a forward, L prompt length, T tokens, C width.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_train import grpo
from rl_train.engine import Completions, DelayedCompletions, Engine
from rl_train.roles import Roles
from rl_train.rollout import Batch
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.processing_sa2va import normalise_tiles
from tools.benchmarks.common import free_sampling
from tools.benchmarks.qwen import SHAPES
from tools.benchmarks.trl_points import MICRO_BATCH, FullPoints, entropies
from tools.benchmarks.workload import ForcedPolicy, Options, Work, build


@dataclass(kw_only=True)
class ImagesOfBatch(ImageFeatures):
    """Features of images, whose vision every forward computes anew."""

    batch: Batch


@dataclass
class FullAnswers:
    """Scores of n rows by one forward."""

    logp: torch.Tensor  # (n, T)
    entropy: torch.Tensor  # (n, T)
    hidden: torch.Tensor  # (n, T, C) at each token as input

    def hidden_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (m, C) hidden states of tokens (n, T) bool."""
        return self.hidden[tokens]


class FullEngine(Engine):
    """Samples by transformers, each row with its prompt's cache; scores by one sequence per row.

    Attributes:
        hidden_tokens: answers of this length, those with a mask, come with their hidden states.
    """

    hidden_tokens = 0

    def generate(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
        delay: bool = False,
        **_,
    ) -> Completions | DelayedCompletions:
        samples, with_hidden = uniforms is not None, max_new_tokens == self.hidden_tokens
        out = self.language_model.generate(
            inputs_embeds=embeds,
            attention_mask=attention_mask.to(embeds.device),
            num_return_sequences=num_generations,
            return_dict_in_generate=True,
            output_logits=samples,
            output_hidden_states=with_hidden,
            **free_sampling(max_new_tokens, self.pad_id, self.temperature if samples else None),
        )
        ids = out.sequences
        assert ids.shape == (len(embeds) * num_generations, max_new_tokens)
        logp = torch.zeros(ids.shape, device=ids.device)
        for t, logits in enumerate(out.logits if samples else ()):
            all_logps = torch.log_softmax(logits.float() / self.temperature, -1)
            logp[:, t] = all_logps.gather(1, ids[:, t, None])[:, 0]
        hidden = embeds.new_zeros(*ids.shape, embeds.shape[-1])
        if with_hidden:
            # Entry 0 is the prompt's forward, so entry t is at token t - 1 as input.
            hidden[:, :-1] = torch.stack([step[-1][:, -1] for step in out.hidden_states[1:]], 1)
        valid = torch.ones(ids.shape, dtype=torch.bool)
        completions = Completions(ids.cpu(), logp, valid, ~valid[:, 0], hidden)
        return DelayedCompletions(completions) if delay else completions

    def score(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        prompt_index: torch.Tensor,
        ids: torch.Tensor,
        valid: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> FullAnswers:
        model, length = self.language_model, embeds.shape[1]
        attention_mask, ids = (t.to(embeds.device) for t in (attention_mask, ids))
        answers = model.get_input_embeddings()(ids).to(embeds.dtype)
        mask = torch.cat([attention_mask, torch.ones_like(ids)], dim=1)
        both, positions = torch.cat([embeds, answers], dim=1), (mask.cumsum(-1) - 1).clamp(min=0)
        hidden = model.model(
            inputs_embeds=both, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[:, length - 1 : -1])
        logp = grpo.token_logps_from_logits(logits, ids, self.temperature)
        entropy = entropies(logits, self.temperature)
        return FullAnswers(logp, entropy, hidden[:, length:])


class FullPolicy(ForcedPolicy):
    """Sa2VA by the `FullEngine`; `roles` say which masks are the teacher's."""

    roles: Roles

    def __init__(self, *parts: Any, **sizes: Any):
        super().__init__(*parts, **sizes)
        model, temperature = self.model.language_model, self.engine.temperature
        self.engine = FullEngine(model, pad_id=self.pad_id, temperature=temperature)
        self.engine.hidden_tokens = self.answer_tokens

    def encode(self, batch: Batch) -> ImagesOfBatch:
        return ImagesOfBatch(**vars(super().encode(batch)), batch=batch)

    def embed(self, features: ImagesOfBatch, prompts: Prompts, num_tokens: int = 0):
        """Return Sa2VA's embeddings, with the tiles of each prompt encoded anew."""
        normalised = [normalise_tiles(tiles) for tiles in features.batch.inputs.tiles]
        tiles = torch.cat([normalised[i] for i in prompts.image_index])
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            vision = self.model.vision_features(tiles.to(self.device))
        each = replace(
            features, vision=vision, tiles=[features.tiles[i] for i in prompts.image_index]
        )
        return super().embed(each, replace(prompts, image_index=range(len(prompts))), num_tokens)

    def score_answers(
        self,
        features: ImagesOfBatch,
        prompts: Prompts,
        ids: torch.Tensor,
        valid: torch.Tensor,
    ) -> FullAnswers:
        with self.autocast():
            embeds, mask, _ = self.embed(features, prompts, ids.shape[1])
            return self.engine.score(embeds, mask, None, ids, valid)

    def decode_masks(
        self, features: ImagesOfBatch, image_index: list[int], embeddings: torch.Tensor
    ):
        """Return Sa2VA's mask logits; the teacher encodes the image of every row for SAM2."""
        if self.roles.active == "teacher":
            pixels = features.batch.inputs.sam_pixels[image_index].to(self.device)
            with torch.autocast(self.device.type, enabled=False):
                features = replace(features, sam=self.model.sam_features(pixels))
            image_index = list(range(len(image_index)))
        return super().decode_masks(features, image_index, embeddings)


def build_trl_style(options: Options) -> Work:
    """Build the work of `options`, done in TRL's way."""
    if options.answer_lengths:
        raise ValueError("--answer_lengths: not of trl, whose generate ends all at one length")
    if options.sizes in SHAPES:
        work = build(options, None, FullPoints, MICRO_BATCH)
    else:
        work = build(options, None, FullPolicy, ["--teacher_answer", "sampled"])
        work.policy.roles = work.state.roles
    work.scores_old = True
    return work
