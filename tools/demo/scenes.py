"""Drawn scenes for the demo: objects of several patterns, colours, shapes and sizes, and captions.

Everything follows from a seed: scene i of split s is `make_scene(seed, s, i)`, whatever was drawn
before it. No attribute alone tells an object from the others of its scene: its pattern, its colour
and its shape are each shared by another object. All together tell it from all others. Captions are
of the same words but for these. Objects are apart and of sizes 1 to 4. 38 of the 128 combinations
of values are kept for held-out scenes, where half of the objects or more are of these.

H, W = image height and width in pixels; positions are (x, y) in pixels, x to the right.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from tools.demo.shapes import background, pattern, place, stamp

Result = TypeVar("Result")
TRAIN, HELDOUT, WARM_START = 0, 1, 2  # split numbers of make_scene
PATTERNS = ("plain", "striped", "ruled", "checked")
COLORS = {
    "red": (214, 36, 40),
    "green": (36, 150, 62),
    "blue": (36, 76, 214),
    "yellow": (246, 220, 36),
    "purple": (142, 52, 176),
    "orange": (246, 132, 20),
    "black": (22, 22, 22),
    "white": (252, 252, 252),
}
SHAPES = ("circle", "square", "triangle", "cross")
BACKGROUNDS = {
    "grey": (182, 182, 182),
    "beige": (198, 186, 164),
    "bluish": (168, 182, 202),
    "greenish": (172, 192, 172),
    "pinkish": (204, 178, 184),
}

# Of a pattern's second tone: towards black, of a paint darker than GREY towards white.
CONTRAST, GREY = 0.45, 100
GAP = 3  # pixels between objects that are apart, at least
COLOR_JITTER = 10  # of 255, per object and channel
TRIES = 30  # places for one object, before the scene is drawn again


# The values of each attribute, in the order of a caption
ATTRIBUTES = dict(pattern=PATTERNS, color=tuple(COLORS), shape=SHAPES)
NUM_OBJECTS = (4, 5)
IMAGE_SIZES = ((256, 256), (320, 240), (240, 320), (288, 240))  # (W, H)
DIAMETERS = (0.15, 0.6)  # of an object, of min(H, W), evenly spread on a logarithmic scale
STRIPE = 5  # pixels that a stripe of a pattern is wide


@dataclass(frozen=True)
class Object:
    """One drawn object."""

    pattern: str
    color: str
    shape: str
    mask: np.ndarray  # (H, W) bool

    @property
    def attributes(self) -> tuple[str, ...]:
        """Return the values of the attributes, in the order of a caption."""
        return self.pattern, self.color, self.shape

    @property
    def caption(self) -> str:
        return caption(*self.attributes)


@dataclass(frozen=True)
class Scene:
    """A drawn image and its objects."""

    image: Image.Image  # RGB
    objects: tuple[Object, ...]


@dataclass(frozen=True)
class Stamp:
    """Paint of one object.

    Attributes:
        box: window of the canvas, (h, w).
        alpha: (h, w) in 0..1.
        tones: (h, w) bool: where the second paint is.
        paint, second: (3,) RGB in 0..255.
    """

    box: tuple[slice, slice]
    alpha: np.ndarray
    tones: np.ndarray
    paint: np.ndarray
    second: np.ndarray


def caption(*values: str) -> str:
    """Return the sentence that states these values of the attributes."""
    return f"A {' '.join(values)}."


def is_heldout(values: tuple[str, ...]) -> bool:
    """Return whether a combination of values is kept for held-out scenes, as 38 of 128 are."""
    digest = blake2b(" ".join(values).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") % 4 == 0


def make_scene(seed: int, split: int, index: int) -> Scene:
    """Draw scene `index` of split number `split`; the same numbers give the same pixels."""
    return draw_scene(np.random.default_rng([seed, split, index]), split == HELDOUT)


def in_order(function: Callable[[int], Result], number: int, workers: int = 0) -> Iterator[Result]:
    """Yield function(i) for i below `number`, computed by `workers` processes; 0: by this one.

    The function is pickled, so it is one of a module, or a partial of one.
    """
    if not workers:
        yield from map(function, range(number))
        return
    # A fork may not begin a parallel region of OpenMP after its parent has.
    with multiprocessing.get_context("fork").Pool(workers, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(function, range(number), chunksize=4)


def draw_scene(rng: np.random.Generator, heldout: bool = False) -> Scene:
    """Draw a scene, again from `rng` until its objects fit.

    Args:
        heldout: whether half of the objects or more are of held-out combinations, else none is.
    """
    while True:
        plan, scene = _plan(rng), None
        num_new = sum(map(is_heldout, plan))
        suits = 2 * num_new >= len(plan) if heldout else num_new == 0
        if suits and len(set(plan)) == len(plan):
            scene = _draw(rng, plan)
        if scene is not None:
            return scene


def _plan(rng) -> list[tuple[str, ...]]:
    """Return the attributes of each object; every value that occurs does so twice or more."""
    number = int(rng.choice(NUM_OBJECTS))
    return list(zip(*(_shared(rng, values, number) for values in ATTRIBUTES.values())))


def _shared(rng, values, number: int) -> list[str]:
    """Return `number` of the values in random order, each at least twice."""
    used = rng.permutation(values)[: rng.integers(2, number // 2 + 1)].tolist()
    return rng.permutation(used * 2 + rng.choice(used, number - 2 * len(used)).tolist()).tolist()


def _draw(rng, plan) -> Scene | None:
    """Draw objects with these attributes; return None if one finds no place."""
    width, height = IMAGE_SIZES[rng.integers(len(IMAGE_SIZES))]
    empty = background(rng, BACKGROUNDS[str(rng.choice(list(BACKGROUNDS)))], width, height)
    occupied, objects, stamps = np.zeros((height, width), dtype=bool), [], []
    for values in plan:
        obj = Object(mask=np.zeros((height, width), dtype=bool), **dict(zip(ATTRIBUTES, values)))
        diameter = np.exp(rng.uniform(*np.log(DIAMETERS))) * min(width, height)
        alpha = stamp(rng, obj.shape, diameter)  # (h, w) in 0..1
        for _ in range(TRIES):
            box = place(rng, alpha.shape, width, height)
            around = tuple(slice(max(s.start - GAP, 0), s.stop + GAP) for s in box)
            if not occupied[around].any():
                break
        else:
            return None
        obj.mask[box] = alpha >= 0.5
        occupied[box] = True
        jitter = rng.integers(-COLOR_JITTER, COLOR_JITTER + 1, 3)
        paint = np.clip(np.array(COLORS[obj.color]) + jitter, 0, 255)
        # A lighter tone of a dark paint, a darker one of a light paint.
        second = paint + CONTRAST * ((GREY > paint.mean()) * 255 - paint)
        tones = pattern(rng, obj.pattern, alpha.shape, STRIPE)
        stamps.append(Stamp(box, alpha, tones, paint, second))
        objects.append(obj)
    # Painted once every object has a place.
    canvas = empty()
    for s in stamps:
        colors = np.where(s.tones[..., None], s.second, s.paint)
        canvas[s.box] += s.alpha[..., None] * (colors - canvas[s.box])
    image = Image.fromarray(np.clip(canvas.round(), 0, 255).astype(np.uint8))
    return Scene(image, tuple(objects))
