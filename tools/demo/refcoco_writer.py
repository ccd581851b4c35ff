"""Write referred regions in RefCOCO's layout, as the drawn scenes of the demo:

    python -m tools.demo.refcoco_writer --output_dir D [--name refcoco] [--seed 0]

`{D}/refcoco/instances.json` (polygons), `{D}/refcoco/refs(unc).p`, and the images in
`{D}/train2014`, as `rl_train/data/refcoco.py` reads them. No scene is in two splits. With
`--name grefcoco` there are also phrases that name all objects of a colour, and none.
"""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rl_train.config.flags import COUNT_OR_0
from rl_train.data.refcoco import GREFCOCO, NO_TARGET, REFCOCO_NAMES
from rl_train.utils.command_line import FlagParser, run_program
from tools.demo.scenes import COLORS, HELDOUT, TRAIN, Object, make_scene

SPLITS = {"refcoco": ("val", "testA", "testB"), "refcocog": ("val", "test")}
SPLITS |= dict.fromkeys(("refcoco+", GREFCOCO), SPLITS["refcoco"])


def write_refcoco(scenes: Iterable[dict], root: str | Path, name: str = "refcoco"):
    """Write a data set of scenes, the images of all its splits too.

    Args:
        scenes: dicts of split, image (PIL), image_id (int, COCO's or one's own) and regions: dicts
            of mask ((H, W) bool), category and sentences (lower case, without a final stop); of
            gRefCOCO also phrases: pairs of a phrase and the numbers of the regions that it names.
    """
    images, annotations, refs, categories, sentences = [], [], [], {}, 0
    is_general = name == GREFCOCO
    pictures = Path(root) / "train2014"
    pictures.mkdir(parents=True, exist_ok=True)
    for scene in scenes:
        image_id, (width, height) = scene["image_id"], scene["image"].size
        file = f"COCO_train2014_{image_id:012d}.jpg"
        scene["image"].save(pictures / file, quality=95)
        images.append(dict(id=image_id, file_name=file, height=height, width=width))
        first = len(annotations) + 1
        for region in scene["regions"]:
            number = len(annotations) + 1
            shared_fields = dict(
                image_id=image_id,
                category_id=categories.setdefault(region["category"], len(categories) + 1),
            )
            polygons, area = polygons_of(region["mask"]), int(region["mask"].sum())
            annotation = dict(id=number, iscrowd=0, segmentation=polygons, area=area)
            annotations.append(shared_fields | annotation)
            named = [number] if is_general else number
            fields = shared_fields | dict(ann_id=named, split=scene["split"], file_name=file)
            refs.append(fields | with_sentences(region["sentences"], len(refs), sentences))
            sentences += len(region["sentences"])
        for text, members in scene.get("phrases", ()) if is_general else ():
            named = [first + member for member in members] or NO_TARGET
            fields = dict(image_id=image_id, ann_id=named, split=scene["split"], file_name=file)
            fields |= dict(no_target=not members)
            refs.append(fields | with_sentences([text], len(refs), sentences))
            sentences += 1
    folder = Path(root) / name
    folder.mkdir(parents=True, exist_ok=True)
    known = [dict(id=number, name=word) for word, number in categories.items()]
    whole = dict(images=images, annotations=annotations, categories=known)
    (folder / "instances.json").write_text(json.dumps(whole))
    content = json.dumps(refs).encode() if is_general else pickle.dumps(refs, protocol=2)
    (folder / REFCOCO_NAMES[name]).write_bytes(content)


def with_sentences(texts: list[str], num_refs: int, num_sentences: int) -> dict:
    """Return the number and the sentences of the next ref."""
    sentences = [
        dict(sent_id=num_sentences + k, sent=text, raw=text, tokens=text.split())
        for k, text in enumerate(texts)
    ]
    sent_ids = [sentence["sent_id"] for sentence in sentences]
    return dict(ref_id=num_refs + 1, sentences=sentences, sent_ids=sent_ids)


def polygons_of(mask: np.ndarray) -> list[list[int]]:
    """Return rectangles [x, y, x, y, ..] that cover just the pixels of a mask (H, W), each once.

    A rectangle is a run of pixels of a row, joined with equal runs below it.
    """
    rectangles, still_open = [], {}  # {(first, last column): row where the rectangle begins}
    padded = np.pad(mask.astype(np.int8), ((0, 1), (1, 1)))
    for y, row in enumerate(padded):
        edges = np.flatnonzero(np.diff(row)).reshape(-1, 2).tolist()
        runs = {tuple(edge) for edge in edges}
        for left, right in [run for run in still_open if run not in runs]:
            top = still_open.pop((left, right))
            rectangles.append([left, top, right, top, right, y, left, y])
        for run in runs - still_open.keys():
            still_open[run] = y
    return rectangles


def drawn_scenes(name: str, seed: int, num_train: int, num_heldout: int):
    """Yield the demo's scenes as `write_refcoco` takes them: two phrases of every object."""
    counts = {"train": num_train} | dict.fromkeys(SPLITS[name], num_heldout)
    starts = np.cumsum([0, *list(counts.values())[:-1]]).tolist()
    for (split, count), start in zip(counts.items(), starts):
        for number in range(start, start + count):
            demo_split = TRAIN if split == "train" else HELDOUT
            scene = make_scene(seed, demo_split, number)
            regions = [
                dict(mask=o.mask, category=o.shape, sentences=phrases(o)) for o in scene.objects
            ]
            yield dict(
                split=split,
                image=scene.image,
                image_id=number + 1,
                regions=regions,
                phrases=general_phrases(scene.objects),
            )


def general_phrases(objects: list[Object]) -> list[tuple[str, list[int]]]:
    """Return (phrase, numbers of the objects that it names): of each colour of several, and of one
    that no object has.
    """
    named = {
        color: [k for k, drawn in enumerate(objects) if drawn.color == color] for color in COLORS
    }
    several = [(f"all {color} shapes", members) for color, members in named.items() if members[1:]]
    absent = [(f"the {color} shape", []) for color, members in named.items() if not members]
    return several + absent[:1]


def phrases(drawn: Object) -> list[str]:
    """Return an object's caption as people write phrases, and the same in other words."""
    look = f"{drawn.pattern} {drawn.color} {drawn.shape}"
    return [f"a {look}", f"{drawn.color} {drawn.shape}, {drawn.pattern}"]


def main(argv: list[str] | None = None):
    parser = FlagParser(
        prog="python -m tools.demo.refcoco_writer",
        description=__doc__,
    )
    add = parser.add_argument
    add("--output_dir", required=True, type=Path, help="folder to write; must be empty or absent")
    add("--name", choices=list(REFCOCO_NAMES), default="refcoco")
    add("--num_train", type=COUNT_OR_0, default=200, help="scenes of the split train")
    add("--num_heldout", type=COUNT_OR_0, default=20, help="scenes of each other split")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.output_dir.exists() and any(args.output_dir.iterdir()):
        raise SystemExit(f"refcoco_writer: --output_dir {args.output_dir} is not empty")
    scenes = drawn_scenes(args.name, args.seed, args.num_train, args.num_heldout)
    write_refcoco(scenes, args.output_dir, args.name)


if __name__ == "__main__":
    run_program(main)
