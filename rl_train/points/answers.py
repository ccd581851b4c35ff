"""A box, positive and negative points as an answer, in pixels of the original image."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What SAM2 is prompted with. Coordinates are (x, y) and (x1, y1, x2, y2) floats in pixels of
    the original image, from its top left corner."""

    boxes: tuple[tuple[float, float, float, float], ...] = ()
    positive: tuple[tuple[float, float], ...] = ()
    negative: tuple[tuple[float, float], ...] = ()
