"""Held-out measures of Sa2VA's cycles and directions, greedy and without sampled masks."""

from collections.abc import Sequence

import torch

from rl_train.data.text import phrase
from rl_train.draws import Draws
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.segment_describe import answer, askable, describe, segment_sampled
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.attributes import Vocabulary, attribute_values
from rl_train.rewards.guards import WHOLE, has_digit, is_whole, repeats
from rl_train.rewards.iou import hits
from rl_train.rewards.meteor import tokenize
from rl_train.tasks.best_of import kept, mean_logps

# What is reported. "True caption" is the dataset's, "caption" the model's greedy one of the region.
METRICS = {
    "cycle_iou": "region -> caption -> mask', IoU with the region",
    "cycle_hit": "same: mask' lies on the region, on no other of the image (--other_regions)",
    "best_of_G_cycle_iou": "same, the best of G sampled captions (--best_of)",
    "by_logp_cycle_iou": "same, the likeliest of them (mean log-prob)",
    "sampled_cycle_iou": "same, their mean",
    "cycle_meteor": "true caption -> mask -> caption', METEOR",
    "seg_iou": "mask of the true caption: mean IoU (gIoU)",
    "seg_ciou": "same: summed intersections / summed unions (cIoU)",
    "seg_p50": "same: share with IoU >= 0.5",
    "seg_hit": "same: it lies on the region, on no other of the image (--other_regions)",
    "caption_meteor": "caption of the region, METEOR",
    "best_of_G_meteor": "same, the best of G sampled captions: an oracle (--best_of)",
    "by_cycle_meteor": "same, the one of them of the highest cycle IoU",
    "by_logp_meteor": "same, the likeliest of them",
    "sampled_meteor": "same, their mean",
    "caption_cider": "same, CIDEr-D (0 to 10)",
    "caption_distinct": "different captions / regions",
    "caption_words": "guard: words of the caption",
    "caption_repeats": "guard: captions that say three words twice",
    "caption_digits": "guard: captions with a digit, as coordinates have",
    "mask_whole": f"guard: masks of more than {WHOLE:.0%} of the image",
    "no_seg": "guard: true captions answered without [SEG]",
}
# Whose mean decides, without --best_by, which checkpoint is the best, and which role of it: both
# against the data set's own masks and captions. The cycles are what the rewards raise, also where
# captioner and segmenter agree on a language that nobody else understands.
SCORES = ("seg_iou", "caption_meteor")
# What --best_by may name in their place, beside {attribute}_accuracy: more is better of all, and
# none can be missing at one step and there at another.
CHOOSING = ("seg_iou", "seg_ciou", "seg_p50", "seg_hit", "caption_meteor")
CHOOSING += ("cycle_iou", "cycle_hit", "cycle_meteor")
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


class NotMeasured(ValueError):
    """--best_by names what a run does not measure."""


def score(metrics: dict[str, float], names: Sequence[str] = ()) -> float:
    """The mean of the metrics `names`, by default of SCORES; of points, which describe nothing,
    that of the masks alone.

    Raises NotMeasured if one of `names` is not there, or of SCORES none.
    """
    for name in names:
        if name not in metrics:
            raise NotMeasured(f"--best_by {name}: this run measures {', '.join(metrics)}")
    found = [metrics[name] for name in names or SCORES if name in metrics]
    if not found:
        neither = f"this run measures neither of {', '.join(SCORES)}, but {', '.join(metrics)}"
        raise NotMeasured(f"--best_by is needed to choose checkpoint_best: {neither}")
    return sum(found) / len(found)


def check_choosing(names: Sequence[str], other_regions: bool, attributes: str | None):
    """Raise ValueError unless --best_by may name them, and the flags that they need are given."""
    for name in names:
        of_attribute = name.endswith("_accuracy")
        if name not in CHOOSING and not of_attribute:
            known = f"{', '.join(CHOOSING)}, {{attribute}}_accuracy"
            raise ValueError(f"--best_by {name}: is none of {known}")
        if name.endswith("_hit") and not other_regions:
            raise ValueError(f"--best_by {name}: is measured with --other_regions")
        if of_attribute and not attributes:
            raise ValueError(f"--best_by {name}: is measured with --attributes")


def measure(policy: Sa2VAPolicy, batch, images, max_new_tokens: int) -> dict[str, list]:
    """{column: B values} of one batch: what `evaluation.Measured` is made of, of greedy answers.

    An answer without [SEG] is an empty mask, and an empty caption finds nothing, as in training.
    """
    targets = [mask.to(policy.device) for mask in batch.masks]
    rows = list(range(len(batch)))
    captions = describe(policy, images, rows, targets, max_new_tokens)
    found = measure_captions(policy, batch, images, captions, max_new_tokens)
    masks, seg_rows, _ = answer(policy, images, rows, batch.captions, max_new_tokens)
    replies = describe(policy, images, rows, masks, max_new_tokens)
    with_seg = set(seg_rows.tolist())
    if batch.others is not None:
        found["seg_hit"] = hits(masks, batch.masks, batch.others).tolist()
    return found | dict(
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


def measure_captions(
    policy: Sa2VAPolicy, batch, images, captions: list[str], max_new_tokens: int
) -> dict[str, list]:
    """{"cycle_iou" and, with the other regions, "cycle_hit": B values} of what B captions find."""
    asked = askable(policy, captions, max_new_tokens)
    masks, *_ = answer(policy, images, list(range(len(batch))), asked, max_new_tokens)
    spoken = torch.tensor([bool(phrase(text)) for text in captions])
    targets = [mask.to(policy.device) for mask in batch.masks]
    found = dict(cycle_iou=(mask_iou(masks, targets, 1.0).cpu() * spoken).tolist())
    if batch.others is not None:
        found["cycle_hit"] = (hits(masks, batch.masks, batch.others) * spoken).tolist()
    return found


def measure_samples(
    policy: Sa2VAPolicy, batch, images, max_new_tokens: int, num_generations: int
) -> dict[str, list]:
    """{column: B values} of G sampled captions of each region: what choosing among them gives.

    Of cycle IoU and METEOR, by what is chosen: `best_of_G` = by that measure itself, `by_cycle` =
    by cycle IoU, which needs no true caption and for which best_of_G_cycle_iou stands, `by_logp` =
    by mean log-prob; `sampled` = the mean of all G.

    See `sample_captions`.
    """
    G = num_generations
    captions, iou, logp = sample_captions(policy, batch, images, max_new_tokens, G)
    true = [caption for caption in batch.captions for _ in range(G)]
    truth = meteor(true, captions).view(-1, G)  # (B, G)
    return dict(
        best_of_G_cycle_iou=kept(iou, iou),
        by_logp_cycle_iou=kept(iou, logp),
        sampled_cycle_iou=iou.mean(1).tolist(),
        best_of_G_meteor=kept(truth, truth),
        by_cycle_meteor=kept(truth, iou),
        by_logp_meteor=kept(truth, logp),
        sampled_meteor=truth.mean(1).tolist(),
    )


def sample_captions(
    policy: Sa2VAPolicy, batch, images, max_new_tokens: int, num_generations: int
) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """(N sampled captions, G of each region; their cycle IoU, their mean log-prob (B, G)).

    At the policy's temperature; random numbers follow from the sample's place in the data set, so
    that they are the same for all policies. The masks are those of greedy answers.
    """
    G, prompts = num_generations, policy.describe_prompts(images, range(len(batch)), images.grids)
    uniforms = Draws(0, 0, 0, batch.index, G).uniforms(max_new_tokens)
    done, captions = policy.complete(images, prompts, G, max_new_tokens, uniforms)
    rows = [i for i in range(len(batch)) for _ in range(G)]
    asked = askable(policy, captions, max_new_tokens)
    masks = segment_sampled(policy, images, rows, asked, max_new_tokens)
    targets = [batch.masks[i].to(policy.device) for i in rows]
    spoken = torch.tensor([bool(phrase(text)) for text in captions])
    iou = (mask_iou(masks, targets, 1.0).cpu() * spoken).view(-1, G)
    return captions, iou, mean_logps(done, G)


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
