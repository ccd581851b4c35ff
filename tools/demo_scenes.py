"""Drawn scenes for the demo: objects of several patterns, colours, shapes and places, and captions.

Everything follows from a seed: scene i of split s is `make_scene(seed, s, i)`, whatever was drawn
before it. No attribute alone tells an object from the others of its scene: of its pattern, its
colour, its shape and its place each is shared by another object. All four together tell it from
all others. Captions are of the same words but for these four.

H, W = image height and width in pixels; positions are (x, y) in pixels, x to the right.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from tools.demo_shapes import background, pattern, place, stamp

TRAIN, HELDOUT, WARM_START = 0, 1, 2  # split numbers of make_scene
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
PATTERNS = ("plain", "striped", "banded", "checked")
POSITIONS = ("top left", "top right", "bottom left", "bottom right")
ATTRIBUTES = {  # in the order of a caption
    "pattern": PATTERNS,
    "color": tuple(COLORS),
    "shape": SHAPES,
    "position": POSITIONS,
}
BACKGROUNDS = {
    "grey": (182, 182, 182),
    "beige": (198, 186, 164),
    "bluish": (168, 182, 202),
    "greenish": (172, 192, 172),
    "pinkish": (204, 178, 184),
}
IMAGE_SIZES = ((256, 256), (320, 240), (240, 320), (288, 240))  # (W, H)

PAIRS = (  # of values that are easily taken for one another; a scene has both of a pair or none
    ("plain", "checked"),
    ("striped", "banded"),
    ("blue", "purple"),
    ("black", "white"),
    ("red", "orange"),
    ("green", "yellow"),
    ("triangle", "cross"),
    ("circle", "square"),
)
NUM_OBJECTS = (5, 6)
DIAMETER = (0.20, 0.28)  # of min(H, W)
CONTRAST, GREY = (
    0.45,
    100,
)  # of a pattern's second tone: towards black, of a dark paint towards white
GAP = 3  # pixels between objects, at least
COLOR_JITTER = 10  # of 255, per object and channel
TRIES = 30  # places for one object, before the scene is drawn again


@dataclass(frozen=True)
class Object:
    pattern: str
    color: str
    shape: str
    position: str
    mask: np.ndarray  # (H, W) bool

    @property
    def attributes(self) -> tuple[str, str, str, str]:
        return self.pattern, self.color, self.shape, self.position

    @property
    def caption(self) -> str:
        return caption(*self.attributes)


@dataclass(frozen=True)
class Scene:
    image: Image.Image  # RGB
    objects: tuple[Object, ...]


def caption(pattern: str, color: str, shape: str, position: str) -> str:
    """The sentence of eight words that states these four."""
    return f"A {pattern} {color} {shape} in the {position}."


def make_scene(seed: int, split: int, index: int) -> Scene:
    """Scene `index` of split number `split`; the same three numbers give the same pixels."""
    return draw_scene(np.random.default_rng([seed, split, index]))


def draw_scene(rng: np.random.Generator) -> Scene:
    """One scene, drawn again from `rng` until its objects fit."""
    while True:
        plan, scene = _plan(rng), None
        if len(set(plan)) == len(plan):
            scene = _draw(rng, plan)
        if scene is not None:
            return scene


def _plan(rng) -> list[tuple[str, ...]]:
    """The attributes of each object; every value that occurs does so twice or more."""
    number = int(rng.choice(NUM_OBJECTS))
    return list(zip(*(_shared(rng, values, number) for values in ATTRIBUTES.values())))


def _shared(rng, values, number: int) -> list[str]:
    """`number` of the values, in random order, each that occurs at least twice: a pair if any."""
    pairs = [pair for pair in PAIRS if pair[0] in values]
    if pairs:
        used = list(pairs[rng.integers(len(pairs))])
    else:
        used = rng.permutation(values)[: rng.integers(2, number // 2 + 1)].tolist()
    return rng.permutation(used * 2 + rng.choice(used, number - 2 * len(used)).tolist()).tolist()


def _draw(rng, plan) -> Scene | None:
    """A scene of objects with these attributes, or None if one found no place."""
    width, height = IMAGE_SIZES[rng.integers(len(IMAGE_SIZES))]
    canvas = background(rng, BACKGROUNDS[str(rng.choice(list(BACKGROUNDS)))], width, height)
    taken, objects = np.zeros((height, width), dtype=bool), []
    for name, color, shape, position in plan:
        alpha = stamp(rng, shape, rng.uniform(*DIAMETER) * min(width, height))  # (h, w) in 0..1
        top, left = (
            (height // 2) * position.startswith("bottom"),
            (width // 2) * ("right" in position),
        )
        for _ in range(TRIES):
            rows, cols = place(rng, alpha.shape, width // 2, height // 2)
            box = np.s_[top + rows.start : top + rows.stop, left + cols.start : left + cols.stop]
            around = tuple(slice(max(s.start - GAP, 0), s.stop + GAP) for s in box)
            if not taken[around].any():
                break
        else:
            return None
        mask = np.zeros((height, width), dtype=bool)
        mask[box] = alpha >= 0.5
        taken[box] = True
        jitter = rng.integers(-COLOR_JITTER, COLOR_JITTER + 1, 3)
        paint = np.clip(np.array(COLORS[color]) + jitter, 0, 255)
        second = paint + CONTRAST * (
            (GREY > paint.mean()) * 255 - paint
        )  # a lighter or darker tone
        paint = np.where(pattern(rng, name, alpha.shape)[..., None], second, paint)
        canvas[box] += alpha[..., None] * (paint - canvas[box])
        objects.append(Object(name, color, shape, position, mask))
    image = Image.fromarray(np.clip(canvas.round(), 0, 255).astype(np.uint8))
    return Scene(image, tuple(objects))
