"""Rewards of boxes, positive and negative points, and of the masks that they prompt.

Letters: N answers, H W the pixels of the ground truth at its own size. Coordinates are (x, y) and
(x1, y1, x2, y2) in these pixels; a point lies in the pixel that it rounds down to.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_train.points.answers import Answer, Box, Point
from rl_train.rewards.iou import mask_iou

ABSTAINS = 0.5  # of the term for negative points, between all of them harmful and all useful


def point_rewards(
    answers: Sequence[Answer | None],
    in_form: Sequence[bool],
    masks: Sequence[Tensor],
    masks_without: Sequence[Tensor],
    targets: Sequence[Tensor],
    confused: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Return {component: (N,)} of N answers; of None it is 0 in each that may count.

    These are in [0, 1]: "iou" of the mask; "format", 1/2 for an answer that could be read and 1/2
    for thoughts and answer in their tags; "negatives", see `negative_term`. The rest is measured:
    "iou_without" the negative points and "gain", what they add; shares of the points
    "points_in_target", "neg_in_target", "neg_in_confused" (NaN without such a point); "box_iou";
    "num_positive", "num_negative".

    Args:
        answers: None = could not be read.
        in_form: see `Form.in_form`.
        masks: (H, W) bool that each answer prompts; masks_without: without its negative points.
        targets: (H, W) bool; confused: see `confused_region`.
    """
    said = [answer or Answer() for answer in answers]
    read = torch.tensor([answer is not None for answer in answers])
    shares = dict(
        points_in_target=[share_inside(t, a.positive) for t, a in zip(targets, said)],
        neg_in_target=[share_inside(t, a.negative) for t, a in zip(targets, said)],
        neg_in_confused=[share_inside(c, a.negative) for c, a in zip(confused, said)],
    )
    shares = {name: torch.tensor(values) for name, values in shares.items()}
    iou, without = (mask_iou(list(m), list(targets)).cpu() for m in (masks, masks_without))
    empty = torch.tensor([not region.any() for region in confused])
    negatives = negative_term(shares["neg_in_confused"], shares["neg_in_target"], empty)
    return dict(
        iou=iou * read,
        format=0.5 * (read.float() + (read & torch.tensor(in_form))),
        negatives=negatives * read,
        iou_without=without * read,
        gain=(iou - without) * read,
        **shares,
        box_iou=torch.tensor([box_iou(hull(a.boxes), t) for a, t in zip(said, targets)]),
        num_positive=torch.tensor([float(len(a.positive)) for a in said]),
        num_negative=torch.tensor([float(len(a.negative)) for a in said]),
    )


def negative_term(in_confused: Tensor, in_target: Tensor, empty: Tensor) -> Tensor:
    """Return (share in the confused region - share in the target + 1) / 2 of answers, (N,).

    ABSTAINS without negative points (NaN shares), and for all answers about an image in which
    nothing is confused, where the best that a point could do is no harm.

    Args:
        in_confused, in_target: (N,) shares of an answer's negative points, NaN without any.
        empty: (N,) bool, the confused region has no pixel.
    """
    term = (in_confused - in_target + 1) / 2
    return torch.where(empty | term.isnan(), ABSTAINS, term)


def confused_region(mask: Tensor, target: Tensor) -> Tensor:
    """Return what the segmenter takes in beside the target (H, W): where negative points help.

    Args:
        mask: what it makes of `reference_prompt(target)`. Not of a policy's own answer, by which a
            worse box would earn more.
    """
    return mask & ~target


def reference_prompt(target: Tensor) -> Answer:
    """Return the best that can be said of a region without negative points: box, deepest point."""
    return Answer((bounding_box(target),), (deepest_point(target),))


def share_inside(mask: Tensor, points: Sequence[Point]) -> float:
    """Return the share of points that lie in a mask (H, W) bool, NaN of none."""
    if not points:
        return float("nan")
    x, y = torch.tensor(points, device=mask.device).T.long()  # rounds down: they are not negative
    height, width = mask.shape
    return mask[y.clamp(max=height - 1), x.clamp(max=width - 1)].float().mean().item()


def bounding_box(mask: Tensor) -> Box:
    """Return the box around a mask (H, W) that is not empty, to its pixels' outer edges."""
    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    ends = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return tuple(float(end) for end in ends)


def deepest_point(mask: Tensor) -> Point:
    """Return the pixel (x, y) farthest from the outside of a mask (H, W) that is not empty.

    By the largest square around it that lies in the mask; of several the middle one, row by row.
    """
    sums = torch.nn.functional.pad(mask.long().cumsum(0).cumsum(1), (1, 0, 1, 0))  # (H+1, W+1)

    def centres(radius: int) -> Tensor:
        """(n, 2) pixels (y, x) around which a square of this radius fits."""
        side = 2 * radius + 1
        filled = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side]
        return (filled + sums[:-side, :-side] == side**2).nonzero() + radius

    fits, beyond = 0, (min(mask.shape) + 1) // 2
    while fits + 1 < beyond:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if len(centres(middle)) else (fits, middle)
    found = centres(fits)
    y, x = found[len(found) // 2].tolist()
    return float(x), float(y)


def deepest_points(mask: Tensor) -> tuple[Point, Point]:
    """Return `deepest_point` and that of what lies beyond the largest square around it.

    The same twice, if that is all of the mask.
    """
    x, y = first = deepest_point(mask)
    outside = ~torch.nn.functional.pad(mask, (1, 1, 1, 1))
    rows, columns = outside.nonzero().T - 1
    radius = torch.maximum((rows - y).abs(), (columns - x).abs()).min()  # of the first outside
    height, width = mask.shape
    far_y = (torch.arange(height, device=mask.device) - y).abs() >= radius
    far_x = (torch.arange(width, device=mask.device) - x).abs() >= radius
    rest = mask & (far_y[:, None] | far_x)
    return first, deepest_point(rest) if rest.any() else first


def hull(boxes: Sequence[Box]) -> Box | None:
    """Return the smallest box around `boxes`, None of none."""
    if not boxes:
        return None
    x1, y1, x2, y2 = zip(*boxes)
    return min(x1), min(y1), max(x2), max(y2)


def box_iou(box: Box | None, target: Tensor) -> float:
    """Return the IoU of a box with that around the target (H, W), NaN without a box."""
    if box is None:
        return float("nan")
    (x1, y1, x2, y2), (u1, v1, u2, v2) = box, bounding_box(target)
    shared = max(min(x2, u2) - max(x1, u1), 0) * max(min(y2, v2) - max(y1, v1), 0)
    return shared / ((x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - shared)
