"""A box, positive and negative points as an answer: the record, its text, and what reads a text.

What a model says is read by `json` alone and never evaluated. Coordinates are (x, y) and
(x1, y1, x2, y2), from the top left corner.
"""

import json
from dataclasses import dataclass

THINK, ANSWER = ("<think>", "</think>"), ("<answer>", "</answer>")
NEGATIVES = "negative_points"  # the key that is added to what a published checkpoint answers
# Why an answer is refused; curves count these words.
NO_ANSWER, TWO_ANSWERS, NO_JSON = "no_answer", "two_answers", "no_json"
WRONG_KEYS, NO_NUMBERS, OUTSIDE = "wrong_keys", "no_numbers", "outside"
SWAPPED, TOO_MANY, NO_NEGATIVE = "swapped_corners", "too_many", "no_negative"
REASONS = (NO_ANSWER, TWO_ANSWERS, NO_JSON, WRONG_KEYS, NO_NUMBERS, OUTSIDE)
REASONS += (SWAPPED, TOO_MANY, NO_NEGATIVE)

# The frame of a text's coordinates: its largest x and y, or None = the size of the image as the
# language model sees it.
FRAMES = {"pixels": None, "unit": 1.0, "thousand": 1000.0}
STYLES, NEGATIVE_POINTS = ("segzero", "visionreasoner", "points"), ("off", "optional", "required")

Point = tuple[float, float]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Answer:
    """What SAM2 is prompted with: in pixels of the original image, unless another frame is named.

    That is the frame of the sample's mask, (W, H) pixels.
    """

    boxes: tuple[Box, ...] = ()
    positive: tuple[Point, ...] = ()
    negative: tuple[Point, ...] = ()

    def scaled(self, x: float, y: float) -> "Answer":
        """The same in a frame whose unit is 1/x as wide and 1/y as high."""

        def times(values):
            return tuple(value * (x, y)[k % 2] for k, value in enumerate(values))

        kinds = (self.boxes, self.positive, self.negative)
        return Answer(*(tuple(map(times, kind)) for kind in kinds))


class Refused(ValueError):
    """A text is no answer; the message is one of REASONS."""


@dataclass(frozen=True)
class Form:
    """How a checkpoint answers.

    Args:
        style: segzero (one box, two points), visionreasoner (a list of boxes with a point each) or
            points (points and perhaps a box, as bare JSON without thoughts).
        negative_points: off, optional or required; where off, they are not read.
        frame: one of FRAMES.
        max_points: boxes, positive and negative points that an answer may have in all.
    """

    style: str = "segzero"
    negative_points: str = "off"
    frame: str = "pixels"
    max_points: int = 8

    @property
    def thinks(self) -> bool:
        """Whether answers stand in <answer> tags, behind thoughts in <think> tags."""
        return self.style != "points"

    @property
    def with_negatives(self) -> bool:
        return self.negative_points != "off"

    def read(self, text: str, seen: tuple, size: tuple) -> tuple[Answer | None, str]:
        """(the answer in pixels of the original image, "") or (None, why it is refused).

        Args:
            seen: (H, W) of the image as the language model sees it; size: of the original.
        """
        largest = FRAMES[self.frame]
        limits = (largest, largest) if largest else seen[::-1]
        try:
            answer = self.parse(text, limits)
        except Refused as refused:
            return None, str(refused)
        return answer.scaled(size[1] / limits[0], size[0] / limits[1]), ""

    def stated(self, answer: Answer, seen: tuple, size: tuple) -> Answer:
        """The answer, in pixels of the original image, as a text of this form states it.

        Rounded, in the frame. Args: see `read`.
        """
        largest = FRAMES[self.frame]
        x, y = (largest, largest) if largest else seen[::-1]
        scaled, digits = answer.scaled(x / size[1], y / size[0]), 3 if largest == 1 else 0
        kinds = (scaled.boxes, scaled.positive, scaled.negative)
        return Answer(*(tuple(_rounded(one, digits) for one in kind) for kind in kinds))

    def parse(self, text: str, limits: tuple[float, float]) -> Answer:
        """The answer that `text` states, in its own frame; a point that is stated twice is one.

        Other keys than the style's are left unread.

        Args:
            limits: the largest (x, y) of the frame.

        Raises:
            Refused: it states none, or one that is not to be used.
        """
        stated = self._json(text)
        if self.style == "visionreasoner":
            if not isinstance(stated, list):
                raise Refused(WRONG_KEYS)
            parts = [self._item(item) for item in stated]
        else:
            parts = [self._item(stated)]
        boxes, positive, negative = (sum(kind, []) for kind in zip(*parts)) if parts else ([],) * 3
        if len(boxes) + len(positive) + len(negative) > self.max_points:
            raise Refused(TOO_MANY)
        boxes = [_numbers(box, limits * 2) for box in boxes]
        positive, negative = ([_numbers(p, limits) for p in kind] for kind in (positive, negative))
        if any(x1 > x2 or y1 > y2 for x1, y1, x2, y2 in boxes):
            raise Refused(SWAPPED)
        if self.negative_points == "required" and not negative:
            raise Refused(NO_NEGATIVE)
        return Answer(*(tuple(dict.fromkeys(kind)) for kind in (boxes, positive, negative)))

    def format(self, answer: Answer, thought: str = "") -> str:
        """The text that states `answer`, whose coordinates are of the text's frame.

        Answers of segzero have one box and two points, of visionreasoner a box for each point.
        """
        boxes, positive, negative = (
            [[int(n) if n == int(n) else n for n in one] for one in kind]
            for kind in (answer.boxes, answer.positive, answer.negative)
        )
        more = {NEGATIVES: negative} if self.with_negatives else {}
        if self.style == "segzero":
            [box], (first, second) = boxes, positive
            stated = dict(bbox=box, points_1=first, points_2=second, **more)
        elif self.style == "visionreasoner":
            pairs = zip(boxes, positive, strict=True)
            stated = [dict(bbox_2d=box, point_2d=point) for box, point in pairs]
            if stated:
                stated[0] |= more
        else:
            stated = dict(points=positive, **more) | ({"bbox": boxes[0]} if boxes else {})
        text = json.dumps(stated)
        if not self.thinks:
            return text
        return f"{THINK[0]}{thought}{THINK[1]}{ANSWER[0]}{text}{ANSWER[1]}"

    def in_form(self, text: str) -> bool:
        """Whether thoughts and answer stand in their tags, with nothing around them."""
        if not self.thinks:
            return True
        thoughts, closed, rest = text.strip().partition(THINK[1])
        rest = rest.strip()
        tags = thoughts.startswith(THINK[0]) and rest.startswith(ANSWER[0])
        return tags and bool(closed) and rest.endswith(ANSWER[1]) and rest.count(ANSWER[0]) == 1

    def _json(self, text: str):
        """The JSON of an answer. Raises Refused."""
        if self.thinks:
            _, closed, behind = text.partition(THINK[1])  # what is thought is no answer
            _, opened, text = (behind if closed else text).partition(ANSWER[0])
            text, ended, rest = text.partition(ANSWER[1])
            if not (opened and ended):
                raise Refused(NO_ANSWER)
            if ANSWER[0] in rest:
                raise Refused(TWO_ANSWERS)
        # Before it is read: json follows brackets into the depth until Python's stack ends.
        if text.count("[") + text.count("{") > 2 * self.max_points + 4:
            raise Refused(TOO_MANY)
        try:
            return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
        except Refused:
            raise
        except ValueError as error:  # also of a number with thousands of digits
            raise Refused(NO_JSON) from error

    def _item(self, stated) -> tuple[list, list, list]:
        """(boxes, positive, negative points) of one object of JSON. Raises Refused."""
        if not isinstance(stated, dict):
            raise Refused(WRONG_KEYS)
        negative = stated.get(NEGATIVES, []) if self.with_negatives else []
        keys = dict(
            segzero=("bbox", "points_1", "points_2"),
            visionreasoner=("bbox_2d", "point_2d"),
            points=("points",),
        )[self.style]
        if not isinstance(negative, list) or not stated.keys() >= set(keys):
            raise Refused(WRONG_KEYS)
        if self.style == "points":
            boxes = [stated["bbox"]] if "bbox" in stated else []
            if not isinstance(stated["points"], list) or not boxes + stated["points"]:
                raise Refused(WRONG_KEYS)
            return boxes, stated["points"], negative
        box, *points = (stated[key] for key in keys)
        return [box], points, negative


def _rounded(numbers: tuple[float, ...], digits: int) -> tuple[float, ...]:
    return tuple(round(number, digits) for number in numbers)


def _numbers(values, limits: tuple[float, ...]) -> tuple[float, ...]:
    """The coordinates of a point or box. Raises Refused unless each is in [0, limit]."""
    if not isinstance(values, list) or len(values) != len(limits):
        raise Refused(NO_NUMBERS)
    if not all(type(value) in (int, float) for value in values):  # True is an int, too
        raise Refused(NO_NUMBERS)
    if not all(0 <= value <= limit for value, limit in zip(values, limits)):  # 1e999 is infinite
        raise Refused(OUTSIDE)
    return tuple(map(float, values))


def _refuse(constant: str):
    """What `json` calls for NaN, Infinity and -Infinity, which JSON has not."""
    raise Refused(NO_NUMBERS)


def _once(pairs: list[tuple[str, object]]) -> dict:
    """An object of JSON, whose keys occur once each. Raises Refused."""
    if len(dict(pairs)) < len(pairs):
        raise Refused(WRONG_KEYS)
    return dict(pairs)
