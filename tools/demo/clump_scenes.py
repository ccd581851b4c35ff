"""Drawn scenes for the demo of points: clumps of shapes, of which a phrase names one.

Everything follows from a seed: scene i of split s is `make_scene(seed, s, i)`, whatever was drawn
before it. A scene has three clumps, each of two or three shapes of one colour with dark outlines.
Colour says which clump is meant, shape which member of it. What is beside the member is of its
colour, so that a point in it leaves open whether it or the clump is meant: a second, negative one
in a neighbour decides. The background's red and green grow with x and y, from which a tiny model
learns early where something is.

H, W = image height and width in pixels; positions are (x, y) in pixels, x to the right.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

from tools.demo.scenes import COLORS as PAINTS

SIDE = 256  # H = W
COLORS = {name: PAINTS[name] for name in ("red", "green", "blue", "yellow", "purple", "orange")}
SHAPES = ("circle", "square", "triangle")
CLUMPS, MEMBERS = 3, (2, 3)  # of a scene, of a clump
RADIUS, SPACING = (21, 24), 1.75  # of a shape in pixels; between centres, in radii
CENTRES, JITTER = (74, 182), 4  # x and y of clumps, before they are moved so far at most
OUTLINE, DARK = 2, 0.55  # pixels; brightness of an outline, of its shape's
RAMP, BLUE = (120, 220), (140, 180)  # the background


@dataclass(frozen=True)
class Member:
    """One shape of a clump."""

    color: str
    shape: str
    clump: int
    centre: tuple[float, float]  # (x, y); always visible
    mask: np.ndarray  # (H, W) bool, what is seen of it

    @property
    def caption(self) -> str:
        return f"the {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A drawn image and the members of its clumps."""

    image: Image.Image  # RGB
    members: tuple[Member, ...]

    def neighbours(self, k: int) -> list[int]:
        """Return the other members of the clump of member k, most of which touch it."""
        clump = self.members[k].clump
        return [m for m, other in enumerate(self.members) if other.clump == clump and m != k]

    @property
    def drawn(self) -> np.ndarray:
        """Return (H, W) bool: where anything is."""
        return np.any([member.mask for member in self.members], axis=0)


def make_scene(seed: int, split: int, index: int) -> Scene:
    """Draw scene `index` of split number `split`; the same numbers give the same pixels."""
    rng = np.random.default_rng([seed, split, index])
    ramp = np.linspace(*RAMP, SIDE)
    pixels = np.empty((SIDE, SIDE, 3))
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = ramp, ramp[:, None], rng.integers(*BLUE)
    image = Image.fromarray(pixels.round().astype(np.uint8))
    canvas, members = ImageDraw.Draw(image), []
    centres = rng.permutation([(x, y) for y in CENTRES for x in CENTRES])[:CLUMPS]
    colors = rng.permutation(list(COLORS))[:CLUMPS]
    for clump, (centre, color) in enumerate(zip(centres, colors.tolist())):
        number, radius = int(rng.choice(MEMBERS)), int(rng.integers(RADIUS[0], RADIUS[1] + 1))
        middle = centre + rng.integers(-JITTER, JITTER + 1, 2)
        # On a circle on which neighbours have that distance: a pair, or a triangle.
        away = SPACING * radius / (2 * np.sin(np.pi / number))
        angles = rng.uniform(0, 2 * np.pi) + 2 * np.pi * np.arange(number) / number
        edge = tuple(int(DARK * value) for value in COLORS[color])
        for shape, angle in zip(rng.permutation(SHAPES).tolist(), angles):
            x, y = middle + away * np.array([np.cos(angle), np.sin(angle)])
            _draw(canvas, shape, x, y, radius, COLORS[color], edge)
            stencil = Image.new("1", (SIDE, SIDE))
            _draw(ImageDraw.Draw(stencil), shape, x, y, radius, 1, 1)
            members.append((color, shape, clump, (float(x), float(y)), np.array(stencil)))
    above, visible = np.zeros((SIDE, SIDE), dtype=bool), []
    for *words, mask in reversed(members):  # what is drawn later covers what was there
        visible.append(Member(*words, mask & ~above))
        above |= mask
    return Scene(image, tuple(reversed(visible)))


def _draw(canvas, shape: str, x, y, radius, fill, edge):
    """Draw a shape about (x, y) on a PIL canvas."""
    box = [x - radius, y - radius, x + radius, y + radius]
    if shape == "circle":
        canvas.ellipse(box, fill=fill, outline=edge, width=OUTLINE)
    elif shape == "square":
        canvas.rectangle(box, fill=fill, outline=edge, width=OUTLINE)
    else:
        corners = [(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)]
        canvas.polygon(corners, fill=fill, outline=edge, width=OUTLINE)


def inside(rng: np.random.Generator, mask: np.ndarray, number: int, margin: int = 3) -> np.ndarray:
    """Return (number, 2) random pixels (x, y) of a mask (H, W), by `margin` inside it if any is."""
    # A summed-area table: four look-ups count the mask's pixels in any square.
    sums = np.pad(mask.astype(np.int32).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    side = 2 * margin + 1
    whole = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]
    rows, columns = np.nonzero(whole == side**2)
    if not len(rows):
        rows, columns, margin = *np.nonzero(mask), 0
    chosen = rng.integers(len(rows), size=number)
    return np.stack([columns[chosen], rows[chosen]], 1) + margin


def rows(seed: int, split: int, num_scenes: int):
    """Yield rows for `gar_writer.write_gar`: one for each member of each scene."""
    # disable=None: no bar where the output is no terminal
    for index in tqdm(range(num_scenes), desc="scenes", leave=False, disable=None):
        scene = make_scene(seed, split, index)
        for member in scene.members:
            yield dict(
                image=scene.image,
                mask=member.mask,
                caption=member.caption,
                category=member.shape,
            )
