"""Draws scenes: cut-outs of several sizes on crops of wallpapers, some hidden in part.

Scene i of a split follows from (seed, split, i) whatever was drawn before it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from tools.experiments.pictures.captions import Named, by_label, by_tag
from tools.experiments.pictures.concepts import OPAQUE, Concept, read_picture
from tools.experiments.pictures.splits import Split, is_heldout

SIDE = 448  # pixels of the image that the sizes below are for
SIZES = (40, 200)  # longest side of an object
NUM_OBJECTS = (4, 8)
VISIBLE = 0.7  # least fraction of an object that others leave
MAX_ANGLE = 20  # degrees
SAME_THEME = 0.6  # fraction of the objects that come from the first one's family
TWICE = 0.7  # fraction of scenes with a concept twice
# Of 255: least difference of an object from what it hides, at the mean of its pixels.
MIN_CONTRAST = 40
# Tries for the place of an object, for the layout of a set of objects, and for such a set.
PLACES, LAYOUTS, CHOICES = 20, 40, 200
CACHED = 600  # pictures held in memory, 256 KiB each


@dataclass(frozen=True)
class Pool:
    """Sources of a split's scenes.

    Attributes:
        root: folder that the pictures' paths begin at.
        concepts: those with a picture by one of the split's artists.
        by_family: {theme or tag: indices of its concepts}, where there are several.
    """

    root: Path
    split: Split
    concepts: list[Concept]
    by_family: dict[str, list[int]]
    backgrounds: list[Path]
    num_concepts_of_tag: Counter


@dataclass(frozen=True)
class Object:
    """A drawn object.

    Attributes:
        label_caption: the label, with a relation where others have it too.
        tag_caption: a second wording, "" where no tag tells the object from the others.
        mask: (H, W) bool, what is to be seen of it.
        visible: fraction of it that others leave.
        size: pixels of its longest side.
    """

    concept: Concept
    artist: str
    picture: str
    label_caption: str
    tag_caption: str
    mask: np.ndarray
    visible: float
    size: int


@dataclass(frozen=True)
class Scene:
    image: Image.Image
    objects: tuple[Object, ...]
    background: str


@dataclass(frozen=True)
class Chosen:
    """An object that is to be drawn.

    Attributes:
        size: pixels of its longest side in an image of SIDE pixels.
        angle: degrees that it is turned by.
    """

    concept: Concept
    artist: str
    picture: str
    size: float
    angle: float


@dataclass
class _Placed:
    """An object while its scene is drawn.

    Attributes:
        mask: (H, W) bool, what later objects leave of it.
        area: pixels of the whole object.
        num_visible: pixels of `mask`.
    """

    mask: np.ndarray
    area: int
    num_visible: int


def pool_of(root: Path, concepts: list[Concept], split: Split, backgrounds: list[Path]) -> Pool:
    """Return what `split` draws from. Raises ValueError if it is too little."""
    own = [c for c in concepts if c.pictures.keys() & set(split.artists)]
    families: dict[str, list[int]] = {}
    for i, concept in enumerate(own):
        for name in dict.fromkeys((concept.theme, *concept.tags)):
            families.setdefault(name, []).append(i)
    several = {name: members for name, members in families.items() if name and len(members) > 2}
    if len(own) < NUM_OBJECTS[1]:
        raise ValueError(
            f"split {split.name}: {len(own)} concepts with pictures by {', '.join(split.artists)} "
            f"are too few: a scene holds up to {NUM_OBJECTS[1]}"
        )
    tags = Counter(tag for concept in own for tag in concept.tags)
    return Pool(root, split, own, several, backgrounds, tags)


def draw_scene(pool: Pool, unnamed: frozenset[str], seed: int, index: int, side: int) -> Scene:
    """Draw scene `index` of the pool's split, `side` pixels wide and high.

    Objects are chosen and laid out again until each has a place and a caption of its own.

    Args:
        unnamed: labels that no caption may contain beside another label.
    """
    rng = np.random.default_rng([seed, pool.split.number, index])

    def may_name(label: str, neighbour: str) -> bool:
        return is_heldout(label, neighbour) == pool.split.is_eval and neighbour not in unnamed

    for _ in range(CHOICES):
        chosen = choose(pool, rng, may_name)
        stamps = [stamp(pool.root / item.picture, item.size, item.angle, side) for item in chosen]
        background = pool.backgrounds[rng.integers(len(pool.backgrounds))]
        empty = crop(rng, background, side)
        for _ in range(LAYOUTS):
            canvas = empty.copy()
            placed = place_all(rng, canvas, stamps)
            if not placed:
                continue
            named = [named_object(item.concept, p.mask) for item, p in zip(chosen, placed)]
            captions = [by_label(named, i, side, may_name) for i in range(len(named))]
            if None not in captions:
                image = Image.fromarray(np.clip(canvas.round(), 0, 255).astype(np.uint8))
                objects = describe(pool, chosen, stamps, placed, named, captions)
                return Scene(image, objects, background.name)
    raise ValueError(
        f"split {pool.split.name}, scene {index}: no objects found that fit into the image, differ "
        "from their background and can each be told from the others by words: give more cut-outs "
        "or other backgrounds"
    )


def describe(
    pool: Pool,
    chosen: list[Chosen],
    stamps: list[np.ndarray],
    placed: list[_Placed],
    named: list[Named],
    captions: list[str],
) -> tuple[Object, ...]:
    """Return the objects of a scene whose layout is found."""
    return tuple(
        Object(
            concept=item.concept,
            artist=item.artist,
            picture=item.picture,
            label_caption=captions[i],
            tag_caption=by_tag(named, i, pool.num_concepts_of_tag.__getitem__) or "",
            mask=placed[i].mask,
            visible=placed[i].num_visible / placed[i].area,
            size=max(stamps[i].shape[:2]),
        )
        for i, item in enumerate(chosen)
    )


def choose(
    pool: Pool, rng: np.random.Generator, may_name: Callable[[str, str], bool]
) -> list[Chosen]:
    """Choose the objects of a scene, the largest first."""
    number = int(rng.integers(NUM_OBJECTS[0], NUM_OBJECTS[1] + 1))
    first = int(rng.integers(len(pool.concepts)))
    concept = pool.concepts[first]
    families = [f for f in dict.fromkeys((concept.theme, *concept.tags)) if f in pool.by_family]
    family: list[int] = []
    if families:  # half of the scenes are of a theme, the others of a theme or tag
        name = families[0] if rng.random() < 0.5 else families[rng.integers(len(families))]
        family = [i for i in pool.by_family[name] if i != first]
    num_family = min(len(family), round(SAME_THEME * number), number - 1)
    taken = [first, *rng.permutation(family)[:num_family].astype(int).tolist()]
    while len(taken) < number:
        other = int(rng.integers(len(pool.concepts)))
        if other not in taken:
            taken.append(other)
    if rng.random() < TWICE:
        # One that has neighbours to be told apart by takes the place of the last.
        labels = [pool.concepts[i].label for i in taken[:-1]]
        able = [
            i
            for i, label in zip(taken, labels)
            if sum(other != label and may_name(label, other) for other in labels) > 1
        ]
        if able:
            taken[-1] = able[rng.integers(len(able))]
    chosen = [choose_picture(pool, rng, pool.concepts[i]) for i in taken]
    return sorted(chosen, key=lambda item: -item.size)


def choose_picture(pool: Pool, rng: np.random.Generator, concept: Concept) -> Chosen:
    """Choose a picture of a concept; sizes are evenly spread on a logarithmic scale."""
    artists = [artist for artist in pool.split.artists if artist in concept.pictures]
    artist = artists[rng.integers(len(artists))]
    pictures = concept.pictures[artist]
    return Chosen(
        concept=concept,
        artist=artist,
        picture=pictures[rng.integers(len(pictures))],
        size=float(np.exp(rng.uniform(*np.log(SIZES)))),
        angle=float(rng.uniform(-MAX_ANGLE, MAX_ANGLE)),
    )


def stamp(path: Path, size: float, angle: float, side: int) -> np.ndarray:
    """Return a cut-out (h, w, 4), turned and `size` / SIDE of the image long, 0..255 float."""
    image = read_cutout(path).rotate(angle, Image.Resampling.BICUBIC, expand=True)
    image = image.crop(image.getchannel("A").point(lambda a: 255 * (a >= OPAQUE)).getbbox())
    scale = size * side / SIDE / max(image.size)
    width, height = (max(2, round(n * scale)) for n in image.size)
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS), dtype=np.float32)


@lru_cache(maxsize=CACHED)
def read_cutout(path: Path) -> Image.Image:
    return read_picture(path)


@lru_cache(maxsize=64)
def read_background(path: Path) -> Image.Image:
    return read_picture(path).convert("RGB")


def crop(rng: np.random.Generator, path: Path, side: int) -> np.ndarray:
    """Return a random square crop (side, side, 3) of a wallpaper, float."""
    image = read_background(path)
    length = round(min(image.size) * rng.uniform(0.5, 1))
    left, top = (int(rng.integers(n - length + 1)) for n in image.size)
    square = image.crop((left, top, left + length, top + length))
    return np.asarray(
        square.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32
    ).copy()


def place_all(
    rng: np.random.Generator, canvas: np.ndarray, stamps: list[np.ndarray]
) -> list[_Placed] | None:
    """Paint the stamps onto the canvas, one over another; None if one of them finds no place."""
    placed: list[_Placed] = []
    for pixels in stamps:
        if not place_one(rng, canvas, placed, pixels):
            return None
    return placed


def place_one(
    rng: np.random.Generator, canvas: np.ndarray, placed: list[_Placed], pixels: np.ndarray
) -> bool:
    """Paint a stamp where it is seen and leaves enough of the others; tell whether it could."""
    (height, width), side = pixels.shape[:2], len(canvas)
    alpha, solid = pixels[..., 3:] / 255, pixels[..., 3] >= OPAQUE
    for _ in range(PLACES):
        top, left = (int(rng.integers(side - n + 1)) for n in (height, width))
        box = np.s_[top : top + height, left : left + width]
        hidden = [np.count_nonzero(other.mask[box] & solid) for other in placed]
        contrast = np.abs(pixels[..., :3] - canvas[box]).max(-1)[solid].mean()
        if contrast >= MIN_CONTRAST and all(
            other.num_visible - pixels_hidden >= VISIBLE * other.area
            for other, pixels_hidden in zip(placed, hidden)
        ):
            break
    else:
        return False
    for other, pixels_hidden in zip(placed, hidden):
        other.mask[box] &= ~solid
        other.num_visible -= pixels_hidden
    mask = np.zeros((side, side), dtype=bool)
    mask[box] = solid
    area = int(np.count_nonzero(solid))
    placed.append(_Placed(mask, area, area))
    canvas[box] += alpha * (pixels[..., :3] - canvas[box])
    return True


def named_object(concept: Concept, mask: np.ndarray) -> Named:
    """Return what captions need to know of an object."""
    rows, cols = np.nonzero(mask)
    box = (int(cols.min()), int(rows.min()), int(cols.max()) + 1, int(rows.max()) + 1)
    center = (float(cols.mean()), float(rows.mean()))
    return Named(concept.label, concept.tags, center, box, concept.also)
