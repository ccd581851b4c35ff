"""Evaluation metrics of greedy answers of box and points, also with other negative points.

Letters: B samples, P answers, H W the pixels of a mask.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import torch

from rl_train.points.parser import Point, PointPrompt
from rl_train.policies.qwen_vl import QwenImageFeatures, QwenVLPolicy
from rl_train.rewards import mask_iou
from rl_train.rewards.hacking_signals import is_whole
from rl_train.rewards.points import fraction_inside, reference_prompt
from rl_train.rollout import Batch
from rl_train.tasks.base import mask_columns

# What is reported beside seg_iou, seg_ciou, seg_p50 and mask_whole, as `cycle_metrics` has them.
METRICS = {
    "best_of_G_seg_iou": "seg_iou of the best of G sampled answers: an oracle (--best_of)",
    "by_logp_seg_iou": "same, of the likeliest of them (mean log-prob)",
    "sampled_seg_iou": "same, their mean",
    "parsable": "answers that could be read",
    "seg_iou_without": "mean IoU of the same answers without their negative points",
    "gain_negative": "what these add: seg_iou - seg_iou_without",
    "seg_iou_swapped": "the same answers with as many negative points of others of their batch",
    "gain_over_swapped": "seg_iou - seg_iou_swapped",
    "seg_iou_random": "the same answers with as many random points outside of their boxes",
    "gain_over_random": "seg_iou - seg_iou_random",
    "points_in_target": "positive points that lie in the target",
    "neg_in_target": "negative points that do",
    "neg_in_confused": "negative points where SAM2 draws too much of the target's box and depth",
    "num_negative": "negative points of an answer",
}
METRIC_PARTS = {
    "points_in_target": ("positive_in_target", "num_positive"),
    "neg_in_target": ("negative_in_target", "num_negative"),
    "neg_in_confused": ("negative_in_confused", "num_negative"),
}
CANDIDATES = 64  # random points, of which those outside of an answer's boxes come first


def measure(
    policy: QwenVLPolicy,
    batch: Batch,
    features: QwenImageFeatures,
    texts: list[str],
    answers: list[PointPrompt | None],
    passes: int,
) -> dict[str, list]:
    """{column: B values} of one batch's answers, for an `evaluate.EvalResult`.

    Args:
        texts: the model's answers.
        answers: prompts parsed from them; None, of an answer that cannot be read, is an empty mask.
        passes: of SAM2.
    """
    sizes, rows = features.sizes, list(range(len(batch)))
    targets = [mask.to(policy.device) for mask in batch.masks]
    masks, without, _ = draw(policy, features, rows, answers, passes)
    random = [random_negatives(*sample) for sample in zip(answers, sizes, batch.index)]
    with_swapped, *_ = draw(policy, features, rows, swapped(answers, sizes), passes)
    with_random, *_ = draw(policy, features, rows, random, passes)
    iou = mask_iou(masks, targets, 1.0).cpu()  # (B,)
    others = dict(without=without, swapped=with_swapped, random=with_random)
    columns = {}
    for (name, other), gain in zip(others.items(), ("negative", "over_swapped", "over_random")):
        other_iou = mask_iou(other, targets, 1.0).cpu()
        columns[f"seg_iou_{name}"] = other_iou.tolist()
        columns[f"gain_{gain}"] = (iou - other_iou).tolist()
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


def draw(
    policy: QwenVLPolicy,
    features: QwenImageFeatures,
    image: list[int],
    answers: list[PointPrompt | None],
    passes: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[float, float]]]:
    """Return the masks that SAM2 predicts for P answers, each about image[p].

    An answer that is None has an empty mask of confidence 0.

    Returns:
        P masks (H, W) bool, P masks without the negative points, and P pairs of their confidence.
    """
    prompts = [answer or PointPrompt() for answer in answers]
    return policy.point_masks(features, image, prompts, passes)


def confused_regions(
    policy: QwenVLPolicy, features: QwenImageFeatures, targets: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What SAM2 takes in beside each image's target (H, W), prompted as well as can be."""
    prompts = [reference_prompt(target) for target in targets]
    masks, *_ = draw(policy, features, list(range(len(targets))), prompts, 1)
    return [mask & ~target for mask, target in zip(masks, targets)]


def swapped(
    answers: list[PointPrompt | None], sizes: list[tuple[int, int]]
) -> list[PointPrompt | None]:
    """The answers about images of (H, W) `sizes`, each with as many negative points of others.

    Of the next answer of the batch, then of the one after it, at the same place of the image; with
    fewer, if the others have no more.
    """
    swapped_answers = []
    for i, answer in enumerate(answers):
        others = [*range(i + 1, len(answers)), *range(i)]
        height, width = sizes[i]
        points = chain.from_iterable(
            answers[j].scaled(width / sizes[j][1], height / sizes[j][0]).negative
            for j in others
            if answers[j]
        )
        if answer:
            answer = replace(answer, negative=tuple(islice(points, len(answer.negative))))
        swapped_answers.append(answer)
    return swapped_answers


def random_negatives(
    answer: PointPrompt | None, size: tuple[int, int], index: int
) -> PointPrompt | None:
    """An answer about an image of (H, W) `size` with as many random negative points.

    Outside of its boxes, where these leave room. They follow from the sample's index alone.
    """
    if answer is None:
        return None
    points = np.random.default_rng([0, index]).random((CANDIDATES, 2)) * size[::-1]  # (x, y)

    def boxed(point) -> bool:
        return any(x1 <= point[0] <= x2 and y1 <= point[1] <= y2 for x1, y1, x2, y2 in answer.boxes)

    outside_first = sorted(map(tuple, points.tolist()), key=boxed)
    return replace(answer, negative=tuple(outside_first[: len(answer.negative)]))


def num_inside(mask: torch.Tensor, points: Sequence[Point]) -> float:
    """Number of the points that lie in a mask (H, W)."""
    return round(fraction_inside(mask, points) * len(points)) if points else 0
