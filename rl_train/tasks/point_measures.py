"""Held-out measures of greedy answers of box and points, and of these with other negatives.

Letters: B samples, P answers, H W the pixels of a mask.
"""

from itertools import chain, islice

import numpy as np
import torch

from rl_train.points.answers import Answer
from rl_train.rewards import mask_iou
from rl_train.rewards.guards import is_whole
from rl_train.rewards.points import confused_region, reference_prompt, share_inside

# What is reported beside seg_iou, seg_ciou, seg_p50 and mask_whole, as `cycle_measures` has them.
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
PARTS = {
    "points_in_target": ("positive_in_target", "num_positive"),
    "neg_in_target": ("negative_in_target", "num_negative"),
    "neg_in_confused": ("negative_in_confused", "num_negative"),
}
CANDIDATES = 64  # random points that are drawn for those outside of an answer's boxes


def measure(policy, batch, features, texts, answers, passes: int) -> dict[str, list]:
    """{column: B values} of one batch's answers: what `evaluation.Measured` is made of.

    Args:
        texts: what was said of each sample; answers: what was read of it, or None, which draws
            nothing and is an empty mask; passes: of SAM2.
    """
    sizes, targets = features.sizes, [mask.to(policy.device) for mask in batch.masks]
    rows = list(range(len(batch)))
    masks, without = draw(policy, features, rows, answers, passes)
    others = dict(
        swapped=swapped(answers, sizes),
        random=[random_negatives(a, *of) for a, *of in zip(answers, sizes, batch.index)],
    )
    iou = dict(seg_iou=masks, seg_iou_without=without)
    for name, changed in others.items():
        iou[f"seg_iou_{name}"] = draw(policy, features, rows, changed, passes)[0]
    iou = {name: mask_iou(drawn, targets, 1.0).cpu() for name, drawn in iou.items()}
    iou["gain_negative"] = iou["seg_iou"] - iou["seg_iou_without"]
    for name in others:
        iou[f"gain_over_{name}"] = iou["seg_iou"] - iou[f"seg_iou_{name}"]
    said = [answer or Answer() for answer in answers]
    confused = confused_regions(policy, features, targets)
    return {name: values.tolist() for name, values in iou.items()} | dict(
        seg_intersection=[(mask & target).sum().item() for mask, target in zip(masks, targets)],
        seg_union=[(mask | target).sum().item() for mask, target in zip(masks, targets)],
        mask_whole=[is_whole(mask) for mask in masks],
        parsable=[answer is not None for answer in answers],
        num_positive=[len(a.positive) for a in said],
        num_negative=[len(a.negative) for a in said],
        positive_in_target=[num_inside(t, a.positive) for t, a in zip(targets, said)],
        negative_in_target=[num_inside(t, a.negative) for t, a in zip(targets, said)],
        negative_in_confused=[num_inside(c, a.negative) for c, a in zip(confused, said)],
        image_id=batch.image_ids,
        reference=batch.captions,
        caption=texts,
        index=batch.index,
    )


def draw(
    policy, features, image: list[int], answers, passes: int, confidence: list | None = None
) -> tuple[list, list]:
    """(masks (H, W) bool of answers[p] about image[p], those without their negative points).

    None draws nothing: an empty mask.

    Args:
        confidence: list that receives those of both masks of each answer, 0 of an empty one.
    """
    device, sizes = policy.device, [features.sizes[i] for i in image]
    masks = [torch.zeros(size, dtype=torch.bool, device=device) for size in sizes]
    without, rows = list(masks), [row for row, answer in enumerate(answers) if answer]
    sure = [(0.0, 0.0)] * len(answers)
    if rows:
        drawn, found = ([image[row] for row in rows], [answers[row] for row in rows]), []
        drawn = policy.point_masks(features, *drawn, passes, found)
        for row, *both, of_both in zip(rows, *drawn, found, strict=True):
            (masks[row], without[row]), sure[row] = both, of_both
    if confidence is not None:
        confidence += sure
    return masks, without


def confused_regions(policy, features, targets) -> list[torch.Tensor]:
    """What SAM2 takes in beside each image's target (H, W), prompted as well as can be."""
    prompts = [reference_prompt(target) for target in targets]
    masks, _ = draw(policy, features, list(range(len(targets))), prompts, 1)
    return [confused_region(mask, target) for mask, target in zip(masks, targets)]


def swapped(answers: list[Answer | None], sizes: list[tuple[int, int]]) -> list[Answer | None]:
    """The answers about images of (H, W) `sizes`, each with as many negative points of others.

    Of the next answer of the batch, then of the one after it, at the same place of the image; with
    fewer, if the others have no more.
    """
    found = []
    for i, answer in enumerate(answers):
        others = [*range(i + 1, len(answers)), *range(i)]
        height, width = sizes[i]
        points = chain.from_iterable(
            answers[j].scaled(width / sizes[j][1], height / sizes[j][0]).negative
            for j in others
            if answers[j]
        )
        found.append(answer and with_negatives(answer, islice(points, len(answer.negative))))
    return found


def random_negatives(answer: Answer | None, size: tuple[int, int], index: int) -> Answer | None:
    """An answer about an image of (H, W) `size` with as many random negative points.

    Outside of its boxes, where these leave room. They follow from the sample's index alone.
    """
    if answer is None:
        return None
    points = np.random.default_rng([0, index]).random((CANDIDATES, 2)) * size[::-1]  # (x, y)

    def boxed(point) -> bool:
        return any(x1 <= point[0] <= x2 and y1 <= point[1] <= y2 for x1, y1, x2, y2 in answer.boxes)

    outside_first = sorted(map(tuple, points.tolist()), key=boxed)
    return with_negatives(answer, outside_first[: len(answer.negative)])


def with_negatives(answer: Answer, points) -> Answer:
    return Answer(answer.boxes, answer.positive, tuple(points))


def num_inside(mask: torch.Tensor, points) -> float:
    """How many of the points lie in a mask (H, W)."""
    return round(share_inside(mask, points) * len(points)) if points else 0
