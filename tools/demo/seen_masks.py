"""The task by which a small Sa2VA learns to see from random weights: masks, with codes of words.

    python -m rl_train.sft --tasks tools.demo.seen_masks:SeenMasks --subsets segmented \
        --distractors --truth lab/train/truth.jsonl ..

Of plain examples such a model learns neither half of segmentation, as long as neither the prompt
embedding of [SEG] says what a phrase does nor SAM2's features hold what they would answer it by.
So each is taught apart, by the code of a phrase's words: [SEG] is to give it, and SAM2 to answer
it. No caption is said; the words are those of the phrases that the masks are of. An image teaches
all its regions at once.

Letters: B samples, K regions of an image (padded), N regions of all images, D width of a prompt
embedding, C of the LLM, h w the size of mask logits.
"""

import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rl_train.config.flags import flag
from rl_train.tasks.base import TaskContext
from rl_train.tasks.sft_tasks import Examples, ReferringSegmentation
from tools.experiments.pictures.captions import RELATIONS
from tools.experiments.pictures.dataset import read_truth

if TYPE_CHECKING:
    from rl_train.engine.engine import ScoreOutput
    from rl_train.policies.sa2va import Sa2VAPolicy
    from rl_train.rollout import Batch
    from sa2va_hf.batches import ImageFeatures

BESIDE = re.compile(rf" (?:{'|'.join(RELATIONS)}) the ")


def label_in(caption: str) -> str:
    """Return the label of "owl left of the violin", or of the demo's "A plain red cross."."""
    words = caption.removeprefix("A ").removesuffix(".")
    return BESIDE.split(words, maxsplit=1)[0]


class WordCodes:
    """A fixed random vector for each word; a label's code is the sum of its words' vectors.

    The code is scaled to a mean square of about 1.
    """

    def __init__(self, width: int, device: torch.device | str):
        self.width, self.device, self.vectors, self.known = width, device, {}, {}

    def vector(self, word: str) -> torch.Tensor:
        if word not in self.vectors:
            seed = int.from_bytes(blake2b(word.encode(), digest_size=4).digest(), "big")
            generator = torch.Generator().manual_seed(seed)
            self.vectors[word] = torch.randn(self.width, generator=generator)
        return self.vectors[word]

    def __call__(self, labels: list[str]) -> torch.Tensor:
        """Return (N, width) codes."""
        for label in labels:
            if label not in self.known:
                vectors = torch.stack([self.vector(word) for word in label.split()])
                self.known[label] = vectors.sum(0) / len(vectors) ** 0.5
        return torch.stack([self.known[label] for label in labels]).to(self.device)

    def reading(
        self, vectors: torch.Tensor, labels: list[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read labels off vectors (N, width): return (mean cross-entropy, number right).

        The label read is the one of `labels` whose code has the largest product with the vector.
        """
        choices = list(dict.fromkeys(labels))
        number = {label: i for i, label in enumerate(choices)}
        truth = torch.tensor([number[label] for label in labels], device=vectors.device)
        products = vectors.float() @ self(choices).t() / self.width**0.5  # (N, choices)
        return F.cross_entropy(products, truth), (products.argmax(1) == truth).float().sum()


@dataclass
class ImageRegions:
    """N regions of B images.

    Attributes:
        image: (N,) long, the image of each; place: (N,) long, its number among those of its image.
        masks: (N, H, W) float32.
    """

    image: torch.Tensor
    place: torch.Tensor
    masks: torch.Tensor

    def padded(self, values: torch.Tensor, num_images: int) -> torch.Tensor:
        """Return (B, K, ..) of values (N, ..), 0 where an image has fewer than K regions."""
        shape = (num_images, int(self.place.max()) + 1, *values.shape[1:])
        return values.new_zeros(shape).index_put((self.image, self.place), values)


def regions_of(batch: "Batch", device: torch.device | str) -> ImageRegions:
    """Return all regions of a batch's images, the sample's own first, all at one size."""
    # Moved first: on a busy CPU this took more time than all else of a step.
    groups = [
        torch.cat([own[None], others]).to(device).float()
        for own, others in zip(batch.masks, batch.distractors)
    ]
    size = tuple(min(sides) for sides in zip(*(group.shape[1:] for group in groups)))
    groups = [resized(group, size) for group in groups]
    counts = [len(group) for group in groups]
    image = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)])
    place = torch.tensor([k for n in counts for k in range(n)])
    return ImageRegions(image.to(device), place.to(device), torch.cat(groups))


def resized(masks: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return how much of each cell of a grid `size` masks (N, H, W) cover, (N, h, w)."""
    return F.adaptive_avg_pool2d(masks[:, None], size)[:, 0]


def region_means(features: torch.Tensor, regions: ImageRegions) -> torch.Tensor:
    """Return means (N, C) of features (B, C, g, g) of images, each over a region."""
    weights = resized(regions.masks, features.shape[-2:])
    weights = weights / weights.sum((1, 2), keepdim=True).clamp(min=1e-6)
    padded = regions.padded(weights, len(features))  # (B, K, g, g)
    means = torch.einsum("bcyx,bkyx->bkc", features.float(), padded)
    return means[regions.image, regions.place]


def token_map(policy: "Sa2VAPolicy", features: "ImageFeatures") -> torch.Tensor:
    """Return (B, C, g, g): the LLM's tokens of images, of one tile each."""
    with policy.autocast():
        tokens = policy.model.mlp1(features.vision)
    side = round(tokens.shape[1] ** 0.5)
    return tokens.transpose(1, 2).unflatten(2, (side, side))


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


def alike(labels: list[str], regions: ImageRegions, num_images: int) -> torch.Tensor:
    """Return (N, K) bool: which regions of its image have a region's label, itself among them."""
    number = {label: i for i, label in enumerate(dict.fromkeys(labels), 1)}  # 0: no region
    numbers = torch.tensor([number[label] for label in labels], device=regions.image.device)
    return regions.padded(numbers, num_images)[regions.image] == numbers[:, None]


def choices(
    logits: torch.Tensor, areas: torch.Tensor, same: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a region of an image by mean logit: return (mean cross-entropy, number of hits).

    Args:
        logits: (N, h, w); areas: (N, K, h, w) regions of each one's image, 0 or 1.
        same: of `alike`; others of the same label do not count. place: of `ImageRegions`.
    """
    total = areas.sum((2, 3))
    inside = torch.einsum("nhw,nkhw->nk", logits, areas) / total.clamp(min=1)
    own = F.one_hot(place, areas.shape[1]).bool()
    inside = inside.masked_fill((total == 0) | (same & ~own), -1e4)
    return F.cross_entropy(inside, place), (inside.argmax(1) == place).float().sum()


class SeenMasks(ReferringSegmentation):
    """Both halves of `ReferringSegmentation`, each by the words' codes in place of the other."""

    name = "seen_masks"

    @dataclass(frozen=True)
    class Options(ReferringSegmentation.Options):
        truth: str = flag("", "truth.jsonl of the scenes, which says what regions are called")

    def __init__(self, options: Options, context: TaskContext):
        super().__init__(options, context)
        policy = context.policy
        self.codes = WordCodes(policy.model.config.prompt_size, policy.device)
        self.token_codes = WordCodes(policy.model.config.llm.hidden_size, policy.device)
        # In the order of the part `segmented`: of each region its scene and label.
        named = [r for r in read_truth(Path(options.truth).parent) if not r["unnamed"]]
        self.scenes = [(region["scene"], region["label"]) for region in named]
        self.labels_of: dict[int, list[int]] = {}
        for row, (scene, _) in enumerate(self.scenes):
            self.labels_of.setdefault(scene, []).append(row)

    def labels(self, batch: "Batch") -> list[str]:
        """Return the labels of all regions of a batch's images, in the order of `regions_of`."""
        labels = []
        for index, caption, others in zip(batch.index, batch.captions, batch.distractors):
            scene, own = self.scenes[index]
            rest = [row for row in self.labels_of[scene] if row != index]
            if own != label_in(caption) or len(rest) != len(others):
                raise ValueError("--truth: is not that of the part `segmented`")
            labels += [own, *(self.scenes[row][1] for row in rest)]
        return labels

    def loss_terms(
        self, examples: Examples, features: "ImageFeatures", scores: "ScoreOutput", rows: float
    ):
        policy, batch = self.context.policy, examples.batch
        if batch.distractors is None:
            raise ValueError("--tasks tools.demo.seen_masks:SeenMasks: needs --distractors")
        regions, labels = regions_of(batch, policy.device), self.labels(batch)
        codes = self.codes(labels)  # (N, D)
        prompts = policy.scored_mask_embeddings(scores, examples.ids, examples.valid)  # (B, D)
        is_own = regions.place == 0
        copied = F.mse_loss(prompts, codes[is_own])
        own_labels = [label for label, own in zip(labels, is_own.tolist()) if own]
        copy_loss, said = self.codes.reading(prompts, own_labels)
        with policy.autocast():  # not by chunks, as `policy.decode_masks` would
            logits = policy.model.decode_masks(features.sam, regions.image, codes)
        logits = logits.float()
        targets = (resized(regions.masks, logits.shape[-2:]) > 0.5).float()
        areas = regions.padded(targets, len(batch))[regions.image]  # (N, K, h, w)
        same = alike(labels, regions, len(batch))
        choice, hits = choices(logits, areas, same, regions.place)
        # A label's code is answered by all objects of the label.
        targets = torch.einsum("nk,nkhw->nhw", same.float(), areas).clamp(max=1)
        is_seen = targets.flatten(1).any(1)
        mask = balanced_mask_losses(logits[is_seen], targets[is_seen]).mean()
        coarse = region_means(features.sam[-1], regions)
        reading, held = self.codes.reading(coarse, labels)
        seen_loss, seen = self.token_codes.reading(
            region_means(token_map(policy, features), regions), labels
        )
        near = F.mse_loss(coarse, codes)
        loss = copied + near + mask + choice + copy_loss + reading + seen_loss
        loss = loss * len(batch) / rows
        inside = (logits > 0).float()
        iou = (inside * targets).sum((1, 2)) / (inside + targets).clamp(max=1).sum((1, 2))
        counted = dict(held=held, seen=seen, hits=hits, iou=iou.nansum())
        statistics = {name: (value, len(labels)) for name, value in counted.items()}
        return [loss], statistics | dict(
            hint_loss=loss.detach(),
            copied=(copied.detach() * len(batch), len(batch)),
            said=(said, len(batch)),
        )
