"""Supervised tasks by which the demo's Sa2VA begins from random weights: examples with hints.

Of plain examples such a model learns captions, but hardly which object a phrase's mask is of, as
long as neither the prompt embedding of [SEG] says what the phrase does nor SAM2's features hold
what they would answer it by. So each is taught apart, by a code that a caption's values have.

    python -m rl_train.sft --tasks tools.demo.hints:HintedCaptions ..

Letters: B samples, D width of a prompt embedding, C of the LLM, h w the size of mask logits.
"""

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rl_train.rewards import mask_iou
from rl_train.tasks.base import TaskContext
from rl_train.tasks.sft_tasks import Examples, ReferringSegmentation, RegionCaptions
from sa2va_hf.losses import resize_masks
from tools.demo.scenes import ATTRIBUTES

if TYPE_CHECKING:
    from rl_train.engine.engine import ScoreOutput
    from sa2va_hf.batches import ImageFeatures


VALUES = [value for values in ATTRIBUTES.values() for value in values]
VALUE = re.compile(rf"\b({'|'.join(VALUES)})\b")


class Codes:
    """A fixed vector for each value of each attribute, orthogonal to all others.

    A caption's code is the sum of its values', with a mean square of 1.

    Raises:
        ValueError: there are more values than dimensions.
    """

    def __init__(self, width: int, device: torch.device | str):
        if width < len(VALUES):
            raise ValueError(f"{len(VALUES)} values do not fit {width} dimensions")
        random = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
        self.vectors = width**0.5 * torch.linalg.qr(random).Q[: len(VALUES)].to(device)

    def values(self, captions: list[str]) -> torch.Tensor:
        """Return (B, attributes) long: the index in VALUES of each value that a caption states."""
        rows = [[VALUES.index(value) for value in VALUE.findall(caption)] for caption in captions]
        if len({len(row) for row in rows}) != 1 or not rows[0]:
            raise ValueError(
                "--tasks tools.demo.hints: captions must say a value of each attribute, as the "
                "demo's do"
            )
        return torch.tensor(rows, device=self.vectors.device)

    def __call__(self, captions: list[str]) -> torch.Tensor:
        """Return (B, width) codes of captions, each about as many attributes."""
        values = self.values(captions)
        return self.vectors[values].sum(1) / values.shape[1] ** 0.5

    def reading(
        self, vectors: torch.Tensor, captions: list[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read captions off vectors (B, width): return (sum of cross-entropies, number right).

        The values read are those whose vectors have the largest products with it.
        """
        true_values = self.values(captions)
        products = vectors.float() @ self.vectors.t() / self.vectors.shape[1] ** 0.5  # (B, values)
        read = products.topk(true_values.shape[1]).indices
        right = (read[:, :, None] == true_values[:, None]).any(1)  # (B, attributes)
        losses = -products.log_softmax(1).gather(1, true_values).mean(1)
        return losses.sum(), right.float().mean(1).sum()


def region_means(features: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """Return means (B, C) of features (B, C, g, g), weighted by regions (B, g, g)."""
    weights = regions / regions.sum((1, 2), keepdim=True)
    return torch.einsum("bcyx,byx->bc", features.float(), weights)


class HintedCaptions(RegionCaptions):
    """`RegionCaptions`, of which the image tokens of a region are made to hold the values."""

    def __init__(self, options: Any, context: TaskContext):
        super().__init__(options, context)
        policy = context.policy
        self.codes = Codes(policy.model.config.llm.hidden_size, policy.device)

    def loss_terms(
        self, examples: Examples, features: "ImageFeatures", scores: "ScoreOutput", rows: float
    ):
        policy, grids = (
            self.context.policy,
            features.prompt_masks.to(features.vision.device),
        )  # (B, g, g)
        with policy.autocast():
            tokens = policy.model.mlp1(features.vision)  # one tile of each image
        cells = tokens.transpose(1, 2).unflatten(2, grids.shape[1:])
        means = region_means(cells, grids.float())
        reading, right = self.codes.reading(means, examples.batch.captions)
        loss = reading / rows
        return [loss], dict(hint_loss=loss.detach(), held=(right, len(grids)))


class HintedMasks(ReferringSegmentation):
    """The two halves of `ReferringSegmentation`, each by a caption's code in place of the other.

    [SEG] is to give the code, and SAM2 to answer it: by the region's mask, rather than that of
    another one of its image, and with features that hold the values.
    """

    name = "hinted_masks"

    def __init__(self, options: Any, context: TaskContext):
        super().__init__(options, context)
        self.codes = Codes(context.policy.model.config.prompt_size, context.policy.device)

    def loss_terms(
        self, examples: Examples, features: "ImageFeatures", scores: "ScoreOutput", rows: float
    ):
        policy, batch = self.context.policy, examples.batch
        if batch.distractors is None:
            raise ValueError("--tasks tools.demo.hints:HintedMasks: needs --distractors")
        codes = self.codes(batch.captions)  # (B, D)
        prompts = policy.scored_mask_embeddings(scores, examples.ids, examples.valid)
        copied = F.mse_loss(prompts, codes, reduction="none").mean(1)
        logits = policy.decode_masks(features, range(len(batch)), codes)  # (B, h, w)
        targets = resize_masks(batch.masks, logits)
        coarse = features.sam[-1]
        # SAM2's coarsest features, averaged over the region: they are to hold its values.
        means = region_means(coarse, F.adaptive_avg_pool2d(targets, coarse.shape[-2:]))
        reading, right = self.codes.reading(means, batch.captions)
        near = F.mse_loss(means, codes, reduction="none").mean(1)
        mask = balanced_mask_losses(logits, targets)
        others = [resize_masks(list(masks), logits) for masks in batch.distractors]
        choice, hits = choices(logits, targets, others)
        loss = ((copied + near + mask + choice).sum() + reading) / rows
        sums = dict(held=right, hits=hits.sum(), iou=mask_iou(logits > 0, targets > 0, 1.0).sum())
        fractions = {name: (value, len(codes)) for name, value in sums.items()}
        return [loss], dict(
            hint_loss=loss.detach(), copied=(copied.detach().sum(), len(codes))
        ) | fractions


def balanced_mask_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return (B,) BCE with the region's and the background's pixels at equal weight, plus 2 Dice.

    From random weights the usual loss would settle on empty masks, since regions cover a few per
    cent of an image.

    Args:
        logits: (B, h, w); targets: (B, h, w) float32, 0 or 1, none empty.
    """
    logits, target = logits.flatten(1), targets.flatten(1)
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    inside = (bce * target).sum(1) / target.sum(1)
    outside = (bce * (1 - target)).sum(1) / (1 - target).sum(1)
    probability = logits.sigmoid()
    dice = 1 - (2 * (probability * target).sum(1) + 1) / (probability.sum(1) + target.sum(1) + 1)
    return inside + outside + 2 * dice


def choices(
    logits: torch.Tensor, targets: torch.Tensor, others: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose among an image's regions by mean logit: return cross-entropies (B,) and hits (B,).

    Args:
        logits: (B, h, w); targets: (B, h, w); others: B (K, h, w) masks of an image's others.
    """
    losses, hits = [], []
    for logit, target, distractors in zip(logits, targets, others, strict=True):
        areas = torch.cat([target[None], distractors])  # (1 + K, h, w)
        inside = (areas * logit).sum((1, 2)) / areas.sum((1, 2)).clamp(min=1)
        losses.append(-inside.log_softmax(0)[0])
        hits.append(inside.argmax() == 0)
    return torch.stack(losses), torch.stack(hits)
