"""Referring segmentation as Sa2VA's own evaluation of RefCOCO/+/g prompts and counts it.

Its source is projects/sa2va/evaluation/sa2va_eval_refcoco.py of bytedance/Sa2VA, and dataset/RES.py
beside it. docs/evaluation.md says what is equal and what is not.
"""

import torch

from rl_train.evaluation.mask_columns import mask_columns
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import row_masks
from rl_train.rollout import Batch
from sa2va_hf.batches import ImageFeatures, Prompts

QUESTION = " Please segment {x} in this image."  # behind the image and a line break; with its blank
MAX_TILES = 12  # and a thumbnail
# Metrics reported beside seg_iou, seg_ciou, seg_p50 and no_seg, as `cycle_metrics` has them.
METRICS = {"seg_ciou_answered": "seg_ciou of the phrases alone that were answered with [SEG]"}
METRIC_COLUMNS = {"seg_ciou_answered": ("answered_intersection", "answered_union")}


def measure(
    policy: Sa2VAPolicy, batch: Batch, features: ImageFeatures, max_new_tokens: int
) -> dict[str, list]:
    """Measure greedy answers of one batch: {column: B values} of an `evaluate.EvalResult`.

    The phrases are not changed. An answer without [SEG] is an empty mask.
    """
    texts, masks, answered = segment(policy, features, batch.captions, max_new_tokens)
    targets = [mask.to(policy.device) for mask in batch.masks]
    columns = mask_columns(masks, targets, batch)
    return columns | dict(
        answered_intersection=[n * seg for n, seg in zip(columns["seg_intersection"], answered)],
        answered_union=[n * seg for n, seg in zip(columns["seg_union"], answered)],
        no_seg=[not seg for seg in answered],
        caption=texts,
    )


@torch.no_grad()
def segment(
    policy: Sa2VAPolicy, features: ImageFeatures, phrases: list[str], max_new_tokens: int
) -> tuple[list[str], list[torch.Tensor], list[bool]]:
    """Segment phrases[i] in image i; a mask is the union of those of an answer's [SEG].

    Returns:
        B answers, B masks (H, W) bool, and whether each answer has [SEG].
    """
    rows = list(range(len(phrases)))
    questions = [QUESTION.replace("{x}", phrase) for phrase in phrases]
    # Not `segment_prompts`, which changes the phrase: this is the original's question.
    ids = [
        policy.prompts.ids(text, tiles)
        for text, tiles in zip(questions, features.tiles, strict=True)
    ]
    completions, texts = policy.complete(features, Prompts(ids, rows, None), 1, max_new_tokens)
    seg_rows, embeddings = policy.mask_embeddings(completions)
    masks = row_masks(policy, features, rows, seg_rows.tolist(), embeddings).masks
    answered = set(seg_rows.tolist())
    return texts, masks, [row in answered for row in rows]
