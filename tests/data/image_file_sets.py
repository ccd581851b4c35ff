"""Data sets whose rows name image files, written here: of each layout two good regions and some
faults."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tools.gar_writer import encode_image, encode_mask

W, H = 40, 30
FIRST, SECOND = [5, 5, 25, 5, 25, 20, 5, 20], [30, 2, 38, 2, 38, 28, 30, 28]  # x, y of corners
CAPTIONS = ["the red cup", "a dog on the right"]


def box(polygon: list[int]) -> np.ndarray:
    """Return the mask of a polygon whose corners are a box's."""
    xs, ys = polygon[::2], polygon[1::2]
    mask = np.zeros((H, W), dtype=bool)
    mask[min(ys) : max(ys), min(xs) : max(xs)] = True
    return mask


MASKS = [box(FIRST), box(SECOND)]
# Of each layout: one region without words, one without an image, one of no mask that can be read.
SKIPPED = {"blank caption": 1, "no image": 1, "bad mask RLE": 1}


def write_images(folder: Path, names: tuple[str, ...] = ("a.jpg", "b.jpg")):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        pixels = np.random.default_rng(ord(name[0])).integers(256, size=(H, W, 3), dtype=np.uint8)
        (folder / name).write_bytes(encode_image(Image.fromarray(pixels), "JPEG"))


def write_json(path: Path, content: dict | list):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_sa2va(root: Path):
    """Two regions of one image in a row, as polygons of a mask and as one polygon alone."""
    write_images(root / "images")
    rows = [
        dict(image="a.jpg", mask=[[FIRST], SECOND], text=CAPTIONS),
        dict(image="b.jpg", mask=[[FIRST], [FIRST[:4]]], text=[" ", "a cup"]),
        dict(image="c.jpg", mask=[[FIRST]], text=["a cup"]),
    ]
    write_json(root / "annotations.json", rows)


def write_coco(root: Path):
    """A polygon, run lengths, and annotations of which one names no image of the file."""
    write_images(root / "train2017")
    regions = [
        dict(image_id=1, caption=CAPTIONS[0], segmentation=[FIRST]),
        dict(image_id=2, description=CAPTIONS[1], segmentation=encode_mask(MASKS[1])),
        dict(image_id=1, segmentation=[FIRST]),
        dict(image_id=7, caption="a cup", segmentation=[FIRST]),
        dict(image_id=1, caption="a cup", segmentation=[FIRST[:5]]),
    ]
    content = dict(
        images=[
            dict(id=k, file_name=name, height=H, width=W)
            for k, name in ((1, "a.jpg"), (2, "b.jpg"))
        ],
        annotations=[dict(category_id=3) | region for region in regions],
        categories=[dict(id=3, name="cup")],
    )
    write_json(root / "annotations" / "instances_train2017.json", content)


def write_mask_files(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    for name, mask in zip("ab", MASKS):
        Image.fromarray(mask).save(folder / f"{name}.png")
    (folder / "damaged.png").write_bytes(b"no picture")


def write_csv(root: Path):
    write_images(root)
    write_mask_files(root / "masks")
    rows = [
        ("a.jpg", "masks/a.png", CAPTIONS[0]),
        ("b.jpg", "masks/b.png", CAPTIONS[1]),
        ("a.jpg", "masks/a.png", ""),
        ("c.jpg", "masks/a.png", "a cup"),
        ("a.jpg", "masks/damaged.png", "a cup"),
    ]
    with (root / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "mask", "caption"), *rows])


def write_jsonl(root: Path):
    """A mask file, polygons, and faults."""
    write_images(root / "images")
    write_mask_files(root / "masks")
    rows = [
        dict(image="a.jpg", mask="masks/a.png", caption=CAPTIONS[0]),
        dict(image="b.jpg", mask=[SECOND], caption=CAPTIONS[1]),
        dict(image="a.jpg", mask=[FIRST], caption=5),
        dict(image="../images/c.jpg", mask=[FIRST], caption="a cup"),
        dict(image="a.jpg", mask=7, caption="a cup"),
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_folders(root: Path):
    """Pictures of images and masks, the captions in text files."""
    write_images(root / "images", ("a.jpg", "b.jpg"))
    write_mask_files(root / "masks")
    (root / "masks" / "b").mkdir()
    (root / "masks" / "b.png").rename(root / "masks" / "b" / "1.png")
    (root / "masks" / "damaged.png").rename(root / "masks" / "b" / "2.png")
    Image.fromarray(MASKS[0]).save(root / "masks" / "b" / "3.png")
    for name, text in (("a", CAPTIONS[0]), ("b/1", CAPTIONS[1]), ("b/2", "a cup")):
        (root / "masks" / f"{name}.txt").write_text(f"{text}\n")
    (root / "images" / "c.jpg").write_bytes(b"no picture")
    Image.fromarray(MASKS[0]).save(root / "masks" / "c.png")
    (root / "masks" / "c.txt").write_text("a cup")


def write_muse(root: Path):
    """Questions of one object and of two, COCO images of two years, and faults."""
    write_images(root / "train2014", ("a.jpg",))
    write_images(root / "coco2017" / "val2017", ("b.jpg",))
    size = dict(height=H, width=W)
    rows = [
        dict(
            file_name="a.jpg",
            **size,
            questions=[CAPTIONS[0], "", "a cup"],
            answers=[objects(FIRST), objects(FIRST), objects(FIRST[:4])],
        ),
        dict(
            coco_url="http://images.cocodataset.org/val2017/b.jpg",
            **size,
            questions=[CAPTIONS[1]],
            answers=[objects([30, 2, 34, 2, 34, 28, 30, 28], [34, 2, 38, 2, 38, 28, 34, 28])],
        ),
        dict(file_name="c.jpg", **size, questions=["a cup"], answers=[objects(FIRST)]),
    ]
    write_json(root / "muse_train.json", rows)


def objects(*polygons: list[int]) -> list[dict]:
    return [dict(segmentation=[polygon], category_name="thing") for polygon in polygons]


def write_gcg(root: Path):
    """A caption of one phrase and one of two, of which the file has the later one first."""
    write_images(root / "GranDf_HA_images" / "train")
    halves = [box([30, 2, 34, 2, 34, 28, 30, 28]), box([34, 2, 38, 2, 38, 28, 34, 28])]
    size = dict(height=H, width=W)
    rows = [
        dict(file_name="a.jpg", caption=CAPTIONS[0], groundings=dict(cup=grounding(8, MASKS[0]))),
        dict(
            file_name="b.jpg",
            caption=CAPTIONS[1],
            groundings={"the right": grounding(9, halves[1]), "a dog": grounding(0, halves[0])},
        ),
        dict(file_name="a.jpg", caption=" ", groundings=dict(cup=grounding(0, MASKS[0]))),
        dict(file_name="c.jpg", caption="a cup", groundings=dict(cup=grounding(0, MASKS[0]))),
        dict(
            file_name="a.jpg",
            caption="a cup",
            groundings=dict(cup=dict(token_positives=[0, 5], rle_masks=[dict(counts=7, size=[])])),
        ),
    ]
    write_json(root / "GranDf_HA_GCG_train.json", [size | row for row in rows])


def grounding(start: int, *masks: np.ndarray) -> dict:
    return dict(token_positives=[start, start + 3], rle_masks=list(map(encode_mask, masks)))


def write_reasonseg(root: Path):
    """Shapes beside images: one question and two, and faults."""
    folder = root / "train"
    write_images(folder, ("a.jpg", "b.jpg", "d.jpg"))
    for name, texts, polygon in (
        ("a", [CAPTIONS[0], " "], FIRST),
        ("b", [CAPTIONS[1]], SECOND),
        ("c", ["a cup"], FIRST),
        ("d", ["a cup"], ["x", "y"]),
    ):
        # Outlines are drawn too, so that the last row and column of a box are inside.
        points = (
            [
                [x - (x == max(polygon[::2])), y - (y == max(polygon[1::2]))]
                for x, y in zip(polygon[::2], polygon[1::2])
            ]
            if name != "d"
            else [polygon]
        )
        shapes = [dict(label="target", points=points), dict(label="flag", points=[[0, 0]])]
        write_json(folder / f"{name}.json", dict(text=texts, is_sentence=True, shapes=shapes))


# {name of the layout: (--dataset, writer)}
LAYOUTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "sa2va": ("sa2va", write_sa2va),
    "coco": ("coco", write_coco),
    "csv": ("folders", write_csv),
    "jsonl": ("folders", write_jsonl),
    "folders": ("folders", write_folders),
    "muse": ("muse", write_muse),
    "gcg": ("gcg", write_gcg),
    "reasonseg": ("reasonseg", write_reasonseg),
}
