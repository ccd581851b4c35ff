"""Figures of grounded captions (GCG), captions with a mask for each phrase, by GLaMM's arithmetic.

Sa2VA's script is the same; sources: eval/gcg/evaluate.py of mbzuai-oryx/groundingLMM, and
projects/sa2va/evaluation/sa2va_eval_gcg.py of bytedance/Sa2VA for what of an answer is its caption
and its phrases. What is not equal: METEOR, theirs is Java's METEOR 1.5; and whether two phrases say
the same, see `recalled`.

Letters: B samples, M masks of an answer, K true masks.
"""

import contextlib
import io
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from pycocotools import mask as coco
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from rl_train.data.rle import RLE, encode_mask
from rl_train.evaluation.mask_columns import mask_columns
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import row_masks
from rl_train.rewards.meteor import meteor
from rl_train.rewards.objects import match
from rl_train.rollout import Batch
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import GROUNDED_CAPTION

# Metrics of grounded captions, as `cycle_metrics` has them.
METRICS = {
    "gcg_ap50": "average precision of the masks at an IoU of 0.5, all with one score",
    "gcg_miou": "mean IoU of the pairs of masks and true masks, mean over images",
    "gcg_recall": "true phrases that have their mask and are said",
    "gcg_meteor": "METEOR of the captions without tags",
    "gcg_matched": "IoU of masks and true masks, best assignment, over the larger number",
    "gcg_masks": "masks of an answer",
}
METRIC_COLUMNS = {"gcg_recall": ("gcg_recalled", "gcg_phrases")}
PHRASE = re.compile(r"<p>(.*?)</p>")
TAG = re.compile(r"<.*?>")
MIN_IOU = MIN_SIMILARITY = 0.5  # of a recalled phrase


@torch.no_grad()
def measure(
    policy: Sa2VAPolicy, batch: Batch, features: ImageFeatures, max_new_tokens: int
) -> dict[str, list]:
    """Measure greedy answers of one batch: {column: B values} of an `evaluate.EvalResult`.

    "mask_pairs" are pairs of the run-length masks of an answer and of its true ones, for
    `average_precision`. Without phrases of the data set nothing is recalled.
    """
    prompts = grounded_prompts(policy, features)
    completions, texts = policy.complete(features, prompts, 1, max_new_tokens)
    seg_rows, embeddings = policy.mask_embeddings(completions)
    rows = seg_rows.tolist()
    decoded = row_masks(policy, features, prompts.image_index, rows, embeddings, one_by_one=True)
    regions = [masks.to(policy.device) for masks in batch.regions]
    matchings = [match(*pair) for pair in zip(decoded.seg_masks, regions, strict=True)]
    true_phrases = batch.columns.get("phrases", [[] for _ in texts])
    answer_phrases = [phrases_of(text) for text in texts]
    targets = [mask.to(policy.device) for mask in batch.masks]
    return mask_columns(decoded.masks, targets, batch) | dict(
        gcg_miou=[mean_pair_iou(matching.ious) for matching in matchings],
        gcg_recalled=[
            recalled(matching.ious, *phrases)
            for matching, *phrases in zip(matchings, answer_phrases, true_phrases)
        ],
        gcg_phrases=[len(phrases) for phrases in true_phrases],
        gcg_meteor=meteor(batch.captions, [caption_of(text) for text in texts]).tolist(),
        gcg_matched=[matching.reward for matching in matchings],
        gcg_masks=[len(masks) for masks in decoded.seg_masks],
        no_seg=[not len(masks) for masks in decoded.seg_masks],
        mask_pairs=[(encoded(a), encoded(b)) for a, b in zip(decoded.seg_masks, regions)],
        caption=texts,
    )


def grounded_prompts(policy: Sa2VAPolicy, features: ImageFeatures) -> Prompts:
    """Return the question for a grounded caption of each image."""
    ids = [policy.prompts.ids(GROUNDED_CAPTION, num_tiles) for num_tiles in features.tiles]
    return Prompts(ids, list(range(len(ids))), None)


def encoded(masks: torch.Tensor) -> list[RLE]:
    """Return the run-length masks of (M, H, W) bool."""
    return [encode_mask(mask) for mask in masks.cpu().numpy()]


def caption_of(text: str) -> str:
    """Return the caption of an answer: its text without tags and [SEG]."""
    line = TAG.sub("", text.replace("\n", "").replace("  ", " "))
    return " ".join(line.replace("[SEG]", "").split()).strip("'").strip()


def phrases_of(text: str) -> list[str]:
    """Return the phrases between <p> and </p> of an answer."""
    return [phrase.strip() for phrase in PHRASE.findall(text.replace("\n", ""))]


def mean_pair_iou(ious: np.ndarray) -> float:
    """Return the mean IoU of the pairs that the largest IoUs make, one after another; 0 of none.

    Masks without a partner do not count: a single good mask has the figure of a whole answer.

    Args:
        ious: (M, K) IoU of each mask with each true mask.
    """
    left, paired = ious.copy(), []
    while left.size and left.max() > 0:
        m, k = np.unravel_index(left.argmax(), left.shape)
        paired.append(left[m, k])
        left = np.delete(np.delete(left, m, axis=0), k, axis=1)
    return float(np.mean(paired)) if paired else 0.0


def recalled(
    ious: np.ndarray,
    phrases: Sequence[str],
    true_phrases: Sequence[str],
    similarity: Callable[[str, str], float] | None = None,
) -> int:
    """Return how many true phrases an answer has with its mask; recall is their sum over all K.

    The pair of the largest IoU is taken first, then the next. It ends with the first pair whose IoU
    or similarity is below one half, as theirs does, even if better phrases would follow.

    Args:
        ious: (M, K); phrases: of the M masks; true_phrases: of the K true ones. An answer with
            another number of phrases than masks recalls nothing, as in their code.
        similarity: of two phrases. Theirs is the cosine of the mean states of bert-base-uncased,
            which is above one half for most phrases; the default, METEOR, is stricter.
    """
    if len(phrases) != ious.shape[0] or len(true_phrases) != ious.shape[1]:
        return 0
    similarity = similarity or (lambda true, said: float(meteor([true], [said])[0]))
    left, count = ious.copy(), 0
    while left.size and left.max() >= MIN_IOU:
        m, k = np.unravel_index(left.argmax(), left.shape)
        if similarity(true_phrases[k], phrases[m]) < MIN_SIMILARITY:
            break
        left[m], left[:, k], count = 0, 0, count + 1
    return count


def average_precision(masks: Sequence[list[RLE]], objects: Sequence[list[RLE]]) -> float:
    """Return AP50 of n answers by pycocotools, in [0, 1], with a score of 1 for each mask.

    NaN without a true mask.

    Args:
        masks: of the answers; objects: true masks; n lists of each.
    """
    truth, answers = COCO(), COCO()
    for data, rows in ((truth, objects), (answers, masks)):
        regions = [
            dict(image_id=i, segmentation=rle, area=float(coco.area(rle)), iscrowd=0, score=1.0)
            for i, row in enumerate(rows)
            for rle in row
        ]
        data.dataset = dict(
            # Sizes are read for polygons alone.
            images=[dict(id=i, height=0, width=0) for i in range(len(rows))],
            categories=[dict(id=1)],
            annotations=[dict(id=k, category_id=1, **r) for k, r in enumerate(regions, 1)],
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
            data.createIndex()
    evaluation = COCOeval(truth, answers, "segm")
    evaluation.params.iouThrs = np.array([MIN_IOU])
    evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
    # (IoU thresholds 1, recalls 101, categories 1, areas 1, numbers of detections: up to 100 last)
    precision = evaluation.eval["precision"][0, :, 0, 0, -1]
    return float(precision.mean()) if (precision >= 0).all() else float("nan")
