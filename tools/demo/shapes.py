"""Pixels of the demo's scenes: backgrounds, the stamps of single shapes, and where they may go."""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw

MAX_TILT = 8.0  # degrees
SUPERSAMPLE = 4


def background(
    rng: np.random.Generator, tint: tuple[int, int, int], width: int, height: int
) -> Callable[[], np.ndarray]:
    """Draw a linear gradient in a random direction; return the function that computes its pixels.

    They are (H, W, 3) float. Most plans find no place for an object and need none.
    """
    angle, shade, contrast = rng.uniform(0, 2 * np.pi), rng.integers(-6, 7, 3), rng.uniform(10, 30)

    def pixels() -> np.ndarray:
        y, x = np.mgrid[0:height, 0:width]
        slope = np.cos(angle) * (x / width - 0.5) + np.sin(angle) * (y / height - 0.5)
        return np.array(tint) + shade + contrast * slope[..., None]

    return pixels


def stamp(rng: np.random.Generator, shape: str, diameter: float) -> np.ndarray:
    """Draw a shape alone: (h, w) float in 0..1 with smooth edges, cropped to its own pixels."""
    side = int(np.ceil(diameter * 1.3)) + 2  # room for corners and tilt
    big = Image.new("L", (side * SUPERSAMPLE,) * 2)
    draw = ImageDraw.Draw(big)
    centre, radius = side * SUPERSAMPLE / 2, diameter * SUPERSAMPLE / 2
    if shape == "circle":
        low, high = centre - radius, centre + radius
        draw.ellipse([low, low, high, high], fill=255)
    else:
        tilt = np.deg2rad(rng.uniform(-MAX_TILT, MAX_TILT))
        rotation = np.array([[np.cos(tilt), np.sin(tilt)], [-np.sin(tilt), np.cos(tilt)]])
        points = centre + radius * np.array(_outline(shape)) @ rotation
        draw.polygon([tuple(p) for p in points], fill=255)
    alpha = np.asarray(big.reduce(SUPERSAMPLE), dtype=np.float64) / 255
    rows, cols = np.nonzero(alpha.any(1))[0], np.nonzero(alpha.any(0))[0]
    return alpha[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]


def pattern(rng: np.random.Generator, name: str, shape: tuple[int, int], stripe: int) -> np.ndarray:
    """Return (h, w) bool: where a shape of that pattern has its second tone.

    Args:
        stripe: pixels that a stripe, a band or a field is wide.
    """
    start = rng.integers(0, 2 * stripe, 2)
    rows, cols = np.ogrid[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
    lines = dict(plain=0 * rows + 0 * cols, ruled=rows // stripe + 0 * cols)
    lines |= dict(striped=cols // stripe + 0 * rows, checked=rows // stripe + cols // stripe)
    return lines[name] % 2 == 1


def _outline(shape: str) -> list[tuple[float, float]]:
    """Return corners (x, y) of a polygon in units of the object's radius, y downwards."""
    if shape == "square":
        return [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)]
    if shape == "triangle":
        return [(0, -1), (1, 0.8), (-1, 0.8)]
    assert shape == "cross", shape
    a, b = 0.32, 1.0
    corner = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a)]
    return corner + [(-x, -y) for x, y in corner]


def place(
    rng: np.random.Generator, shape: tuple[int, int], width: int, height: int
) -> tuple[slice, slice]:
    """Choose a window of `shape` (h, w) in the image, at least two pixels off the border."""
    top, left = rng.integers(2, height - shape[0] - 1), rng.integers(2, width - shape[1] - 1)
    return np.s_[top : top + shape[0], left : left + shape[1]]
