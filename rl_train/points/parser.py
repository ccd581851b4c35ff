"""Boxes and points as a language model's answer: the record, its text and the parser.

An answer is parsed by `json` alone and never evaluated. Coordinates are (x, y) and
(x1, y1, x2, y2), from the top left corner.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

THINK, ANSWER = ("<think>", "</think>"), ("<answer>", "</answer>")
WELL_FORMED = r"\s*<think>((?!</think>).)*</think>\s*<answer>((?!<answer>).)*</answer>\s*"
NEGATIVES = "negative_points"  # the key that is added to what a published checkpoint answers

# Reasons why an answer is not parsed; metrics count these words.
REASONS = (
    NO_ANSWER, TWO_ANSWERS, NO_JSON, WRONG_KEYS, NO_NUMBERS, OUTSIDE, SWAPPED,
    TOO_MANY, NO_NEGATIVE,
) = (
    "no_answer", "two_answers", "no_json", "wrong_keys", "no_numbers", "outside", "swapped_corners",
    "too_many", "no_negative",
)  # fmt: skip

# The frame of a text's coordinates: its largest x and y, or None = the size of the image as the
# language model sees it.
COORDINATE_SCALES = {"pixels": None, "unit": 1.0, "thousand": 1000.0}
# {style: keys that an object of its JSON must have}
KEYS = {
    "segzero": ("bbox", "points_1", "points_2"),
    "visionreasoner": ("bbox_2d", "point_2d"),
    "points": ("points",),
}
STYLES, NEGATIVE_POINTS = tuple(KEYS), ("off", "optional", "required")

JsonValue = dict | list | str | float | bool | None
Point = tuple[float, float]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class PointPrompt:
    """Prompt of SAM2, in pixels of the original image (W, H) unless another frame is named."""

    boxes: tuple[Box, ...] = ()
    positive: tuple[Point, ...] = ()
    negative: tuple[Point, ...] = ()

    def map(self, change: Callable[[tuple], tuple]) -> "PointPrompt":
        """Return the prompt with each box and point changed."""
        return PointPrompt(
            boxes=tuple(map(change, self.boxes)),
            positive=tuple(map(change, self.positive)),
            negative=tuple(map(change, self.negative)),
        )

    def scaled(self, x: float, y: float) -> "PointPrompt":
        """Return the same prompt in a frame whose unit is 1/x as wide and 1/y as high."""
        return self.map(lambda values: tuple(v * (x, y)[k % 2] for k, v in enumerate(values)))


class AnswerParseError(ValueError):
    """Error of a text that is no valid answer; the message is one of REASONS."""


@dataclass(frozen=True)
class AnswerFormat:
    """Format of a checkpoint's answers.

    Args:
        style: segzero (one box, two points), visionreasoner (a list of boxes with a point each) or
            points (points and perhaps a box, as bare JSON without thoughts).
        negative_points: off, optional or required; where off, they are ignored.
        coordinate_scale: one of COORDINATE_SCALES.
        max_points: boxes, positive and negative points that an answer may have in all.
    """

    style: str = "segzero"
    negative_points: str = "off"
    coordinate_scale: str = "pixels"
    max_points: int = 8

    @property
    def has_thoughts(self) -> bool:
        """True if answers stand in <answer> tags, behind thoughts in <think> tags."""
        return self.style != "points"

    @property
    def with_negatives(self) -> bool:
        return self.negative_points != "off"

    def limits(self, seen_size: tuple[int, int]) -> tuple[float, float]:
        """Return the largest (x, y) of a text about an image that the model sees as (H, W)."""
        largest = COORDINATE_SCALES[self.coordinate_scale]
        return (largest, largest) if largest else seen_size[::-1]

    def parse_in_pixels(
        self, text: str, seen_size: tuple[int, int], size: tuple[int, int]
    ) -> tuple[PointPrompt | None, str]:
        """Return (the prompt in pixels of the original image, "") or (None, the reason).

        Args:
            seen_size: (H, W) of the image as the language model sees it; size: of the original.
        """
        width, height = self.limits(seen_size)
        try:
            prompt = self.parse(text, (width, height))
        except AnswerParseError as error:
            return None, str(error)
        return prompt.scaled(size[1] / width, size[0] / height), ""

    def in_frame(
        self, prompt: PointPrompt, seen_size: tuple[int, int], size: tuple[int, int]
    ) -> PointPrompt:
        """Return a prompt in pixels of the original image in the text's frame, rounded.

        Args: see `parse_in_pixels`.
        """
        width, height = self.limits(seen_size)
        digits = 3 if self.coordinate_scale == "unit" else 0
        scaled = prompt.scaled(width / size[1], height / size[0])
        return scaled.map(lambda values: tuple(round(value, digits) for value in values))

    def parse(self, text: str, limits: tuple[float, float]) -> PointPrompt:
        """Return the prompt that `text` holds, in its own frame. A repeated point counts once.

        Other keys than the style's are ignored.

        Args:
            limits: the largest (x, y) of the frame.

        Raises:
            AnswerParseError: the text holds no valid answer.
        """
        parsed = self._load(text)
        items = parsed if self.style == "visionreasoner" else [parsed]
        if not isinstance(items, list):
            raise AnswerParseError(WRONG_KEYS)
        groups = [self._boxes_and_points(item) for item in items]
        boxes = [box for item_boxes, _, _ in groups for box in item_boxes]
        positive = [point for _, points, _ in groups for point in points]
        negative = [point for _, _, points in groups for point in points]
        if len(boxes) + len(positive) + len(negative) > self.max_points:
            raise AnswerParseError(TOO_MANY)
        prompt = PointPrompt(
            boxes=_coordinates(boxes, limits * 2),
            positive=_coordinates(positive, limits),
            negative=_coordinates(negative, limits),
        )
        if any(x1 > x2 or y1 > y2 for x1, y1, x2, y2 in prompt.boxes):
            raise AnswerParseError(SWAPPED)
        if self.negative_points == "required" and not negative:
            raise AnswerParseError(NO_NEGATIVE)
        return prompt

    def format(self, prompt: PointPrompt, thought: str = "") -> str:
        """Return the answer that says `prompt`, whose coordinates are of the text's frame.

        Answers of segzero have one box and two points, of visionreasoner a box for each point.
        """
        # Whole numbers without ".0", as published answers have them.
        prompt = prompt.map(lambda values: tuple(int(v) if v == int(v) else v for v in values))
        negatives = {NEGATIVES: prompt.negative} if self.with_negatives else {}
        if self.style == "segzero":
            values = dict(zip(KEYS["segzero"], prompt.boxes + prompt.positive, strict=True))
            content = values | negatives
        elif self.style == "visionreasoner":
            pairs = zip(prompt.boxes, prompt.positive, strict=True)
            content = [dict(zip(KEYS["visionreasoner"], pair)) for pair in pairs]
            if content:
                # The points of a whole answer stand in its first object.
                content[0] |= negatives
        else:
            box = {"bbox": prompt.boxes[0]} if prompt.boxes else {}
            content = {"points": prompt.positive} | negatives | box
        text = json.dumps(content)
        if not self.has_thoughts:
            return text
        return f"{THINK[0]}{thought}{THINK[1]}{ANSWER[0]}{text}{ANSWER[1]}"

    def is_well_formed(self, text: str) -> bool:
        """Return True if thoughts and answer stand in their tags, with nothing around them."""
        return not self.has_thoughts or bool(re.fullmatch(WELL_FORMED, text, re.DOTALL))

    def _load(self, text: str) -> JsonValue:
        """Return the JSON of an answer. Raises AnswerParseError."""
        if self.has_thoughts:
            after_thoughts = text.split(THINK[1], 1)[-1]  # tags in thoughts do not count
            text, ended, rest = after_thoughts.partition(ANSWER[0])[2].partition(ANSWER[1])
            if not ended:
                raise AnswerParseError(NO_ANSWER)
            if ANSWER[0] in rest:
                raise AnswerParseError(TWO_ANSWERS)
        # json recurses at each bracket until Python's stack ends, so their number is limited first.
        if text.count("[") + text.count("{") > 2 * self.max_points + 4:
            raise AnswerParseError(TOO_MANY)
        try:
            return json.loads(text, object_pairs_hook=_unique_keys)
        except ValueError as error:  # also of a number with thousands of digits
            raise AnswerParseError(NO_JSON) from error

    def _boxes_and_points(self, item: JsonValue) -> tuple[list, list, list]:
        """Return (boxes, positive, negative points) of a JSON object. Raises AnswerParseError."""
        if not isinstance(item, dict) or not item.keys() >= set(KEYS[self.style]):
            raise AnswerParseError(WRONG_KEYS)
        negative = item.get(NEGATIVES, []) if self.with_negatives else []
        if self.style == "points":
            boxes, positive = [item["bbox"]] if "bbox" in item else [], item["points"]
        else:
            box, *positive = (item[key] for key in KEYS[self.style])
            boxes = [box]
        if not isinstance(negative, list) or not isinstance(positive, list) or not boxes + positive:
            raise AnswerParseError(WRONG_KEYS)
        return boxes, positive, negative


def _coordinates(
    items: list[JsonValue], limits: tuple[float, ...]
) -> tuple[tuple[float, ...], ...]:
    """Return the distinct points or boxes. Raises AnswerParseError unless all in [0, limit]."""
    for values in items:
        is_list = isinstance(values, list) and len(values) == len(limits)
        if not is_list or not all(type(v) in (int, float) for v in values):  # True is an int
            raise AnswerParseError(NO_NUMBERS)
        if not all(0 <= v <= limit for v, limit in zip(values, limits)):  # nor NaN, nor 1e999
            raise AnswerParseError(OUTSIDE)
    return tuple(dict.fromkeys(tuple(map(float, values)) for values in items))


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict | None:
    """Return an object of JSON, None (which is no object) if a key occurs twice."""
    return dict(pairs) if len(dict(pairs)) == len(pairs) else None
