"""Evaluation metrics of Sa2VA's two loops and directions: greedy answers, no latent noise."""

from collections.abc import Collection, Sequence

import torch

from rl_train.evaluation.best_of_n import mean_logps, pick_best
from rl_train.evaluation.mask_columns import mask_columns
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import (
    describe,
    row_masks,
    segment_by_own_answer,
    segment_model_captions,
)
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.attributes import AttributePhrases, attribute_values
from rl_train.rewards.hacking_signals import WHOLE, has_digit, is_whole, repeats
from rl_train.rewards.iou import on_target
from rl_train.rewards.meteor import tokenize
from rl_train.rewards.objects import match
from rl_train.rollout import Batch
from rl_train.utils.io import UserFault
from rl_train.utils.rng import RowRNG
from sa2va_hf.batches import ImageFeatures
from sa2va_hf.prompts import SEGMENT

# What is reported, by the loop that trains it. "True caption" is the dataset's, "caption" the
# model's greedy one of the region. Each text stands alone: a table may leave rows out.
LOOP1_METRICS = {
    "cycle_iou": "IoU of a region with the mask of its caption",
    "cycle_on_target": "masks of captions that lie on the region, on no other (--distractors)",
    "best_of_G_cycle_iou": "cycle_iou of the best of G sampled captions (--best_of)",
    "by_logp_cycle_iou": "cycle_iou of the likeliest of G sampled captions (mean log-prob)",
    "sampled_cycle_iou": "mean cycle_iou of G sampled captions",
    "caption_meteor": "METEOR of the caption with the true caption",
    "best_of_G_meteor": "caption_meteor of the best of G sampled captions: an oracle (--best_of)",
    "by_cycle_meteor": "caption_meteor of the one of G sampled captions with the best cycle_iou",
    "by_logp_meteor": "caption_meteor of the likeliest of G sampled captions",
    "sampled_meteor": "mean caption_meteor of G sampled captions",
    "caption_cider": "CIDEr-D of the caption (0 to 10)",
    "caption_distinct": "different captions / regions",
    "caption_words": "words of a caption",
    "caption_repeats": "captions that say three words twice (a sign of reward hacking)",
    "caption_digits": "captions with a digit, as coordinates have (a sign of reward hacking)",
}
LOOP2_METRICS = {
    "seg_iou": "IoU of a true caption's mask with its region, mean over regions (gIoU)",
    "seg_ciou": "summed intersections / summed unions of these masks and regions (cIoU)",
    "seg_p50": "true captions whose mask has an IoU of at least 0.5",
    "seg_on_target": "true captions whose mask lies on the region, on no other (--distractors)",
    "cycle_meteor": "METEOR of a true caption with the caption of its mask",
    "mask_whole": f"masks of more than {WHOLE:.0%} of the image (a sign of reward hacking)",
    "no_seg": "true captions answered without [SEG], so without a mask",
}
METRICS = LOOP1_METRICS | LOOP2_METRICS
# Their mean decides which checkpoint, and which of its roles, is the best: both compare with the
# data set's own masks and captions. Cycle metrics are what the rewards raise, also if captioner and
# segmenter agree on a language that nobody else understands.
DEFAULT_METRICS_FOR_BEST = ("seg_iou", "caption_meteor", "matched_box_iou")
# Columns of the metrics that have another name than their column: one, or numerator and denominator
# of a ratio of sums.
METRIC_COLUMNS = {"seg_ciou": ("seg_intersection", "seg_union"), "seg_p50": ("seg_iou",)}
# The same for {attribute}_{name}, of each attribute of --attributes: see `attribute_values`.
ATTRIBUTE_COLUMNS = {
    "accuracy": ("right", "known"),
    "precision": ("right", "said"),
    "stated": ("said", "known"),
}
ATTRIBUTE_METRICS = {
    "accuracy": "captions that state the true {0}, of all whose true caption states a {0}",
    "precision": "captions that state the true {0}, of those that state any {0}",
    "stated": "captions that state any {0}, of all whose true caption states one",
}
# A resample of the captions has fewer different ones, so a bootstrap would be biased.
# AP50 is of all samples together.
WITHOUT_INTERVAL = ("caption_distinct", "gcg_ap50")


def selection_score(metrics: dict[str, float], names: Sequence[str] = ()) -> float:
    """Return the mean of the metrics `names`.

    The default is those of DEFAULT_METRICS_FOR_BEST that were measured. Raises UserFault if one of
    `names`, or all of the default, was not measured.
    """
    chosen = metrics_for_best(metrics, names)
    return sum(metrics[name] for name in chosen) / len(chosen)


def metrics_for_best(metrics: Collection[str], names: Sequence[str] = ()) -> list[str]:
    """Return the names of the metrics whose mean is the `selection_score`, which see."""
    missing = [name for name in names if name not in metrics]
    chosen = [name for name in names or DEFAULT_METRICS_FOR_BEST if name in metrics]
    if missing or not chosen:
        words = ", ".join(missing) or "is needed to choose checkpoint_best"
        raise UserFault(f"--metric_for_best_model {words}: this run measures {', '.join(metrics)}")
    return chosen


def measure(
    policy: Sa2VAPolicy, batch: Batch, features: ImageFeatures, max_new_tokens: int
) -> dict[str, list]:
    """Measure greedy answers of one batch: {column: B values} of an `evaluate.EvalResult`.

    An answer without [SEG] is an empty mask, and an empty caption finds nothing, as in training. Of
    captions that may name several regions or none the masks alone are measured: there is no region
    to describe.
    """
    if batch.objects is not None:
        return measure_phrases(policy, batch, features, max_new_tokens)
    targets = [mask.to(policy.device) for mask in batch.masks]
    rows = list(range(len(batch)))
    # Both directions, greedily: region -> caption -> mask, caption -> mask -> caption.
    captions = describe(policy, features, rows, targets, max_new_tokens)
    columns = measure_captions(policy, batch, features, captions, max_new_tokens)
    segmented, seg_rows, _ = segment_by_own_answer(
        policy, features, rows, batch.captions, max_new_tokens
    )
    masks = segmented.masks
    replies = describe(policy, features, rows, masks, max_new_tokens)
    with_seg = set(seg_rows.tolist())
    if batch.distractors is not None:
        columns["seg_on_target"] = on_target(masks, batch.masks, batch.distractors).tolist()
    return dict(
        **columns,
        **mask_columns(masks, targets, batch),
        cycle_meteor=meteor(batch.captions, replies).tolist(),
        caption_meteor=meteor(batch.captions, captions).tolist(),
        caption_words=[len(tokenize(text)) for text in captions],
        caption_repeats=[repeats(text) for text in captions],
        caption_digits=[has_digit(text) for text in captions],
        mask_whole=[is_whole(mask) for mask in masks],
        no_seg=[row not in with_seg for row in rows],
        caption=captions,
    )


def measure_phrases(
    policy: Sa2VAPolicy,
    batch: Batch,
    features: ImageFeatures,
    max_new_tokens: int,
    wording: str = SEGMENT,
) -> dict[str, list]:
    """Measure the masks of true captions alone, by greedy answers; see `measure`.

    Args: wording: of the question, with {x} for the phrase.
    """
    rows, wordings = list(range(len(batch))), [wording] * len(batch)
    prompts = policy.segment_prompts(features, rows, batch.captions, wordings)
    completions, texts = policy.complete(features, prompts, 1, max_new_tokens)
    seg_rows, embeddings = policy.mask_embeddings(completions)
    seg_rows = seg_rows.tolist()
    one_by_one = batch.objects is not None
    decoded = row_masks(policy, features, prompts.image_index, seg_rows, embeddings, one_by_one)
    masks, rows_with_seg = decoded.masks, set(seg_rows)
    targets = [mask.to(policy.device) for mask in batch.masks]
    columns = mask_columns(masks, targets, batch)
    if one_by_one:
        pairs = zip(decoded.seg_masks, batch.objects, strict=True)
        matchings = [match(seg_masks, objects.to(policy.device)) for seg_masks, objects in pairs]
        columns["seg_matched"] = [
            float(not mask.any()) if is_no_target else matching.reward
            for mask, is_no_target, matching in zip(masks, batch.no_target, matchings)
        ]
    if batch.distractors is not None:
        columns["seg_on_target"] = on_target(masks, batch.masks, batch.distractors).tolist()
    return columns | dict(
        mask_whole=[is_whole(mask) for mask in masks],
        no_seg=[row not in rows_with_seg for row in range(len(batch))],
        caption=texts,
    )


def measure_captions(
    policy: Sa2VAPolicy,
    batch: Batch,
    features: ImageFeatures,
    captions: list[str],
    max_new_tokens: int,
) -> dict[str, list]:
    """Measure the masks that B captions are answered with.

    Returns:
        {column: B values} of "cycle_iou" and, if the other regions are known, "cycle_on_target".
    """
    rows = range(len(batch))
    masks = segment_model_captions(policy, features, rows, captions, max_new_tokens).masks
    targets = [mask.to(policy.device) for mask in batch.masks]
    columns = dict(cycle_iou=mask_iou(masks, targets).tolist())
    if batch.distractors is not None:
        columns["cycle_on_target"] = on_target(masks, batch.masks, batch.distractors).tolist()
    return columns


def measure_samples(
    policy: Sa2VAPolicy,
    batch: Batch,
    features: ImageFeatures,
    max_new_tokens: int,
    num_generations: int,
) -> dict[str, list]:
    """Measure what choosing among G sampled captions of each region gives: {column: B values}.

    Columns are cycle IoU and METEOR of the chosen caption. `best_of_G` chooses by the metric
    itself, `by_cycle` by cycle IoU, which needs no true caption, and `by_logp` by mean log-prob;
    `sampled` is the mean of all G. See `sample_captions`.

    Raises ValueError for samples whose captions may name several regions or none.
    """
    if batch.objects is not None:
        raise ValueError("--best_of: of captions of a region, and these phrases may name none")
    G = num_generations
    captions, iou, logp = sample_captions(policy, batch, features, max_new_tokens, G)
    true = [caption for caption in batch.captions for _ in range(G)]
    caption_meteor = meteor(true, captions).view(-1, G)  # (B, G)
    return dict(
        best_of_G_cycle_iou=pick_best(iou, iou),
        by_logp_cycle_iou=pick_best(iou, logp),
        sampled_cycle_iou=iou.mean(1).tolist(),
        best_of_G_meteor=pick_best(caption_meteor, caption_meteor),
        by_cycle_meteor=pick_best(caption_meteor, iou),
        by_logp_meteor=pick_best(caption_meteor, logp),
        sampled_meteor=caption_meteor.mean(1).tolist(),
    )


def sample_captions(
    policy: Sa2VAPolicy,
    batch: Batch,
    features: ImageFeatures,
    max_new_tokens: int,
    num_generations: int,
) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Sample G captions of each region at the policy's temperature.

    Random numbers follow from the sample's index in the data set, so that they are the same for all
    policies. The captions are answered greedily.

    Returns:
        N captions, and their cycle IoU and mean log-probs, both (B, G).
    """
    G, prompts = (
        num_generations,
        policy.describe_prompts(features, range(len(batch)), features.prompt_masks),
    )
    uniforms = RowRNG(0, 0, 0, batch.index, G).uniforms(max_new_tokens)
    completions, captions = policy.complete(features, prompts, G, max_new_tokens, uniforms)
    rows = [i for i in range(len(batch)) for _ in range(G)]
    masks = segment_model_captions(policy, features, rows, captions, max_new_tokens).masks
    targets = [batch.masks[i].to(policy.device) for i in rows]
    iou = mask_iou(masks, targets).cpu().view(-1, G)
    return captions, iou, mean_logps(completions, G)


def measure_texts(
    references: list[str], captions: list[str], attribute_phrases: AttributePhrases
) -> dict[str, torch.Tensor]:
    """Measure n captions together: {column: (n,) float64}.

    Columns are those of the attributes, and whether a caption is the first one of its text.
    """
    # In reverse, so that the first row of a text is the one that stays.
    first = {text: row for row, text in reversed(list(enumerate(captions)))}
    distinct = [first[text] == row for row, text in enumerate(captions)]
    return dict(caption_distinct=torch.tensor(distinct, dtype=torch.float64)) | attribute_values(
        references, captions, attribute_phrases
    )
