"""Answers and solutions as Seg-Zero's and VisionReasoner's own code reads them.

It reads more, and less, than `parser` does: the first JSON that it finds, also in thoughts, without
a limit on the number of points or on their place, and nothing that `json` refuses. Their rewards
and their evaluation are made of it.

Frame: their images are 840 x 840 pixels, in which coordinates are stated.
"""

import json
import math
import re
from collections.abc import Callable

from rl_train.points.parser import Box, JsonValue, Point, PointPrompt

FRAME = 840  # pixels of a side
MAX_DEPTH = 50  # brackets in brackets; json would recurse until Python's stack ends
FIRST_OBJECT = re.compile(r"{[^}]+}")  # Seg-Zero's answer, wherever it stands
TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)  # VisionReasoner's
SEGZERO_BOX = re.compile(r"<box>\((\d+),(\d+)\),\((\d+),(\d+)\)</box>")
SEGZERO_POINTS = re.compile(r"<points>\((\d+),(\d+)\),\((\d+),(\d+)\)</points>")


def load_answer(text: str, style: str) -> JsonValue:
    """Return the JSON that the published code of a style finds in a text, None without any."""
    if style == "segzero":
        match, group = FIRST_OBJECT.search(text), 0
    else:
        match, group = TAGGED.search(text), 1
    return load_json(match[group]) if match and match[group] else None


def load_json(text: str) -> JsonValue:
    """Return the JSON of a text, None if it holds none or one of more than MAX_DEPTH levels."""
    depth = deepest = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_numbers(value: JsonValue, count: int) -> bool:
    """Return whether a value is a list of `count` numbers with which numpy can compute."""
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(
        isinstance(v, float) or type(v) in (int, bool) and abs(v) < 2**63 for v in value
    )


def parse_solution(solution: str) -> PointPrompt:
    """Return the boxes and points of the column `solution`, in pixels of a frame of FRAME.

    Seg-Zero's is "<box>(x1,y1),(x2,y2)</box><points>(x,y),(x,y)</points>", VisionReasoner's a JSON
    list of {"bbox_2d": [x1, y1, x2, y2], "point_2d": [x, y]}.

    Raises:
        ValueError: it is neither, or holds no box.
    """
    box, points = SEGZERO_BOX.search(solution), SEGZERO_POINTS.search(solution)
    if box and points:
        x1, y1, x2, y2 = map(float, points.groups())
        return PointPrompt((tuple(map(float, box.groups())),), ((x1, y1), (x2, y2)))
    items = load_json(solution)
    is_list = isinstance(items, list) and items and all(isinstance(item, dict) for item in items)
    if is_list:
        boxes, points = [[item.get(key) for item in items] for key in ("bbox_2d", "point_2d")]
        if all(is_numbers(b, 4) for b in boxes) and all(is_numbers(p, 2) for p in points):
            return PointPrompt(
                tuple(tuple(map(float, b)) for b in boxes),
                tuple(tuple(map(float, p)) for p in points),
            )
    raise ValueError(f"{solution[:80]!r} is no solution of Seg-Zero or VisionReasoner")


def prompts_of_evaluation(
    text: str, style: str, seen_size: tuple[int, int], size: tuple[int, int]
) -> list[PointPrompt] | None:
    """Return the prompts that the published evaluation of a style gives to SAM2, one after another.

    Their coordinates are whole pixels of the original image. VisionReasoner's are a box with its
    point for each item, Seg-Zero's one box with two points. None: no such answer.

    Args:
        seen_size: (H, W) of the image as the language model sees it; size: of the original.
    """
    scale_x, scale_y = size[1] / seen_size[1], size[0] / seen_size[0]
    answer = load_answer(text, style)
    if style == "segzero":
        return _segzero_prompt(answer, scale_x, scale_y)
    if not isinstance(answer, list):
        return None
    prompts = []
    for item in answer:
        is_item = isinstance(item, dict) and {"bbox_2d", "point_2d"} <= item.keys()
        if not is_item or not is_finite(item["bbox_2d"], 4) or not is_finite(item["point_2d"], 2):
            return None

        def pixel(value: float, scale: float) -> float:
            return float(int(value * scale + 0.5))  # rounds towards 0

        box = _scaled(item["bbox_2d"][:4], pixel, scale_x, scale_y)
        prompts.append(
            PointPrompt((box,), (_scaled(item["point_2d"][:2], pixel, scale_x, scale_y),))
        )
    return prompts


def _segzero_prompt(answer: JsonValue, scale_x: float, scale_y: float) -> list[PointPrompt] | None:
    """Return the one prompt of Seg-Zero's answer: the first box and the first two points."""
    if not isinstance(answer, dict):
        return None
    boxes = [value for key, value in answer.items() if "bbox" in key.lower()][:1]
    points = [value for key, value in answer.items() if "points" in key.lower()][:2]
    is_box = len(boxes) == 1 and is_finite(boxes[0], 4) and len(boxes[0]) == 4
    if not is_box or len(points) < 2 or not all(is_finite(point, 2) for point in points):
        return None

    def pixel(value: float, scale: float) -> float:
        return float(round(int(value) * scale))

    box = _scaled(boxes[0], pixel, scale_x, scale_y)
    positive = tuple(_scaled(point[:2], pixel, scale_x, scale_y) for point in points)
    return [PointPrompt((box,), positive)]


def is_finite(value: JsonValue, count: int) -> bool:
    """Return whether a value is a list that begins with `count` numbers that are finite."""
    if not isinstance(value, list) or not is_numbers(value[:count], count):
        return False
    return all(math.isfinite(number) for number in value[:count])


def _scaled(
    values: list[float], pixel: Callable[[float, float], float], scale_x: float, scale_y: float
) -> Box | Point:
    """Return a box or point in whole pixels of the original image."""
    return tuple(pixel(value, (scale_x, scale_y)[k % 2]) for k, value in enumerate(values))
