"""Data sets of the demo's scenes for tasks that the demo itself does not have."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.demo.scenes import COLORS, HELDOUT, TRAIN, Object, make_scene
from tools.gar_writer import encode_mask, write_gar

SPLITS = {"train": TRAIN, "heldout": HELDOUT}
MAX_PHRASES = 3  # of a grounded caption


def write_several(folder: Path, seed: int, num_scenes: dict[str, int]):
    """Write {folder}/{split} in GAR's layout: phrases of one object, of several and of none."""
    for name, split in SPLITS.items():
        write_gar(general_rows(seed, split, num_scenes[name]), folder / name)


def general_rows(seed: int, split: int, num_scenes: int) -> Iterator[dict]:
    """Yield as many phrases of colours that no object of a scene has as of colours that some have.

    A colour that an object has names all objects of this colour.
    """
    for number in range(num_scenes):
        scene = make_scene(seed, split, number)
        rng = np.random.default_rng([seed, split, number])
        colors = list(dict.fromkeys(drawn.color for drawn in scene.objects))
        absent = [color for color in list(COLORS)[:8] if color not in colors]
        rng.shuffle(absent)
        for color in [*colors, *absent[: len(colors)]]:
            masks = [drawn.mask for drawn in scene.objects if drawn.color == color]
            empty = np.zeros((0, scene.image.height, scene.image.width), dtype=bool)
            objects = np.stack(masks) if masks else empty
            caption = f"all {color} shapes"
            yield dict(
                image=scene.image,
                mask=objects.any(0),
                objects=objects,
                caption=caption,
                category="",
            )


def write_grounded(folder: Path, seed: int, num_scenes: dict[str, int]):
    """Write {folder}/{split}/captions.json in GranD-f's layout, and its images."""
    for name, split in SPLITS.items():
        place = folder / name
        place.mkdir(parents=True)
        rows = []
        for number in range(num_scenes[name]):
            scene = make_scene(seed, split, number)
            file = f"{name}_{number}.png"
            scene.image.save(place / file)
            width, height = scene.image.size
            described = grounded(scene.objects[:MAX_PHRASES])
            rows.append(dict(file_name=file, height=height, width=width) | described)
        (place / "captions.json").write_text(json.dumps(rows))


def grounded(objects: tuple[Object, ...]) -> dict:
    """Return caption and groundings: the objects one after another, from left to right."""
    caption, groundings = "", {}
    for drawn in sorted(objects, key=lambda drawn: drawn.mask.any(0).argmax()):
        caption += "and " if caption else ""
        phrase = f"a {drawn.pattern} {drawn.color} {drawn.shape}"
        place = [len(caption), len(caption) + len(phrase)]
        groundings[phrase] = dict(token_positives=place, rle_masks=[encode_mask(drawn.mask)])
        caption += f"{phrase} "
    return dict(caption=caption.strip() + ".", groundings=groundings)
