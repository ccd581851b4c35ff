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
    NO_ANSWER, TWO_ANSWERS, NO_JSON, WRONG_KEYS, NO_NUMBERS, OUTSIDE, TOO_MANY, NO_NEGATIVE,
) = (
    "no_answer", "two_answers", "no_json", "wrong_keys", "no_numbers", "outside", "too_many",
    "no_negative",
)  # fmt: skip
# Repairs with which an answer is parsed all the same; metrics count these words too.
REPAIRS = (CLIPPED, SWAPPED, NO_TAGS, CODE_FENCE, TEXT_AROUND) = (
    "clipped", "swapped_corners", "no_tags", "code_fence", "text_around",
)  # fmt: skip
# Repairs of the answer's form, for which the format reward pays no more than for being parsed.
UNTIDY = (NO_TAGS, CODE_FENCE, TEXT_AROUND)
CLIP_BEYOND = 0.05  # of a frame's side: farther outside, the coordinates are of another frame

# The frame of a text's coordinates: its largest x and y, or None = the size of the image as the
# language model sees it.
COORDINATE_SCALES = {"pixels": None, "unit": 1.0, "thousand": 1000.0}
# {style: keys that an object of its JSON must have}
KEYS = {
    "segzero": ("bbox", "points_1", "points_2"),
    "visionreasoner": ("bbox_2d", "point_2d"),
    "segzero_plus": ("bbox", "points"),
    "points": ("points",),
}
# {style: coordinates that it prescribes}. Others use the model's own: `qwen_vl_model.Version`.
STYLE_SCALES = {"segzero_plus": "unit"}
# The start of a style's JSON in a text.
JSON_STARTS = dict.fromkeys(KEYS, re.compile(r"\{")) | {
    "visionreasoner": re.compile(r"\[\s*\{|\A\s*\[\s*\]"),  # not the brackets of "[1]"
}
FENCE = re.compile(r"\s*```(?:json)?(.*?)(?:```\s*)?", re.DOTALL)
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
class ParsedAnswer:
    """Record of what a text says.

    Attributes:
        prompt: in pixels of the original image; None if the text cannot be parsed.
        reason: one of REASONS if it cannot be parsed, else "".
        repairs: those of REPAIRS that were needed.
    """

    prompt: PointPrompt | None
    reason: str = ""
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerFormat:
    """Format of a checkpoint's answers.

    Args:
        style: segzero (one box, two points), visionreasoner (a list of boxes with a point each),
            segzero_plus (one box and a list of points) or points (points and perhaps a box, as bare
            JSON without thoughts).
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
    ) -> ParsedAnswer:
        """Return what `text` says, in pixels of the original image.

        Args:
            seen_size: (H, W) of the image as the language model sees it; size: of the original.
        """
        width, height = self.limits(seen_size)
        try:
            prompt, repairs = self._parse(text, (width, height))
        except AnswerParseError as error:
            return ParsedAnswer(None, str(error))
        return ParsedAnswer(prompt.scaled(size[1] / width, size[0] / height), repairs=repairs)

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
        """Return the prompt that `text` holds, in its own frame.

        A repeated point counts once, in visionreasoner a repeated box with its point. Other keys
        than the style's are ignored. See REPAIRS for what is put right.

        Args:
            limits: the largest (x, y) of the frame.

        Raises:
            AnswerParseError: the text holds no valid answer.
        """
        return self._parse(text, limits)[0]

    def _parse(self, text: str, limits: tuple[float, float]) -> tuple[PointPrompt, tuple[str, ...]]:
        """Return (the prompt, repairs that were needed); see `parse`."""
        parsed, repairs = self._load(text)
        items = parsed if self.style == "visionreasoner" else [parsed]
        if not isinstance(items, list):
            raise AnswerParseError(WRONG_KEYS)
        groups = [self._boxes_and_points(item) for item in items]
        boxes = [box for item_boxes, _, _ in groups for box in item_boxes]
        positive = [point for _, points, _ in groups for point in points]
        negative = [point for _, _, points in groups for point in points]
        if len(boxes) + len(positive) + len(negative) > self.max_points:
            raise AnswerParseError(TOO_MANY)
        if self.negative_points == "required" and not negative:
            raise AnswerParseError(NO_NEGATIVE)
        stated = [_numbers(boxes, limits * 2), _numbers(positive, limits)]
        stated.append(_numbers(negative, limits))
        clipped = [_clip(stated[0], limits * 2), *(_clip(points, limits) for points in stated[1:])]
        ordered = [
            (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)) for x1, y1, x2, y2 in clipped[0]
        ]
        if clipped != stated:
            repairs.append(CLIPPED)
        if ordered != clipped[0]:
            repairs.append(SWAPPED)
        _, points, negatives = clipped
        if self.style == "visionreasoner":  # each box keeps its own point
            pairs = dict.fromkeys(zip(ordered, points))
            ordered, points = [box for box, _ in pairs], [point for _, point in pairs]
        else:
            ordered, points = dict.fromkeys(ordered), dict.fromkeys(points)
        prompt = PointPrompt(tuple(ordered), tuple(points), tuple(dict.fromkeys(negatives)))
        return prompt, tuple(repairs)

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
        elif self.style == "segzero_plus":
            content = {"bbox": prompt.boxes[0], "points": prompt.positive} | negatives
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

    def _load(self, text: str) -> tuple[JsonValue, list[str]]:
        """Return (the JSON of an answer, repairs that were needed). Raises AnswerParseError."""
        repairs = []
        if self.has_thoughts:
            text = text.split(THINK[1], 1)[-1]  # tags in thoughts do not count
            in_thoughts = THINK[0] in text  # which never end
            _, opened, behind = text.partition(ANSWER[0])
            if opened:
                text, closed, rest = behind.partition(ANSWER[1])
                if ANSWER[0] in rest:
                    raise AnswerParseError(TWO_ANSWERS)
            elif in_thoughts or not JSON_STARTS[self.style].search(text):
                raise AnswerParseError(NO_ANSWER)
            if not (opened and closed):
                repairs.append(NO_TAGS)
        if fenced := FENCE.fullmatch(text):
            text = fenced[1]
            repairs.append(CODE_FENCE)
        start = JSON_STARTS[self.style].search(text) if self.has_thoughts else None
        if start:
            if text[: start.start()].strip():
                repairs.append(TEXT_AROUND)
            text = text[start.start() :]
        text = text.strip()
        # json recurses at each bracket until Python's stack ends, so their number is limited first.
        if text.count("[") + text.count("{") > 2 * self.max_points + 4:
            raise AnswerParseError(TOO_MANY)
        try:
            parsed, end = JSON.raw_decode(text)
        except ValueError as error:  # also of a number with thousands of digits
            raise AnswerParseError(NO_JSON) from error
        if text[end:].strip():
            if not self.has_thoughts:
                raise AnswerParseError(NO_JSON)
            repairs.append(TEXT_AROUND)
        return parsed, list(dict.fromkeys(repairs))

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
            if self.style == "segzero_plus":
                (positive,) = positive
                if not positive:
                    raise AnswerParseError(WRONG_KEYS)
        if not isinstance(negative, list) or not isinstance(positive, list) or not boxes + positive:
            raise AnswerParseError(WRONG_KEYS)
        return boxes, positive, negative


def _numbers(items: list[JsonValue], limits: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return the points or boxes. Raises AnswerParseError unless all lie in or near the frame."""
    for values in items:
        is_list = isinstance(values, list) and len(values) == len(limits)
        if not is_list or not all(type(v) in (int, float) for v in values):  # True is an int
            raise AnswerParseError(NO_NUMBERS)
        beyond = [CLIP_BEYOND * limit for limit in limits]
        if not all(-far <= v <= limit + far for v, limit, far in zip(values, limits, beyond)):
            raise AnswerParseError(OUTSIDE)  # NaN and 1e999 too
    return [tuple(map(float, values)) for values in items]


def _clip(items: list[tuple[float, ...]], limits: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return the points or boxes with each coordinate in [0, limit]."""
    return [tuple(min(max(v, 0.0), float(n)) for v, n in zip(values, limits)) for values in items]


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict | None:
    """Return an object of JSON, None (which is no object) if a key occurs twice."""
    return dict(pairs) if len(dict(pairs)) == len(pairs) else None


JSON = json.JSONDecoder(object_pairs_hook=_unique_keys)
