"""Regions of a data set with the base's features of their images, which are asked many times."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from rl_train.data.loader import eval_loader
from rl_train.distributed.process_group import raise_on_any_rank
from rl_train.evaluation.best_of_n import mean_logps
from rl_train.policies.sa2va_queries import (
    blank_features,
    caption_likelihood,
    describe,
    segment_model_captions,
)
from rl_train.rewards import mask_iou
from rl_train.rewards.iou import best_object_iou, on_target
from rl_train.rollout import Batch
from rl_train.utils.rng import RowRNG
from sa2va_hf.prompts import SEGMENT

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from rl_train.policies.sa2va import Sa2VAPolicy
    from sa2va_hf.batches import ImageFeatures


@dataclass(frozen=True)
class Heard:
    """Measures of the mask that the base finds by a caption of a region."""

    iou: float  # with the region: the cycle IoU, which is loop 1's reward
    found: float  # 1 if the mask lies on the region and on no other object, else 0
    confidence: float  # mean sigmoid inside the mask
    area: float  # fraction of the image
    best_object_iou: float  # IoU with the one of the image's objects that it fits best


class Regions:
    """Regions of a data set as one base sees them: encoded once, asked greedily.

    Letters: n regions, G samples of each.

    Args:
        distractors: read the other objects, without which nothing can be `Heard`.
        wording: of the question for a caption's mask, with {x} for the caption.
    """

    def __init__(
        self,
        policy: "Sa2VAPolicy",
        dataset: "Dataset",
        max_new_tokens: int,
        max_prompt_length: int,
        batch_size: int,
        num_workers: int,
        distractors: bool = True,
        wording: str = SEGMENT,
    ):
        self.policy, self.tokens, self.wording = policy, max_new_tokens, wording
        inputs = policy.preprocessor(max_new_tokens, max_prompt_length)
        loader = eval_loader(dataset, inputs, batch_size, num_workers, distractors=distractors)
        self.parts: list[tuple[Batch, "ImageFeatures"]] = []
        with torch.no_grad():
            for batch in tqdm(loader, desc="regions", leave=False, disable=None):
                self.parts.append((batch, policy.encode(batch)))
        # (part, row in it) of each region
        self.places = [(p, i) for p, (batch, _) in enumerate(self.parts) for i in range(len(batch))]
        self.references = [text for batch, _ in self.parts for text in batch.captions]
        self.masks = [mask for batch, _ in self.parts for mask in batch.masks]
        self.image_ids = [name for batch, _ in self.parts for name in batch.image_ids]
        self.heard: dict[tuple[int, str], Heard] = {}
        self.blank, self.priors = None, {}

    def __len__(self):
        return len(self.places)

    def check(self):
        """Raise an error if an output of the model was not finite."""
        raise_on_any_rank([f"the base: {name}" for name in self.policy.nan_watcher.take().names()])

    def greedy_captions(self) -> list[str]:
        """Return the base's greedy caption of each region."""
        captions = []
        for batch, features in tqdm(self.parts, desc="captions", leave=False, disable=None):
            masks = [mask.to(self.policy.device) for mask in batch.masks]
            captions += describe(self.policy, features, range(len(batch)), masks, self.tokens)
        self.check()
        return captions

    def sampled_captions(self, num_generations: int) -> tuple[list[list[str]], torch.Tensor]:
        """Return (G captions of each region, their mean log-probs (n, G)).

        Random numbers follow from the sample's index in the data set.
        """
        G, captions, logps = num_generations, [], []
        for batch, features in tqdm(self.parts, desc="sampled captions", leave=False, disable=None):
            prompts = self.policy.describe_prompts(
                features, range(len(batch)), features.prompt_masks
            )
            uniforms = RowRNG(0, 0, 0, batch.index, G).uniforms(self.tokens)
            completions, texts = self.policy.complete(features, prompts, G, self.tokens, uniforms)
            captions += [texts[i : i + G] for i in range(0, len(texts), G)]
            logps.append(mean_logps(completions, G))
        self.check()
        return captions, torch.cat(logps)

    def listen(self, queries: Sequence[tuple[int, str]]) -> list[Heard]:
        """Return what the base finds by (region, caption) pairs, by its own greedy answers.

        An empty caption finds nothing. Each pair is asked once.
        """
        new = dict.fromkeys(query for query in queries if query not in self.heard)
        rows_of = defaultdict(list)  # {part: queries}
        for row, text in new:
            rows_of[self.places[row][0]].append((row, text))
        quiet = True if len(new) < 256 else None  # None: unless on a terminal
        bar = tqdm(rows_of.items(), desc="listener", leave=False, disable=quiet)
        for part, pairs in bar:
            self._ask(part, pairs)
        self.check()
        return [self.heard[query] for query in queries]

    @torch.no_grad()
    def _ask(self, part: int, pairs: list[tuple[int, str]]):
        batch, features = self.parts[part]
        index = [self.places[row][1] for row, _ in pairs]
        texts = [text for _, text in pairs]
        segmented = segment_model_captions(self.policy, features, index, texts, self.tokens)
        masks, confidence = segmented.masks, segmented.confidence
        targets = [batch.masks[i].to(self.policy.device) for i in index]
        ious = mask_iou(masks, targets).tolist()
        # The other objects are on the CPU, as the data set's masks are.
        others, own = ([values[i] for i in index] for values in (batch.distractors, batch.masks))
        is_on_target = on_target(masks, own, others).tolist()
        areas = [mask.float().mean().item() for mask in masks]
        object_ious = best_object_iou(masks, own, others).tolist()
        measures = zip(pairs, ious, is_on_target, confidence, areas, object_ious, strict=True)
        self.heard |= {pair: Heard(*values) for pair, *values in measures}

    def blank_features(self) -> "ImageFeatures":
        """Return the features of a grey image, made once."""
        if self.blank is None:
            self.blank = blank_features(self.policy, self.tokens)
        return self.blank

    def likelihood_without_image(self, texts: Sequence[str]) -> list[float]:
        """Return the base's likelihood per token of each text as the caption of a grey image."""
        blank = self.blank_features()
        new = [text for text in dict.fromkeys(texts) if text not in self.priors]
        whole = torch.ones(blank.sizes[0], dtype=torch.bool, device=self.policy.device)
        # A model that knows little also samples the image's token, which would ask for features.
        answers = [text.replace(self.policy.prompts.image_token, "") for text in new]
        values = caption_likelihood(
            self.policy, blank, [0] * len(new), [whole] * len(new), answers, self.tokens
        )
        self.priors |= zip(new, values.tolist())
        return [self.priors[text] for text in texts]
