"""Writes scenes as data sets in the layout of Grasp-Any-Region, going on where it stopped.

`{output_dir}/{split}/images/000012.jpg` is a scene, `{split}/truth.jsonl` says all that is known of
its regions, one a line, and `{split}/{part}/data-..arrow` are what the readers read. Parts of a
training split:

    captioned   regions with captions, for supervision
    segmented   all regions that may be named, for supervision of masks alone
    regions     the regions beside `captioned`; their caption says only that they have none
    phrases     captions of these regions without their masks: the mask is the whole image

An evaluation split has one part, `all`, with captions and masks.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask
from tqdm import tqdm

from rl_train.utils.io import read_json, write_json
from tools.demo.scenes import in_order
from tools.experiments.pictures.concepts import Concept
from tools.experiments.pictures.scenes import Pool, Scene, draw_scene, pool_of
from tools.experiments.pictures.splits import (
    Split,
    backgrounds_of,
    fraction_of,
    splits_of,
    unnamed_concepts,
)
from tools.gar_writer import encode_mask, write_gar

NO_CAPTION = "A region without a caption."
SETTINGS, TRUTH = "settings.json", "truth.jsonl"
CAPTIONED, SEGMENTED = "captioned", "segmented"  # parts of the training split
JPEG = dict(format="JPEG", quality=92, subsampling=0)


@dataclass(frozen=True)
class Settings:
    """Settings that a folder of data sets is made with.

    Attributes:
        source: the library or the folder of cut-outs.
        backgrounds: the folder of wallpapers.
        wording: label, or tag where a tag tells the object from the others.
        caption_fraction: of the regions of `train` that have captions for supervision.
        num_eval: scenes of each split of evaluation.
        image_size: pixels of a scene's side.
    """

    source: str
    backgrounds: str
    wording: str = "label"
    caption_fraction: float = 0.1
    num_train: int = 2000
    num_artist_train: int = 1000
    num_eval: int = 200
    image_size: int = 448
    seed: int = 0

    def num_scenes(self, split: Split) -> int:
        if split.is_eval:
            return self.num_eval
        return self.num_train if split.name == "train" else self.num_artist_train


def write_datasets(
    settings: Settings,
    output_dir: Path,
    root: Path,
    concepts: list[Concept],
    num_workers: int,
):
    """Write all splits. Raises ValueError if `output_dir` holds those of other settings.

    Args:
        root: folder that the paths of the concepts' pictures begin at.
    """
    begin(settings, output_dir)
    unnamed = frozenset(unnamed_concepts(concepts))
    backgrounds = Path(settings.backgrounds)
    for split in splits_of(concepts):
        number = settings.num_scenes(split)
        if (output_dir / split.name / TRUTH).is_file() or not number:
            continue
        pool = pool_of(root, concepts, split, backgrounds_of(backgrounds, split.is_eval))
        draw_missing(settings, output_dir / split.name, pool, unnamed, num_workers)
        write_parts(settings, output_dir / split.name, split, number, unnamed)


def begin(settings: Settings, output_dir: Path):
    """Write the settings, or compare them with those that are there. Raises ValueError."""
    file, values = output_dir / SETTINGS, asdict(settings)
    if file.is_file():
        before = read_json(file)
        for name, value in values.items():
            if before.get(name) != value:
                raise ValueError(
                    f"--output_dir {output_dir} holds scenes of --{name} {before.get(name)}, not "
                    f"{value}: name another folder"
                )
        return
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"--output_dir {output_dir} is not empty: name another folder")
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(file, values, indent=1)


def draw_missing(
    settings: Settings, folder: Path, pool: Pool, unnamed: frozenset[str], num_workers: int
):
    """Draw the scenes that `folder` lacks: an image and a JSON file of regions each."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "scenes").mkdir(exist_ok=True)
    number = settings.num_scenes(pool.split)
    missing = [i for i in range(number) if not scene_file(folder, i).is_file()]
    draw = partial(_draw, settings, folder, pool, unnamed, missing)
    bar = tqdm(total=number, initial=number - len(missing), desc=pool.split.name, unit="scene")
    for _ in in_order(draw, len(missing), num_workers):
        bar.update()
    bar.close()


def scene_file(folder: Path, index: int) -> Path:
    return folder / "scenes" / f"{index:06d}.json"


def image_file(folder: Path, index: int) -> Path:
    return folder / "images" / f"{index:06d}.jpg"


def _draw(
    settings: Settings,
    folder: Path,
    pool: Pool,
    unnamed: frozenset[str],
    missing: list[int],
    number: int,
):
    """Draw the scene that is `number` in the list of missing ones, and write it."""
    index = missing[number]
    scene = draw_scene(pool, unnamed, settings.seed, index, settings.image_size)
    scene.image.save(image_file(folder, index), **JPEG)
    # The scene counts as there when this file is, which is whole or not there.
    unfinished = scene_file(folder, index).with_suffix(".unfinished")
    unfinished.write_text(json.dumps(describe(scene, index)))
    unfinished.replace(scene_file(folder, index))


def describe(scene: Scene, index: int) -> list[dict]:
    """Return all that is known of a scene's regions."""
    regions = []
    for k, drawn in enumerate(scene.objects):
        rows, cols = np.nonzero(drawn.mask)
        regions.append(
            dict(
                scene=index,
                region=k,
                label=drawn.concept.label,
                label_caption=drawn.label_caption,
                tag_caption=drawn.tag_caption,
                tags=list(drawn.concept.tags),
                also=list(drawn.concept.also),
                theme=drawn.concept.theme,
                sentence=drawn.concept.sentence,
                artist=drawn.artist,
                picture=drawn.picture,
                background=scene.background,
                size=drawn.size,
                visible=round(drawn.visible, 4),
                box=[int(n) for n in (cols.min(), rows.min(), cols.max() + 1, rows.max() + 1)],
                center=[round(float(cols.mean()), 2), round(float(rows.mean()), 2)],
                mask=encode_mask(drawn.mask),
            )
        )
    return regions


def caption_of(region: dict, wording: str) -> str:
    """Return the caption of a region by a wording, `label` or `tag`."""
    return wording == "tag" and region["tag_caption"] or region["label_caption"]


def captioned_scenes(settings: Settings, regions: list[dict]) -> set[int]:
    """Return scenes that hold `caption_fraction` of the regions, those that are named counted.

    All regions of such a scene have a caption for supervision, but those that are never named.
    """
    num_named = Counter(region["scene"] for region in regions if not region["unnamed"])
    wanted, chosen = settings.caption_fraction * len(regions), set()
    for scene in sorted(num_named, key=lambda i: fraction_of("captioned", str(i))):
        if wanted <= 0:
            break
        chosen.add(scene)
        wanted -= num_named[scene]
    return chosen


def write_parts(
    settings: Settings, folder: Path, split: Split, number: int, unnamed: frozenset[str]
):
    """Write the Arrow shards of a split whose scenes are drawn, and its truth at the end."""
    regions = []
    for i in range(number):
        regions += json.loads(scene_file(folder, i).read_text())
    for region in regions:
        region["caption"] = caption_of(region, settings.wording)
        region["unnamed"] = region["label"] in unnamed
    captioned = captioned_scenes(settings, regions) if split.has_captions else set()
    parts: dict[str, list[dict]] = {}
    for region in regions:
        if split.is_eval:
            part = "all"
        elif region["scene"] in captioned and not region["unnamed"]:
            part = CAPTIONED
        else:
            part = "regions"
        region["part"], region["row"] = part, len(parts.setdefault(part, []))
        parts[part].append(region)
    for part, members in parts.items():
        write_part(folder, part, gar_rows(folder, members, part))
    if "regions" in parts:
        write_part(folder, "phrases", gar_rows(folder, parts["regions"], "phrases"))
    if captioned:
        named = [region for region in regions if not region["unnamed"]]
        write_part(folder, SEGMENTED, gar_rows(folder, named, SEGMENTED))
    unfinished = folder / f".{TRUTH}.unfinished"
    lines = (json.dumps({k: v for k, v in region.items() if k != "mask"}) for region in regions)
    unfinished.write_text("".join(f"{line}\n" for line in lines))
    unfinished.replace(folder / TRUTH)


def write_part(folder: Path, part: str, rows: Iterable[dict]):
    """Write a part whole, if it is not there."""
    if (folder / part).is_dir():
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
        write_gar(rows, unfinished, part=part)
        (Path(unfinished) / part).rename(folder / part)


def gar_rows(folder: Path, regions: list[dict], part: str) -> Iterator[dict]:
    """Yield regions as `write_gar` takes them; the image is stored by its path."""
    for region in regions:
        path = image_file(folder, region["scene"])
        mask = coco_mask.decode(region["mask"]).astype(bool)
        caption, category = region["caption"], region["label"]
        if part == "regions":
            caption, category = NO_CAPTION, ""
        if part == "phrases":
            mask = np.ones_like(mask)
        with Image.open(path) as image:
            yield dict(
                image=image,
                image_path=f"../images/{path.name}",
                mask=mask,
                caption=caption,
                category=category,
            )


def read_truth(folder: Path) -> list[dict]:
    """Return the truth of a split's regions."""
    return [json.loads(line) for line in (folder / TRUTH).read_text().splitlines()]
