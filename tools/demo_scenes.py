"""Drawn scenes for the demo: objects of several colours, shapes, sizes and places, and captions.

Everything follows from a seed: scene i of split s is `make_scene(seed, s, i)`, whatever was drawn
before it. Every scene holds distractors: each object in `scene.targets` shares its shape or its
colour with another, and in about a third of the scenes two objects share their colour. Only a
caption that says enough finds the target; all four attributes together (colour, shape, size,
position) always do.

H, W = image height and width in pixels; positions are (x, y) in pixels, x to the right.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from tools.demo_shapes import background, place, stamp

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
SIZES = {  # of min(H, W)
    "tiny": (0.06, 0.09),
    "small": (0.13, 0.17),
    "medium": (0.22, 0.28),
    "large": (0.35, 0.42),
}
SIZE_ODDS = (0.1, 0.25, 0.4, 0.25)
POSITIONS = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
BACKGROUNDS = {
    "grey": (182, 182, 182),
    "beige": (198, 186, 164),
    "bluish": (168, 182, 202),
    "greenish": (172, 192, 172),
    "pinkish": (204, 178, 184),
}
IMAGE_SIZES = ((256, 256), (320, 240), (240, 320), (288, 224))  # (W, H)

MIN_VISIBLE = 0.6  # share of its own pixels that a partly covered object keeps
COLOR_JITTER = 10  # of 255, per object and channel
NOISE = 4  # of 255, per pixel and channel
SAME_COLOR_ODDS = 0.35

# captions: under 120 words in all, so that a tiny language model can learn them
ATTRIBUTES = ("color", "shape", "size", "position")
SIZE_WORDS = {
    "tiny": ("tiny", "very small"),
    "small": ("small", "little"),
    "medium": ("medium", "medium sized"),
    "large": ("large", "big"),
}
EDGE_PHRASES = {
    "top": ("at the top", "near the top of the {picture}", "near the upper edge"),
    "bottom": ("at the bottom", "near the bottom of the {picture}", "near the lower edge"),
    "left": ("at the left side", "on the left of the {picture}", "near the left edge"),
    "right": ("at the right side", "on the right of the {picture}", "near the right edge"),
    "center": (
        "in the center",
        "in the middle of the {picture}",
        "near the center of the {picture}",
    ),
}
CORNER_PHRASES = (
    "in the {v} {h} corner",
    "in the {syn} {h} corner",
    "near the {v} {h} of the {picture}",
    "at the {v} {h}",
)
PLACED_FRAMES = (
    "{a} {pos}",
    "there is {a} {pos}",
    "{pos} there is {a}",
    "the {the} is {pos}",
    "this is {a} {pos}",
    "{a} can be seen {pos}",
    "the {picture} shows {a} {pos}",
)
UNPLACED_FRAMES = (
    "{a} in this {picture}",
    "there is {a} in the {picture}",
    "the {picture} shows {a}",
    "in this {picture} there is {a}",
)
VAGUE_FRAMES = (
    "a {thing} drawn somewhere in this {picture}",
    "there is a {thing} in the {picture}",
    "one of the {thing}s in this {picture}",
    "the {picture} shows a {thing} somewhere",
    "this is a {thing} on a {background} background",
)


@dataclass(frozen=True)
class Object:
    color: str
    shape: str
    size: str
    position: str
    mask: np.ndarray  # (H, W) bool, the visible pixels

    @property
    def attributes(self) -> tuple[str, str, str, str]:
        return self.color, self.shape, self.size, self.position


@dataclass(frozen=True)
class Scene:
    image: Image.Image  # RGB
    objects: tuple[Object, ...]  # 3 to 6, later ones drawn over earlier ones
    background: str

    @property
    def targets(self) -> tuple[int, ...]:
        """Indices of the objects that share their colour or their shape with another object."""

        def shared(key):
            values = [getattr(obj, key) for obj in self.objects]
            return [values.count(value) > 1 for value in values]

        return tuple(
            i for i, either in enumerate(zip(shared("color"), shared("shape"))) if any(either)
        )


def make_scene(seed: int, split: int, index: int) -> Scene:
    """Scene `index` of split number `split`; the same three numbers give the same pixels."""
    return draw_scene(np.random.default_rng([seed, split, index]))


def draw_scene(rng: np.random.Generator) -> Scene:
    """One scene, drawn again from `rng` until its objects fit and no two share all attributes."""
    while True:
        scene = _try_scene(rng)
        if scene is not None:
            distinct = {obj.attributes for obj in scene.objects}
            if len(distinct) == len(scene.objects):
                return scene


def position_of(mask: np.ndarray) -> str:
    """The one of nine positions in which the centroid of `mask` (H, W) lies, by thirds."""
    rows, cols = np.nonzero(mask)
    row = int((rows.mean() + 0.5) / mask.shape[0] * 3)
    col = int((cols.mean() + 0.5) / mask.shape[1] * 3)
    return POSITIONS[row][col]


def caption(obj: Object, scene: Scene, rng: np.random.Generator, detail: str = "full") -> str:
    """A sentence of 5 to 25 words about `obj`.

    full: states colour, shape, size and position, which no other object of the scene shares.
    partial: states one to three of the four. vague: states none of them.
    """
    if detail == "vague":
        text = _pick(rng, VAGUE_FRAMES)
        return _finish(
            rng, text.format(thing=_thing(rng), picture=_picture(rng), background=scene.background)
        )
    if detail == "full":
        return phrase_of(obj, scene, rng, ATTRIBUTES)
    if detail == "partial":
        return phrase_of(obj, scene, rng, partial_attributes(rng))
    raise ValueError(f"detail is full, partial or vague, not {detail!r}")


def partial_attributes(rng) -> tuple[str, ...]:
    """One to three of the four attributes."""
    return tuple(rng.permutation(ATTRIBUTES)[: rng.integers(1, len(ATTRIBUTES))].tolist())


def phrase_of(obj: Object, scene: Scene, rng: np.random.Generator, said) -> str:
    """A sentence about `obj` that states the attributes `said` and no others."""
    words = ([_pick(rng, SIZE_WORDS[obj.size])] if "size" in said else []) + (
        [obj.color] if "color" in said else []
    )
    noun = " ".join(words + [obj.shape if "shape" in said else _thing(rng)])
    frames = PLACED_FRAMES if "position" in said else UNPLACED_FRAMES
    text = _pick(rng, frames).format(
        a=_article(noun),
        the=noun,
        picture=_picture(rng),
        pos=_position(rng, obj.position) if "position" in said else "",
    )
    return _finish(rng, text + _trailing(rng, obj, scene, neighbour=set(said) == set(ATTRIBUTES)))


def _plan(rng) -> list[tuple[str, str]]:
    """The (colour, shape) of each object, in drawing order."""
    num_objects = int(rng.integers(3, 7))
    colors = rng.permutation(list(COLORS))[:num_objects].tolist()
    if rng.random() < SAME_COLOR_ODDS:  # then size, place or shape must tell
        colors[1] = colors[0]
    shapes = rng.choice(SHAPES, num_objects).tolist()
    shapes[int(rng.integers(1, num_objects))] = shapes[0]
    plan = list(zip(colors, shapes))
    return [plan[i] for i in rng.permutation(num_objects)]


def _try_scene(rng) -> Scene | None:
    width, height = IMAGE_SIZES[rng.integers(len(IMAGE_SIZES))]
    tint = str(rng.choice(list(BACKGROUNDS)))
    canvas = background(rng, BACKGROUNDS[tint], width, height)  # (H, W, 3) float
    plan = _plan(rng)
    sizes = rng.choice(list(SIZES), size=len(plan), p=SIZE_ODDS).tolist()
    visible, num_pixels = [], []
    for k, ((color, shape), size) in enumerate(zip(plan, sizes)):
        alpha = stamp(rng, shape, rng.uniform(*SIZES[size]) * min(width, height))  # (h, w) in 0..1
        keep = MIN_VISIBLE if rng.random() < 0.3 else 1.0
        rivals = [visible[j] for j in range(k) if plan[j][0] == color]
        for _ in range(40):
            box = place(rng, alpha.shape, width, height)
            hidden = [(v[box] & (alpha >= 0.5)).sum() for v in visible]
            seen = all(v.sum() - h >= keep * n for v, h, n in zip(visible, hidden, num_pixels))
            # One colour over itself would hide the outline.
            if seen and not any(v[box][alpha > 0].any() for v in rivals):
                break
        else:
            return None
        mask = np.zeros((height, width), dtype=bool)
        mask[box] = alpha >= 0.5
        visible = [v & ~mask for v in visible] + [mask]
        num_pixels.append(int(mask.sum()))
        jitter = rng.integers(-COLOR_JITTER, COLOR_JITTER + 1, 3)
        paint = np.clip(np.array(COLORS[color]) + jitter, 0, 255)
        canvas[box] += alpha[..., None] * (paint - canvas[box])
    canvas += rng.integers(-NOISE, NOISE + 1, canvas.shape, dtype=np.int8)
    objects = tuple(
        Object(color, shape, size, position_of(mask), mask)
        for (color, shape), size, mask in zip(plan, sizes, visible)
    )
    return Scene(Image.fromarray(np.clip(canvas.round(), 0, 255).astype(np.uint8)), objects, tint)


def _position(rng, position: str) -> str:
    if position in EDGE_PHRASES:
        return _pick(rng, EDGE_PHRASES[position]).format(picture=_picture(rng))
    v, h = position.split()
    return _pick(rng, CORNER_PHRASES).format(
        v=v, h=h, syn={"top": "upper", "bottom": "lower"}[v], picture=_picture(rng)
    )


def _trailing(rng, obj: Object, scene: Scene, neighbour: bool) -> str:
    """A clause about the background or the nearest other object, or nothing."""
    draw = rng.random()
    if draw < 0.3:
        return f" on a {scene.background} background"
    if draw < 0.55 and neighbour:
        other = _nearest(obj, scene)
        return f" {_pick(rng, ('next to', 'close to'))} {_article(f'{other.color} {other.shape}')}"
    return ""


def _nearest(obj: Object, scene: Scene) -> Object:
    def centroid(o):
        return np.array(np.nonzero(o.mask)).mean(1)

    return min(
        (o for o in scene.objects if o is not obj),
        key=lambda o: np.linalg.norm(centroid(o) - centroid(obj)),
    )


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _finish(rng, text: str) -> str:
    text = text[0].upper() + text[1:]
    return text + "." if rng.random() < 0.85 else text


def _pick(rng, options):
    return options[rng.integers(len(options))]


def _picture(rng) -> str:
    return _pick(rng, ("picture", "image"))


def _thing(rng) -> str:
    return _pick(rng, ("shape", "thing"))
