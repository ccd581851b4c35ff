"""The same step as TRL would do it: a policy and an engine that `rl_train.train.train` can also run.

`generate` of transformers; old and reference log-probs by a full forward each, of a sequence per
row, with the vision encoder and the logits as one tensor; a teacher in batches that answers for
itself and encodes the image of every row.

Letters: P prompts, G samples each, N = P*G rows, n rows of a forward, L prompt length, T completion
tokens, C width.
"""

from dataclasses import dataclass, replace

import torch

from rl_train import grpo
from rl_train.engine import Completions, Engine
from rl_train.objective import micro_batches
from rl_train.policies.sa2va import Images, Prompts, Scores
from tools.benchmarks.work import ForcedPolicy, Loop1, Work, build


@dataclass
class ImagesWithPixels(Images):
    """Features of images, whose vision every forward computes anew."""

    pixel_values: list[torch.Tensor]  # (t, 3, S, S) tiles of each
    sam_pixels: torch.Tensor


@dataclass
class FullAnswers:
    """What one forward says of n rows."""

    logp: torch.Tensor  # (n, T)
    entropy: torch.Tensor  # (n, T)
    hidden: torch.Tensor  # (n, T, C) at each token as input

    def hidden_of(self, tokens) -> torch.Tensor:
        """(m, C) hidden states of tokens (n, T) bool."""
        return self.hidden[tokens]


class FullEngine(Engine):
    """Samples by transformers, each row with its prompt's cache; scores by one sequence per row.

    Attributes:
        hidden_tokens: answers of this length, those with a mask, come with their hidden states.
        all_logits: compute those of the whole sequence, as TRL does without `logits_to_keep`.
    """

    hidden_tokens, all_logits = 0, False

    def generate(
        self,
        embeds,
        attention_mask,
        *,
        num_generations,
        max_new_tokens,
        stop,
        uniforms=None,
        position_ids=None,
        shared_prefix_lengths=None,
    ) -> Completions:
        drawn, with_hidden = uniforms is not None, max_new_tokens == self.hidden_tokens
        how = dict(top_k=0, top_p=1.0, temperature=self.temperature) if drawn else {}
        out = self.language_model.generate(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            num_return_sequences=num_generations,
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            pad_token_id=self.pad_id,
            return_dict_in_generate=True,
            output_logits=drawn,
            output_hidden_states=with_hidden,
            do_sample=drawn,
            **how,
        )
        ids = out.sequences
        assert ids.shape == (len(embeds) * num_generations, max_new_tokens)
        logp = torch.zeros(ids.shape, device=ids.device)
        for t, logits in enumerate(out.logits if drawn else ()):
            all_logps = torch.log_softmax(logits.float() / self.temperature, -1)
            logp[:, t] = all_logps.gather(1, ids[:, t, None])[:, 0]
        hidden = embeds.new_zeros(*ids.shape, embeds.shape[-1])
        if with_hidden:
            hidden[:, :-1] = torch.stack([step[-1][:, -1] for step in out.hidden_states[1:]], 1)
        valid = torch.ones_like(ids, dtype=torch.bool)
        return Completions(ids, logp, valid, ~valid[:, 0], hidden)

    def score(self, embeds, attention_mask, prompt, ids, valid, position_ids=None) -> FullAnswers:
        model, length = self.language_model, embeds.shape[1]
        answers = model.get_input_embeddings()(ids).to(embeds.dtype)
        mask = torch.cat([attention_mask, torch.ones_like(ids)], dim=1)
        hidden = model.model(
            inputs_embeds=torch.cat([embeds, answers], dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        if self.all_logits:
            logits = model.lm_head(hidden)[:, length - 1 : -1]
        else:
            logits = model.lm_head(hidden[:, length - 1 : -1])
        logp = grpo.token_logps_from_logits(logits, ids, self.temperature)
        with torch.no_grad():
            entropy = grpo.entropy_from_logits(logits, self.temperature)
        return FullAnswers(logp, entropy, hidden[:, length:])


class FullPolicy(ForcedPolicy):
    """Sa2VA by the `FullEngine`. Old log-probs are a phase of their own."""

    rows_at_once = 32

    def __init__(self, *parts, **how):
        super().__init__(*parts, **how)
        model, temperature = self.model.language_model, self.engine.temperature
        self.engine = FullEngine(model, pad_id=self.pad_id, temperature=temperature)
        self.engine.hidden_tokens = self.answer_tokens

    def encode(self, batch) -> ImagesWithPixels:
        pixels = batch.inputs.pixel_values, batch.inputs.sam_pixels
        return ImagesWithPixels(*vars(super().encode(batch)).values(), *pixels)

    def embed(self, images: ImagesWithPixels, prompts: Prompts, num_tokens: int = 0):
        """As Sa2VA's, after the vision encoder on the tiles of each prompt."""
        tiles = [images.pixel_values[i] for i in prompts.image]
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            vision = self.model.vision_features(torch.cat(tiles).to(self.device))
        each = replace(images, vision=vision, tiles=[len(t) for t in tiles])
        return super().embed(each, replace(prompts, image=range(len(tiles))), num_tokens)

    def sample(self, *inputs):
        rollout = super().sample(*inputs)
        self.lap("rollout")
        parts = micro_batches(len(rollout), self.rows_at_once)
        rollout.logp = torch.cat([self.score(rollout, rows).logp for rows in parts])
        self.lap("old")
        return rollout

    def score_answers(self, images, prompts: Prompts, ids, valid) -> Scores:
        with self.autocast():
            embeds, mask = self.embed(images, prompts, ids.shape[1])
            return Scores(self.engine.score(embeds, mask, None, ids, valid))


class FullLoop1(Loop1):
    """Loop 1, whose teacher answers for itself, by SAM2 features of every row's own."""

    def __init__(self, options, context):
        super().__init__(replace(options, teacher_answer="sampled"), context)

    def judge(self, rollout):
        images, rows = rollout.features, rollout.sample_of_row
        model = self.context.policy.model
        with torch.no_grad():
            sam = model.sam_features(images.sam_pixels[rows].to(model.device))
        each = ImagesWithPixels(
            images.vision[rows],
            [images.tiles[i] for i in rows],
            sam,
            [images.sizes[i] for i in rows],
            images.grids[rows],
            [images.pixel_values[i] for i in rows],
            images.sam_pixels[rows],
        )
        prompts = replace(rollout.prompts, image=list(range(len(rows))))
        return super().judge(replace(rollout, features=each, prompts=prompts))


def build_full(options, ranks) -> Work:
    """The work of `options`, done in TRL's way."""
    work = build(options, ranks, FullPolicy, FullLoop1)
    work.policy.engine.all_logits = options.trl_logits == "all"
    work.policy.rows_at_once = work.parts.config.optim.micro_batch_size
    return work
