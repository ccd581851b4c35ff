"""Evaluation metrics of greedy answers of boxes and points, also with other negative points.

Letters: B samples, P answers, H W the pixels of a mask.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import torch

from rl_train.evaluation.mask_columns import mask_columns
from rl_train.points.parser import Point, PointPrompt
from rl_train.policies.qwen_vl import QwenImageFeatures, QwenVLPolicy
from rl_train.rewards import mask_iou
from rl_train.rewards.hacking_signals import is_whole
from rl_train.rewards.points import fraction_inside, num_in_boxes, reference_prompt
from rl_train.rewards.published_points import matched_box_iou
from rl_train.rollout import Batch

# What is reported beside seg_iou, seg_ciou, seg_p50 and mask_whole, as `cycle_metrics` has them.
METRICS = {
    "best_of_G_seg_iou": "seg_iou of the best of G sampled answers: an oracle (--best_of)",
    "by_logp_seg_iou": "seg_iou of the likeliest of G sampled answers (mean log-prob)",
    "sampled_seg_iou": "mean seg_iou of G sampled answers",
    "parsable": "answers that could be read",
    "seg_iou_without": "seg_iou of the same answers without their negative points",
    "gain_negative": "seg_iou - seg_iou_without: what the negative points add",
    "seg_iou_swapped": "seg_iou of the same answers with negative points of other answers",
    "gain_over_swapped": "seg_iou - seg_iou_swapped",
    "seg_iou_random": "seg_iou of the same answers with random negative points outside their boxes",
    "gain_over_random": "seg_iou - seg_iou_random",
    "points_in_target": "positive points that lie in the target",
    "neg_in_target": "negative points that lie in the target",
    "neg_in_confused": "negative points where SAM2 draws too much, prompted by the target",
    "num_negative": "negative points of an answer",
    "matched_box_iou": "IoU of boxes, best assignment, over the larger number (data without masks)",
    "points_in_boxes": "positive points that lie in a true box (the same)",
}
METRIC_COLUMNS = {
    "points_in_target": ("positive_in_target", "num_positive"),
    "neg_in_target": ("negative_in_target", "num_negative"),
    "neg_in_confused": ("negative_in_confused", "num_negative"),
    "points_in_boxes": ("positive_in_boxes", "num_positive"),
}
NUM_CANDIDATES = 64  # random points; those outside of an answer's boxes are taken first


def measure(
    policy: QwenVLPolicy,
    batch: Batch,
    features: QwenImageFeatures,
    texts: list[str],
    answers: list[PointPrompt | None],
    passes: int,
) -> dict[str, list]:
    """Measure the answers of a batch: {column: B values} of an `evaluate.EvalResult`.

    Args:
        texts: the model's answers.
        answers: prompts parsed from them, None where that failed, which gives an empty mask.
        passes: of SAM2.
    """
    sizes, rows = features.sizes, list(range(len(batch)))
    targets = [mask.to(policy.device) for mask in batch.masks]
    masks, without, _ = segment_points(policy, features, rows, answers, passes)
    samples = zip(answers, sizes, batch.index)
    randomised = [random_negatives(answer, size, index) for answer, size, index in samples]
    with_swapped, *_ = segment_points(
        policy, features, rows, swapped_negatives(answers, sizes), passes
    )
    with_random, *_ = segment_points(policy, features, rows, randomised, passes)
    iou = mask_iou(masks, targets, 1.0).cpu()  # (B,)
    controls = dict(without=without, swapped=with_swapped, random=with_random)
    gains = ("negative", "over_swapped", "over_random")
    columns = {}
    for (name, control_masks), gain in zip(controls.items(), gains):
        control_iou = mask_iou(control_masks, targets, 1.0).cpu()
        columns[f"seg_iou_{name}"] = control_iou.tolist()
        columns[f"gain_{gain}"] = (iou - control_iou).tolist()
    prompts = [answer or PointPrompt() for answer in answers]
    confused = confused_regions(policy, features, targets)
    return dict(
        **mask_columns(masks, targets, batch) | columns,
        mask_whole=[is_whole(mask) for mask in masks],
        parsable=[answer is not None for answer in answers],
        num_positive=[len(a.positive) for a in prompts],
        num_negative=[len(a.negative) for a in prompts],
        positive_in_target=[num_inside(t, a.positive) for t, a in zip(targets, prompts)],
        negative_in_target=[num_inside(t, a.negative) for t, a in zip(targets, prompts)],
        negative_in_confused=[num_inside(c, a.negative) for c, a in zip(confused, prompts)],
        caption=texts,
    )


def measure_boxes(
    batch: Batch,
    texts: list[str],
    answers: list[PointPrompt | None],
    true_prompts: list[PointPrompt],
) -> dict[str, list]:
    """Measure the answers about samples with boxes and no masks: {column: B values}.

    Args:
        texts: the model's answers; answers: prompts parsed from them, None where that failed.
        true_prompts: true boxes and points, in the same pixels.
    """
    prompts = [answer or PointPrompt() for answer in answers]
    pairs = list(zip(prompts, true_prompts, strict=True))
    return dict(
        matched_box_iou=[matched_box_iou(p.boxes, t.boxes) for p, t in pairs],
        positive_in_boxes=[num_in_boxes(p.positive, t.boxes) for p, t in pairs],
        parsable=[answer is not None for answer in answers],
        num_positive=[len(p.positive) for p in prompts],
        num_negative=[len(p.negative) for p in prompts],
        caption=texts,
        image_id=batch.image_ids,
        reference=batch.captions,
        index=batch.index,
    )


def segment_points(
    policy: QwenVLPolicy,
    features: QwenImageFeatures,
    image_index: list[int],
    answers: list[PointPrompt | None],
    passes: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[float, float]]]:
    """Return the masks that SAM2 predicts for P answers, each about image image_index[p].

    An answer that is None has an empty mask of confidence 0.

    Returns:
        P masks (H, W) bool, P masks without the negative points, and P pairs of their confidence.
    """
    prompts = [answer or PointPrompt() for answer in answers]
    return policy.point_masks(features, image_index, prompts, passes)


def confused_regions(
    policy: QwenVLPolicy, features: QwenImageFeatures, targets: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what SAM2 segments outside of each target (H, W) when it is prompted by the target.

    That is nothing for an empty target.
    """
    prompts = [reference_prompt(target) if target.any() else PointPrompt() for target in targets]
    masks, *_ = segment_points(policy, features, list(range(len(targets))), prompts, 1)
    return [mask & ~target for mask, target in zip(masks, targets)]


def swapped_negatives(
    answers: list[PointPrompt | None], sizes: list[tuple[int, int]]
) -> list[PointPrompt | None]:
    """Replace each answer's negative points by as many of the other answers of the batch.

    They come from the next answer, then from the one after it, at the same relative position in the
    image. There are fewer if the others have no more.

    Args:
        sizes: (H, W) of the answers' images.
    """
    swapped_answers = []
    for i, answer in enumerate(answers):
        # Later answers of the batch, then those before it.
        next_first = [*range(i + 1, len(answers)), *range(i)]
        height, width = sizes[i]
        points = chain.from_iterable(
            answers[j].scaled(width / sizes[j][1], height / sizes[j][0]).negative
            for j in next_first
            if answers[j]
        )
        if answer:
            answer = replace(answer, negative=tuple(islice(points, len(answer.negative))))
        swapped_answers.append(answer)
    return swapped_answers


def random_negatives(
    answer: PointPrompt | None, size: tuple[int, int], index: int
) -> PointPrompt | None:
    """Replace an answer's negative points by as many random ones in an image of (H, W) `size`.

    They lie outside of its boxes, where these leave room, and follow from the sample's index alone.
    """
    if answer is None:
        return None
    points = np.random.default_rng([0, index]).random((NUM_CANDIDATES, 2)) * size[::-1]  # (x, y)

    def boxed(point: Point) -> bool:
        """Return whether a point lies in one of the answer's boxes."""
        return any(x1 <= point[0] <= x2 and y1 <= point[1] <= y2 for x1, y1, x2, y2 in answer.boxes)

    # Sorting is stable, so random points keep their order.
    outside_first = sorted(map(tuple, points.tolist()), key=boxed)
    return replace(answer, negative=tuple(outside_first[: len(answer.negative)]))


def num_inside(mask: torch.Tensor, points: Sequence[Point]) -> float:
    """Count the points that lie in a mask (H, W)."""
    return round(fraction_inside(mask, points) * len(points)) if points else 0
