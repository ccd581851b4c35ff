"""A step of Qwen2.5-VL as TRL would do it: transformers' whole model on each row, image and all.

`generate` of transformers; old and reference log-probs by a full forward each, of a sequence and
an image per row, in micro-batches of TRL's default size; layers are recomputed in the backward. As
in TRL nothing but ids is taken from sampling. SAM2 and the rewards are this project's.

Letters: P prompts, G samples, N = P*G rows, n rows of a forward, L prompt length, T tokens.
"""

from dataclasses import dataclass

import torch

from rl_train import grpo
from rl_train.engine import Completions
from rl_train.policies import sam2_prompting
from rl_train.policies.qwen_vl import QwenImageFeatures
from rl_train.rollout import Batch
from sa2va_hf.batches import Prompts, pad_left
from sa2va_hf.qwen_images import patches
from tools.benchmarks.common import free_sampling
from tools.benchmarks.workload_points import ForcedPoints

MICRO_BATCH = ["--micro_batch_size", "8"]  # TRL's per_device_train_batch_size


@dataclass
class Pixels(QwenImageFeatures):
    """Images, which every forward encodes anew for each of its rows."""

    values: list[torch.Tensor]  # (patches, numbers of one) of each


@dataclass
class FullScores:
    """Scores of n rows by one forward."""

    logp: torch.Tensor  # (n, T)
    entropy: torch.Tensor  # (n, T)


@torch.no_grad()
def entropies(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropy (n, T) of each token's distribution, of logits (n, T, V).

    It computes one row at a time: the probabilities of all rows take many GiB.
    """
    rows = []
    for row in logits:
        logp = (row / temperature).log_softmax(-1)
        rows.append(-(logp.exp() * logp).sum(-1))
    return torch.stack(rows)


class FullPoints(ForcedPoints):
    """Qwen2.5-VL by transformers alone."""

    @torch.no_grad()
    def encode(self, batch: Batch) -> Pixels:
        """Return patches for Qwen2.5-VL, and SAM2's features, which the rewards need."""
        unit = self.preprocessing.factor
        values = [
            patches(pixels.to(self.device), self.preprocessing) for pixels in batch.inputs.pixels
        ]
        sizes = [tuple(pixels.shape[1:]) for pixels in batch.inputs.pixels]  # (H, W)
        grids = [(h // unit, w // unit) for h, w in sizes]
        sam = sam2_prompting.sam_features(self.model.sam, batch.inputs.sam_pixels.to(self.device))
        return Pixels([], grids, sizes, sam, batch.sizes, values)

    def whole(
        self, features: Pixels, prompts: Prompts, answers: torch.Tensor | None = None
    ) -> dict:
        """Return transformers' inputs: prompts, answers (P, T) behind them, an image for each."""
        ids, mask = (t.to(self.device) for t in pad_left(prompts.ids, self.pad_id))
        if answers is not None:
            ids = torch.cat([ids, answers.to(self.device)], dim=1)
            mask = torch.nn.functional.pad(mask, (0, answers.shape[1]), value=1)
        merge = self.preprocessing.merge
        # (time, rows, columns) of an image in patches, of which a token joins merge x merge.
        grids = [[1, *(merge * n for n in features.grids[i])] for i in prompts.image_index]
        return dict(
            input_ids=ids,
            attention_mask=mask,
            pixel_values=torch.cat([features.values[i] for i in prompts.image_index]),
            image_grid_thw=torch.tensor(grids, device=self.device),
            mm_token_type_ids=(ids == self.image_token).int(),
        )

    @torch.no_grad()
    def complete(
        self,
        features: Pixels,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
    ):
        """Sample without regard to `uniforms`, greedily without them; log-probs are 0."""
        temperature = None if uniforms is None else self.engine.temperature
        with self.autocast():
            inputs = self.whole(features, prompts.repeat(num_generations))
            out = self.model.vlm.generate(
                **inputs, **free_sampling(max_new_tokens, self.pad_id, temperature)
            )
        ids = out[:, inputs["input_ids"].shape[1] :]
        assert ids.shape == (len(prompts) * num_generations, max_new_tokens)
        logp, ids = ids.new_zeros(ids.shape).float(), ids.cpu()
        valid = torch.ones_like(ids, dtype=torch.bool)
        completions = Completions(ids, logp, valid, ~valid[:, 0], logp[..., None])
        return completions, [self.completion_text(row) for row in ids.tolist()]

    def score_answers(
        self,
        features: Pixels,
        prompts: Prompts,
        ids: torch.Tensor,
        valid: torch.Tensor,
    ) -> FullScores:
        layers = self.model.vlm.model.language_model.layers
        for layer in layers:  # recomputed in training mode, which here turns no dropout on
            layer.training = self.engine.gradient_checkpointing and torch.is_grad_enabled()
        with self.autocast():
            inputs = self.whole(features, prompts, ids)
            keep = ids.shape[1] + 1
            logits = self.model.vlm(**inputs, use_cache=False, logits_to_keep=keep).logits[:, :-1]
            temperature = self.engine.temperature
            logp = grpo.token_logps_from_logits(logits, ids.to(self.device), temperature)
            entropy = entropies(logits, temperature)
        for layer in layers:
            layer.training = False
        return FullScores(logp, entropy)
