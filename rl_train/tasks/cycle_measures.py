"""Held-out measures of Sa2VA's cycles and directions, greedy and without sampled masks."""

import torch

from rl_train.data.text import phrase
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.segment_describe import answer, askable, describe
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.guards import WHOLE, has_digit, is_whole, repeats
from rl_train.rewards.meteor import tokenize

# What is reported. "True caption" is the dataset's, "caption" the model's greedy one of the region.
METRICS = {
    "cycle_iou": "region -> caption -> mask', IoU with the region",
    "cycle_meteor": "true caption -> mask -> caption', METEOR",
    "seg_iou": "mask of the true caption: mean IoU (gIoU)",
    "seg_ciou": "same: summed intersections / summed unions (cIoU)",
    "seg_p50": "same: share with IoU >= 0.5",
    "caption_meteor": "caption of the region, METEOR",
    "caption_cider": "same, CIDEr-D (0 to 10)",
    "caption_words": "guard: words of the caption",
    "caption_repeats": "guard: captions that say three words twice",
    "caption_digits": "guard: captions with a digit, as coordinates have",
    "mask_whole": f"guard: masks of more than {WHOLE:.0%} of the image",
    "no_seg": "guard: true captions answered without [SEG]",
}
# Whose mean decides which checkpoint is the best, and which role of it: both against the data set's
# own masks and captions. The cycles are what the rewards raise, also where captioner and segmenter
# agree on a language that nobody else understands.
SCORES = ("seg_iou", "caption_meteor")
# Measures behind a metric of another name.
PARTS = {"seg_ciou": ("seg_intersection", "seg_union"), "seg_p50": ("seg_iou",)}


def score(metrics: dict[str, float]) -> float:
    """The mean of SCORES."""
    return sum(metrics[name] for name in SCORES) / len(SCORES)


def measure(policy: Sa2VAPolicy, batch, images, max_new_tokens: int) -> dict[str, list]:
    """{column: B values} of one batch: what `evaluation.Measured` is made of.

    An answer without [SEG] is an empty mask, and an empty caption finds nothing, as in training.
    """
    targets = [mask.to(policy.device) for mask in batch.masks]
    rows = list(range(len(batch)))
    captions = describe(policy, images, rows, targets, max_new_tokens)
    asked = askable(policy, captions, max_new_tokens)
    cycle_masks, *_ = answer(policy, images, rows, asked, max_new_tokens)
    cycle = mask_iou(cycle_masks, targets, 1.0).cpu()
    masks, seg_rows, _ = answer(policy, images, rows, batch.captions, max_new_tokens)
    replies = describe(policy, images, rows, masks, max_new_tokens)
    with_seg = set(seg_rows.tolist())
    return dict(
        cycle_iou=(cycle * torch.tensor([bool(phrase(text)) for text in captions])).tolist(),
        cycle_meteor=meteor(batch.captions, replies).tolist(),
        seg_iou=mask_iou(masks, targets, 1.0).tolist(),
        seg_intersection=[(mask & target).sum().item() for mask, target in zip(masks, targets)],
        seg_union=[(mask | target).sum().item() for mask, target in zip(masks, targets)],
        caption_meteor=meteor(batch.captions, captions).tolist(),
        caption_words=[len(tokenize(text)) for text in captions],
        caption_repeats=[repeats(text) for text in captions],
        caption_digits=[has_digit(text) for text in captions],
        mask_whole=[is_whole(mask) for mask in masks],
        no_seg=[row not in with_seg for row in rows],
        image_id=batch.image_ids,
        reference=batch.captions,
        caption=captions,
        index=batch.index,
    )
