"""Pixels of the demo's scenes: backgrounds, the stamps of single shapes, and where they may go."""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw

MAX_TILT = 8.0  # degrees; 45 would turn a square into a diamond
SUPERSAMPLE = 4
HOLE = 0.5  # of a ring's radius
DOT = 0.36  # radius of a dot, of the distance between two


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
    if shape in ("circle", "ring"):
        for part, fill in ((1, 255), (HOLE, 0))[: 1 + (shape == "ring")]:
            low, high = centre - part * radius, centre + part * radius
            draw.ellipse([low, low, high, high], fill=fill)
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
    if name == "dotted":
        up, left = (((k + 0.5) / stripe) % 2 - 1 for k in (rows, cols))  # of each dot's centre
        return up**2 + left**2 < (2 * DOT) ** 2
    lines = dict(plain=0 * rows + 0 * cols, ruled=rows // stripe + 0 * cols)
    lines |= dict(striped=cols // stripe + 0 * rows, checked=rows // stripe + cols // stripe)
    lines |= dict(hatched=(rows + cols) // stripe)
    return lines[name] % 2 == 1


def _outline(shape: str) -> list[tuple[float, float]]:
    """Return corners (x, y) of a polygon in units of the object's radius, y downwards."""
    if shape == "square":
        return [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)]
    if shape == "triangle":
        return [(0, -1), (1, 0.8), (-1, 0.8)]
    if shape == "diamond":
        return [(0, -1), (0.72, 0), (0, 1), (-0.72, 0)]
    if shape == "star":
        polar = [(np.pi * k / 5, 0.42 if k % 2 else 1.0) for k in range(10)]
        return [(r * np.sin(angle), -r * np.cos(angle)) for angle, r in polar]
    if shape == "arrow":
        right = [(0, -1), (0.9, 0), (0.36, 0), (0.36, 1)]
        return right + [(-x, y) for x, y in right[:0:-1]]
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
