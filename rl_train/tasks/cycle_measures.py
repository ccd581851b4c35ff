"""Held-out measures of Sa2VA's cycles and directions, greedy and without sampled masks."""

import torch

from rl_train.data.text import phrase
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.segment_describe import answer, askable, describe
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.attributes import Vocabulary, attribute_values
from rl_train.rewards.guards import WHOLE, has_digit, is_whole, repeats
from rl_train.rewards.iou import hits
from rl_train.rewards.meteor import tokenize

# What is reported. "True caption" is the dataset's, "caption" the model's greedy one of the region.
METRICS = {
    "cycle_iou": "region -> caption -> mask', IoU with the region",
    "cycle_hit": "same: mask' lies on the region, on no other of the image (--other_regions)",
    "cycle_meteor": "true caption -> mask -> caption', METEOR",
    "seg_iou": "mask of the true caption: mean IoU (gIoU)",
    "seg_ciou": "same: summed intersections / summed unions (cIoU)",
    "seg_p50": "same: share with IoU >= 0.5",
    "seg_hit": "same: it lies on the region, on no other of the image (--other_regions)",
    "caption_meteor": "caption of the region, METEOR",
    "caption_cider": "same, CIDEr-D (0 to 10)",
    "caption_distinct": "different captions / regions",
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
# Measures behind a metric of another name: one, or two of which the sums make a ratio.
PARTS = {"seg_ciou": ("seg_intersection", "seg_union"), "seg_p50": ("seg_iou",)}
# The same of each attribute of --attributes, for {attribute}_{name}: see `attribute_values`.
ATTRIBUTE_PARTS = {
    "accuracy": ("right", "known"),
    "precision": ("right", "said"),
    "stated": ("said", "known"),
}
ATTRIBUTE_METRICS = {
    "accuracy": "captions that state the true {}, of all whose true one states one",
    "precision": "same, of those that state any {}",
    "stated": "captions that state any {}",
}
# Of n samples together: samples drawn from them again have fewer different captions.
WITHOUT_INTERVAL = ("caption_distinct",)


def metrics_of(values: dict) -> dict[str, str]:
    """{metric: its description} of all that the measures among `values` make."""
    attributes = [name.removesuffix("_known") for name in values if name.endswith("_known")]
    known = METRICS | {
        f"{attribute}_{name}": text.format(attribute)
        for attribute in attributes
        for name, text in ATTRIBUTE_METRICS.items()
    }
    return {metric: text for metric, text in known.items() if set(parts_of(metric)) <= set(values)}


def parts_of(metric: str) -> tuple[str, ...]:
    """The names of the measures behind a metric."""
    attribute, _, name = metric.rpartition("_")
    if name in ATTRIBUTE_PARTS:
        return tuple(f"{attribute}_{part}" for part in ATTRIBUTE_PARTS[name])
    return PARTS.get(metric, (metric,))


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
    spoken = torch.tensor([bool(phrase(text)) for text in captions])
    masks, seg_rows, _ = answer(policy, images, rows, batch.captions, max_new_tokens)
    replies = describe(policy, images, rows, masks, max_new_tokens)
    with_seg = set(seg_rows.tolist())
    on_target = {}
    if batch.others is not None:
        regions = batch.masks, batch.others
        on_target["cycle_hit"] = (hits(cycle_masks, *regions) * spoken).tolist()
        on_target["seg_hit"] = hits(masks, *regions).tolist()
    return on_target | dict(
        cycle_iou=(mask_iou(cycle_masks, targets, 1.0).cpu() * spoken).tolist(),
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


def measure_texts(
    references: list[str], captions: list[str], vocabulary: Vocabulary
) -> dict[str, torch.Tensor]:
    """{measure: (n,) float64} of n captions together: those of attributes, and whether a caption
    is the first of its words.
    """
    first = {text: row for row, text in reversed(list(enumerate(captions)))}
    distinct = [first[text] == row for row, text in enumerate(captions)]
    return dict(caption_distinct=torch.tensor(distinct, dtype=torch.float64)) | attribute_values(
        references, captions, vocabulary
    )
