"""Referring segmentation as Sa2VA's own evaluation of RefCOCO/+/g asks and counts it.

That is projects/sa2va/evaluation/sa2va_eval_refcoco.py of bytedance/Sa2VA, and dataset/RES.py
beside it. docs/data.md says what is equal and what is not.
"""

import torch

from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.segment_describe import row_masks
from rl_train.rewards import mask_iou
from sa2va_hf.batches import Images, Prompts

QUESTION = " Please segment {x} in this image."  # behind the image and a line break; with its blank
MAX_TILES = 12  # and a thumbnail
# What is reported beside seg_iou, seg_ciou, seg_p50 and no_seg, as `cycle_measures` has them.
METRICS = {"seg_ciou_answered": "seg_ciou of the phrases alone that were answered with [SEG]"}
PARTS = {"seg_ciou_answered": ("answered_intersection", "answered_union")}


def measure(policy: Sa2VAPolicy, batch, images: Images, max_new_tokens: int) -> dict[str, list]:
    """{column: B values} of one batch: what `evaluation.Measured` is made of, of greedy answers.

    The phrases are asked as they are. An answer without [SEG] is an empty mask.
    """
    texts, masks, answered = segment(policy, images, batch.captions, max_new_tokens)
    targets = [mask.to(policy.device) for mask in batch.masks]
    pairs = list(zip(masks, targets, strict=True))
    intersection = [(mask & target).sum().item() for mask, target in pairs]
    union = [(mask | target).sum().item() for mask, target in pairs]
    return dict(
        seg_iou=mask_iou(masks, targets, 1.0).tolist(),
        seg_intersection=intersection,
        seg_union=union,
        answered_intersection=[n * seg for n, seg in zip(intersection, answered)],
        answered_union=[n * seg for n, seg in zip(union, answered)],
        no_seg=[not seg for seg in answered],
        image_id=batch.image_ids,
        reference=batch.captions,
        caption=texts,
        index=batch.index,
    )


@torch.no_grad()
def segment(policy: Sa2VAPolicy, images: Images, phrases: list[str], max_new_tokens: int):
    """(B answers, B masks (H, W) bool, whether each answer has [SEG]) of phrases[i] in image i.

    A mask is the union of those of an answer's [SEG].
    """
    rows = list(range(len(phrases)))
    asked = [QUESTION.replace("{x}", phrase) for phrase in phrases]
    ids = [policy.prompts.ids(text, tiles) for text, tiles in zip(asked, images.tiles, strict=True)]
    completions, texts = policy.complete(images, Prompts(ids, rows, None), 1, max_new_tokens)
    seg_rows, embeddings = policy.mask_embeddings(completions)
    masks = row_masks(policy, images, rows, seg_rows.tolist(), embeddings)
    answered = set(seg_rows.tolist())
    return texts, masks, [row in answered for row in rows]


def sentence(what: str, values: dict[str, torch.Tensor], metrics: dict[str, float]) -> str:
    """The figures that others report of `what`, from all samples' measures and their metrics."""
    sums = [int(values[name].sum()) for name in ("seg_intersection", "seg_union", "no_seg")]
    answered = metrics.get("seg_ciou_answered")
    return (
        f"{what}: {len(values['no_seg'])} phrases, cIoU {metrics['seg_ciou']:.4f} (intersections "
        f"{sums[0]}, unions {sums[1]} pixels), gIoU {metrics['seg_iou']:.4f}; {sums[2]} answers "
        "without [SEG] count as empty masks"
        + (f", without them cIoU {answered:.4f}" if sums[2] and answered is not None else "")
    )
