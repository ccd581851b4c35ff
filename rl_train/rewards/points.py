"""Rewards of boxes, positive and negative points, and of the masks that they prompt.

Letters: N answers, H W the pixels of the ground truth at its own size. Coordinates are (x, y) and
(x1, y1, x2, y2) in these pixels; a point lies in the pixel that it rounds down to.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_train.points.parser import Box, Point, PointPrompt
from rl_train.rewards.iou import mask_iou
from rl_train.rewards.published_points import matched_box_iou

ABSTAINS = 0.5  # of the term for negative points, between all of them harmful and all useful


def point_rewards(
    answers: Sequence[PointPrompt | None],
    well_formed: Sequence[bool],
    masks: Sequence[Tensor],
    masks_without_negatives: Sequence[Tensor],
    targets: Sequence[Tensor],
    confused: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Return {component: (N,)} of N answers; unparsed ones have 0 in each that may count.

    Components in [0, 1] that may count: "iou" of the mask, 1 if it is empty as its target;
    "format", 1/2 for a parsed answer and 1/2 for thoughts and answer in their tags; "negatives",
    see `negative_term`. The rest is measured: "iou_without" the negative points and "gain", what
    they add; fractions of the points "points_in_target", "neg_in_target", "neg_in_confused" (NaN
    without such a point); "box_iou"; "num_positive", "num_negative".

    Args:
        answers: None = unparsed.
        well_formed: see `AnswerFormat.is_well_formed`.
        masks: (H, W) bool that each answer prompts.
        masks_without_negatives: the same without its negative points.
        targets: (H, W) bool.
        confused: (H, W) bool, what SAM2 takes in beside the target when prompted by
            `reference_prompt`: where negative points help. It does not follow from the policy's own
            answer, by which a worse box would earn more.
    """
    prompts = [answer or PointPrompt() for answer in answers]
    parsed = torch.tensor([answer is not None for answer in answers])
    neg_in_target = torch.tensor([fraction_inside(t, p.negative) for t, p in zip(targets, prompts)])
    neg_in_confused = torch.tensor(
        [fraction_inside(c, p.negative) for c, p in zip(confused, prompts)]
    )
    iou, without = (
        mask_iou(list(m), list(targets), 1.0).cpu() for m in (masks, masks_without_negatives)
    )
    nothing_confused = torch.tensor([not mask.any() for mask in confused])
    negatives = negative_term(neg_in_confused, neg_in_target, nothing_confused)
    return dict(
        iou=iou * parsed,
        format=0.5 * (parsed.float() + (parsed & torch.tensor(well_formed))),
        negatives=negatives * parsed,
        iou_without=without * parsed,
        gain=(iou - without) * parsed,
        points_in_target=torch.tensor(
            [fraction_inside(t, p.positive) for t, p in zip(targets, prompts)]
        ),
        neg_in_target=neg_in_target,
        neg_in_confused=neg_in_confused,
        box_iou=torch.tensor([box_iou(p.boxes, t) for p, t in zip(prompts, targets)]),
        num_positive=torch.tensor([float(len(p.positive)) for p in prompts]),
        num_negative=torch.tensor([float(len(p.negative)) for p in prompts]),
    )


def box_rewards(
    answers: Sequence[PointPrompt | None],
    well_formed: Sequence[bool],
    true_prompts: Sequence[PointPrompt],
) -> dict[str, Tensor]:
    """Return {component: (N,)} of N answers about samples with boxes and points and no mask.

    "format" as in `point_rewards`; measured are the "matched_box_iou", the fraction of the positive
    "points_in_boxes" (NaN without any), "num_positive" and "num_negative".

    Args:
        answers: None = unparsed; true_prompts: true boxes and points, in the same pixels.
        well_formed: see `AnswerFormat.is_well_formed`.
    """
    prompts = [answer or PointPrompt() for answer in answers]
    parsed = torch.tensor([answer is not None for answer in answers])
    pairs = list(zip(prompts, true_prompts, strict=True))
    return dict(
        format=0.5 * (parsed.float() + (parsed & torch.tensor(well_formed))),
        matched_box_iou=torch.tensor([matched_box_iou(p.boxes, t.boxes) for p, t in pairs]),
        points_in_boxes=torch.tensor(
            [
                num_in_boxes(p.positive, t.boxes) / len(p.positive) if p.positive else float("nan")
                for p, t in pairs
            ]
        ),
        num_positive=torch.tensor([float(len(p.positive)) for p in prompts]),
        num_negative=torch.tensor([float(len(p.negative)) for p in prompts]),
    )


def num_in_boxes(points: Sequence[Point], boxes: Sequence[Box]) -> int:
    """Count the points that lie in one of the boxes."""
    return sum(any(x1 <= x <= x2 and y1 <= y <= y2 for x1, y1, x2, y2 in boxes) for x, y in points)


def prompt_of_masks(targets: Sequence[Tensor], num_points: int) -> PointPrompt:
    """Return box and deepest point, or two of them, of each mask (H, W); none may be empty."""
    find = deepest_points if num_points == 2 else lambda target: (deepest_point(target),)
    points = [point for target in targets for point in find(target)]
    return PointPrompt(tuple(map(bounding_box, targets)), tuple(points))


def negative_term(in_confused: Tensor, in_target: Tensor, empty: Tensor) -> Tensor:
    """Return (fraction in the confused pixels - fraction in the target + 1) / 2 of answers, (N,).

    ABSTAINS without negative points, and for all answers about an image without confused pixels,
    where a point can only do harm.

    Args:
        in_confused, in_target: (N,) fractions of an answer's negative points, NaN without any.
        empty: (N,) bool, there are no confused pixels.
    """
    term = (in_confused - in_target + 1) / 2
    return torch.where(empty | term.isnan(), ABSTAINS, term)


def reference_prompt(target: Tensor) -> PointPrompt:
    """Return the best prompt of a mask without negative points: its box and deepest point."""
    return PointPrompt((bounding_box(target),), (deepest_point(target),))


def fraction_inside(mask: Tensor, points: Sequence[Point]) -> float:
    """Return the fraction of points that lie in a mask (H, W) bool, NaN of none."""
    if not points:
        return float("nan")
    x, y = torch.tensor(points, device=mask.device).T.long()  # rounds down: they are not negative
    height, width = mask.shape
    return mask[y.clamp(max=height - 1), x.clamp(max=width - 1)].float().mean().item()


def bounding_box(mask: Tensor) -> Box:
    """Return the box around a mask (H, W) that is not empty, to its pixels' outer edges."""
    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    return tuple(map(float, (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)))


def deepest_point(mask: Tensor) -> Point:
    """Return the pixel (x, y) farthest from the outside of a mask (H, W) that is not empty.

    By the largest square around it that lies in the mask; of several the middle one, row by row.
    """
    # A summed-area table: four look-ups count the mask's pixels in any square.
    sums = torch.nn.functional.pad(mask.long().cumsum(0).cumsum(1), (1, 0, 1, 0))  # (H+1, W+1)

    def centres(radius: int) -> Tensor:
        """Return pixels (n, 2) as (y, x) around which a square of this radius fits."""
        side = 2 * radius + 1
        filled = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side]
        return (filled + sums[:-side, :-side] == side**2).nonzero() + radius

    fits, beyond = 0, (min(mask.shape) + 1) // 2
    # Bisection: where a square fits, so does every smaller one.
    while fits + 1 < beyond:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if len(centres(middle)) else (fits, middle)
    deepest = centres(fits)  # (n, 2)
    y, x = deepest[len(deepest) // 2].tolist()
    return float(x), float(y)


def deepest_points(mask: Tensor) -> tuple[Point, Point]:
    """Return `deepest_point` and the deepest one outside the largest square around it.

    The first is repeated if the square covers the whole mask.
    """
    x, y = first = deepest_point(mask)
    # A border of one pixel, so that there is an outside.
    outside = ~torch.nn.functional.pad(mask, (1, 1, 1, 1))
    rows, columns = outside.nonzero().T - 1
    # Distance to the first pixel outside, in the maximum norm.
    radius = torch.maximum((rows - y).abs(), (columns - x).abs()).min()
    height, width = mask.shape
    far_y = (torch.arange(height, device=mask.device) - y).abs() >= radius
    far_x = (torch.arange(width, device=mask.device) - x).abs() >= radius
    rest = mask & (far_y[:, None] | far_x)
    return first, deepest_point(rest) if rest.any() else first


def box_iou(boxes: Sequence[Box], target: Tensor) -> float:
    """Return the IoU of the box around `boxes` with that around a mask (H, W), NaN without one."""
    if not boxes or not target.any():
        return float("nan")
    lefts, tops, rights, bottoms = zip(*boxes)
    x1, y1, x2, y2 = min(lefts), min(tops), max(rights), max(bottoms)
    u1, v1, u2, v2 = bounding_box(target)
    intersection = max(min(x2, u2) - max(x1, u1), 0) * max(min(y2, v2) - max(y1, v1), 0)
    return intersection / ((x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - intersection)
