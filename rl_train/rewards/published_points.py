"""Rewards of boxes and points by which Seg-Zero and VisionReasoner were trained, to the letter.

Each compares the text of an answer with a solution, in pixels of a frame of 840 x 840; no mask is
needed. Sources: verl/utils/reward_score/seg_strict.py and vision_reasoner.py of
dvlab-research/Seg-Zero. What their code answers with an exception has 0 here too.

Letters: M boxes of an answer, K of the solution.
"""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rl_train.points.parser import Box, JsonValue, Point, PointPrompt
from rl_train.points.published import is_finite, is_numbers, load_answer

THINKING = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
MIN_IOU = 0.5  # of two boxes
MAX_BOX_DISTANCE = 10  # pixels, mean of the four sides
MAX_POINT_DISTANCE = 30  # pixels, of VisionReasoner's point
MAX_POINTS_DISTANCE = 100  # pixels, mean of Seg-Zero's two points
MAX_OBJECTS = 120  # of an answer or a solution that are compared
MAX_REPEATS = 1  # sentences that may repeat an earlier one
# Rewards a pair of boxes can get: IoU, distance of boxes, distance of points.
PAIR_REWARDS = ("bbox_iou", "bbox_l1", "point_l1")

Scale = tuple[float, float]  # (x, y) pixels of the frame of 840 in a unit of the answer


def segzero_rewards(
    text: str, solution: PointPrompt, scale: Scale = (1.0, 1.0)
) -> dict[str, float]:
    """Return {component: 0 or 1} of an answer with one box and two points; the reward is their sum.

    "thinking_format": thoughts and answer in their tags; "segmentation_format": the strict keys;
    "bbox_iou": above MIN_IOU; "bbox_l1": sides within MAX_BOX_DISTANCE; "point_l1": points within
    MAX_POINTS_DISTANCE, in the better order, and both in the answer's own box.

    Args:
        solution: one box and two points.
        scale: of the answer's coordinates.
    """
    loaded = load_answer(text, "segzero")
    answer = loaded if isinstance(loaded, dict) else {}
    box, points = answer.get("bbox"), [answer.get("points_1"), answer.get("points_2")]
    formatted = _has_length(box, 4) and all(_has_length(point, 2) for point in points)
    rewards = dict(
        thinking_format=thinking_format(text),
        segmentation_format=float(formatted),
        **dict.fromkeys(PAIR_REWARDS, 0.0),
    )
    if not is_numbers(box, 4):
        return rewards
    box, (true_box,) = _scaled(box, scale), solution.boxes
    rewards["bbox_iou"] = float(_segzero_iou(box, true_box) > MIN_IOU)
    rewards["bbox_l1"] = float(np.abs(np.subtract(box, true_box)).mean() < MAX_BOX_DISTANCE)
    if all(is_finite(point, 2) for point in points):
        # Whole numbers of the answer's own frame, as their code compares them.
        points = [_scaled([int(value) for value in point[:2]], scale) for point in points]
        near = _mean_distance(points, solution.positive) < MAX_POINTS_DISTANCE
        inside = all(box[0] <= x <= box[2] and box[1] <= y <= box[3] for x, y in points)
        rewards["point_l1"] = float(near and inside)
    return rewards


def visionreasoner_rewards(
    text: str, solution: PointPrompt, scale: Scale = (1.0, 1.0)
) -> dict[str, float]:
    """Return {component: value} of an answer with any number of boxes; the reward is their sum.

    "thinking_format": 1 for thoughts and answer in their tags; "segmentation_format": up to 2, the
    mean over items of a box of four and a point of two; "bbox_iou", "bbox_l1", "point_l1": up to 1
    each, see `matched_rewards`; "non_repeat": 1, 0 if sentences are repeated.

    Args:
        solution: boxes, each with its point.
        scale: of the answer's coordinates.
    """
    items = load_answer(text, "visionreasoner")
    return dict(
        thinking_format=thinking_format(text),
        segmentation_format=(
            visionreasoner_format(items) if solution.boxes else 2.0 * (items == [])
        ),
        **matched_rewards(items, solution, scale),
        non_repeat=non_repeat(text),
    )


def thinking_format(text: str) -> float:
    """Return 1 if the whole text is thoughts and answer in their tags, else 0."""
    return float(bool(THINKING.fullmatch(text)))


def visionreasoner_format(items: JsonValue) -> float:
    """Return the mean over items of [a box of four] + [a point of two], up to 2."""
    if not isinstance(items, list):
        return 0.0
    total = 0
    for item in items:
        if not isinstance(item, dict):  # their code ends here, with what it has counted
            break
        total += _has_length(item.get("bbox_2d"), 4) + _has_length(item.get("point_2d"), 2)
    return total / len(items) if items else 0.0


def non_repeat(text: str) -> float:
    """Return 0 if more than MAX_REPEATS sentences repeat an earlier one, else 1.

    Sentences end at full stops. Coordinates such as 0.45 end them too: the reward is made for
    whole numbers.
    """
    sentences = [sentence.strip() for sentence in text.split(".") if sentence.strip()]
    return float(len(sentences) - len(set(sentences)) <= MAX_REPEATS)


def matched_rewards(
    items: JsonValue, solution: PointPrompt, scale: Scale = (1.0, 1.0)
) -> dict[str, float]:
    """Return {"bbox_iou", "bbox_l1", "point_l1": in [0, 1]} of the best assignment of M to K boxes.

    A pair of boxes gets 1 each for an IoU above MIN_IOU, sides within MAX_BOX_DISTANCE, and points
    within MAX_POINT_DISTANCE of which the answer's lies in its own box. The assignment has the
    largest sum (Hungarian method). Sums are divided by max(M, K). Where the solution has no box
    (their sets have none such), the answer [] has 1 in each.
    """
    nothing = dict.fromkeys(PAIR_REWARDS, 0.0)
    if not solution.boxes:
        return dict.fromkeys(PAIR_REWARDS, float(items == []))
    if not isinstance(items, list) or not items:
        return nothing
    if not all(isinstance(item, dict) and {"bbox_2d", "point_2d"} <= item.keys() for item in items):
        return nothing
    items = items[:MAX_OBJECTS]
    if not all(is_numbers(i["bbox_2d"], 4) and is_numbers(i["point_2d"], 2) for i in items):
        return nothing
    boxes = np.array([_scaled(item["bbox_2d"], scale) for item in items])  # (M, 4)
    points = np.array([_scaled(item["point_2d"], scale) for item in items])  # (M, 2)
    true_boxes = np.array(solution.boxes[:MAX_OBJECTS])  # (K, 4)
    true_points = np.array(solution.positive[:MAX_OBJECTS])  # (K, 2)
    with np.errstate(invalid="ignore", divide="ignore"):  # infinite coordinates: no pair is near
        box_distance = np.abs(boxes[:, None] - true_boxes).mean(2)  # (M, K)
        distance = np.linalg.norm(points[:, None] - true_points, axis=2)  # (M, K)
        iou = pixel_iou(boxes, true_boxes)  # (M, K)
    inside = ((points >= boxes[:, :2]) & (points <= boxes[:, 2:])).all(1)  # (M,)
    rewards = np.stack(
        [
            iou > MIN_IOU,
            box_distance < MAX_BOX_DISTANCE,
            (distance < MAX_POINT_DISTANCE) & inside[:, None],
        ]
    ).astype(float)  # (3, M, K)
    pairs = best_assignment(rewards.sum(0))
    sums = rewards[:, [m for m, _ in pairs], [k for _, k in pairs]].sum(1)  # (3,)
    means = sums / max(len(boxes), len(true_boxes))
    return dict(zip(PAIR_REWARDS, means.tolist()))


def pixel_iou(boxes: np.ndarray, true_boxes: np.ndarray) -> np.ndarray:
    """Return the IoU (M, K) of boxes (M, 4) and (K, 4) whose corners are pixels of the box."""
    a, b = boxes[:, None], true_boxes[None]  # (M, 1, 4), (1, K, 4)
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]) + 1
    intersection = np.maximum(sides, 0).prod(2)  # (M, K)
    area, true_area = ((box[..., 2:] - box[..., :2] + 1).prod(2) for box in (a, b))
    return intersection / (area + true_area - intersection)


def best_assignment(scores: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs (row, column) of the largest sum of scores (M, K), min(M, K) of them.

    The Hungarian method: rows are added one by one, each by the cheapest augmenting path under
    potentials of rows and columns, O(n^3).
    """
    if scores.shape[0] > scores.shape[1]:
        return sorted((m, k) for k, m in best_assignment(scores.T))
    costs = -np.asarray(scores, dtype=float)
    num_rows, num_columns = costs.shape
    row_potential, column_potential = np.zeros(num_rows), np.zeros(num_columns)
    row_of = np.full(num_columns, -1)  # of each column
    for new_row in range(num_rows):
        distance = np.full(num_columns, np.inf)  # of the cheapest path to each column
        before = np.full(num_columns, -1)  # the column before it on that path
        reached = np.zeros(num_columns, dtype=bool)
        row, column, so_far = new_row, -1, 0.0
        while row >= 0:
            through = so_far + costs[row] - row_potential[row] - column_potential
            shorter = ~reached & (through < distance)
            distance[shorter], before[shorter] = through[shorter], column
            column = int(np.where(reached, np.inf, distance).argmin())
            reached[column], so_far = True, distance[column]
            row = row_of[column]
        # Potentials keep the costs of matched pairs 0 and all others at least 0.
        for k in np.flatnonzero(reached):
            if row_of[k] >= 0:
                row_potential[row_of[k]] += so_far - distance[k]
            column_potential[k] -= so_far - distance[k]
        row_potential[new_row] += so_far
        while column >= 0:  # the path's pairs change places
            row_of[column] = row_of[before[column]] if before[column] >= 0 else new_row
            column = before[column]
    return sorted((int(row), k) for k, row in enumerate(row_of) if row >= 0)


def matched_box_iou(boxes: Sequence[Box], true_boxes: Sequence[Box]) -> float:
    """Return the sum of IoUs of the best assignment of M to K boxes, divided by max(M, K).

    Corners are edges here, not pixels. 0 without boxes on one side.
    """
    if not boxes or not true_boxes:
        return 0.0
    a, b = np.array(boxes)[:, None], np.array(true_boxes)[None]  # (M, 1, 4), (1, K, 4)
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    intersection = np.maximum(sides, 0).prod(2)  # (M, K)
    area, true_area = ((box[..., 2:] - box[..., :2]).prod(2) for box in (a, b))
    union = area + true_area - intersection
    iou = np.where(union > 0, intersection / np.where(union > 0, union, 1), 0.0)
    return float(sum(iou[m, k] for m, k in best_assignment(iou)) / max(iou.shape))


def _has_length(value: JsonValue, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def _scaled(values: Sequence[float], scale: Scale) -> tuple[float, ...]:
    return tuple(value * scale[k % 2] for k, value in enumerate(values))


def _segzero_iou(box: Sequence[float], true_box: Sequence[float]) -> float:
    """Return Seg-Zero's IoU: that of `pixel_iou`, but boxes must share more than an edge."""
    width = min(box[2], true_box[2]) - max(box[0], true_box[0])
    height = min(box[3], true_box[3]) - max(box[1], true_box[1])
    if not (width > 0 and height > 0):
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(pixel_iou(np.array([box], float), np.array([true_box], float))[0, 0])


def _mean_distance(points: Sequence[Point], true_points: Sequence[Point]) -> float:
    """Return the mean distance of two points to two others, in the better order."""
    (a, b), (c, d) = points, true_points
    straight = math.dist(a, c) + math.dist(b, d)
    crossed = math.dist(a, d) + math.dist(b, c)
    return min(straight, crossed) / 2


# {--reward_set: (rewards of (text, solution, scale), its components)}
Rewards = Callable[[str, PointPrompt, Scale], dict[str, float]]
REWARD_SETS: dict[str, tuple[Rewards, tuple[str, ...]]] = {
    "segzero": (segzero_rewards, ("thinking_format", "segmentation_format", *PAIR_REWARDS)),
    "visionreasoner": (
        visionreasoner_rewards,
        ("thinking_format", "segmentation_format", *PAIR_REWARDS, "non_repeat"),
    ),
}


def published_rewards(
    reward_set: str, texts: Sequence[str], solutions: Sequence[PointPrompt], scales: Sequence[Scale]
) -> dict[str, torch.Tensor]:
    """Return {component: (N,)} of N answers by the rewards of a name in REWARD_SETS."""
    rewards_of, components = REWARD_SETS[reward_set]
    rows = [rewards_of(*row) for row in zip(texts, solutions, scales, strict=True)]
    return {name: torch.tensor([row[name] for row in rows]) for name in components}
