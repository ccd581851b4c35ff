"""Small drawn data sets in every format that `rl_train.data` reads, for `tools.same_numbers`."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tools.demo.clump_scenes import rows as clump_rows
from tools.demo.make_demo import write_split
from tools.demo.refcoco_writer import drawn_scenes, write_refcoco
from tools.demo.scenes import ATTRIBUTES, HELDOUT, TRAIN, make_scene
from tools.gar_writer import encode_image, encode_mask, write_gar

NUM_SCENES = 6  # of each format that is only read


def write_demo(folder: Path):
    """Write the shapes demo: train/, heldout/ in GAR's layout and attributes.json."""
    write_split(folder / "train", 0, TRAIN, 60)
    write_split(folder / "heldout", 0, HELDOUT, 8)
    vocabulary = {name: {value: [value] for value in vs} for name, vs in ATTRIBUTES.items()}
    (folder / "attributes.json").write_text(json.dumps(vocabulary))


def write_points_demo(folder: Path):
    """Write the points demo: train/, heldout/ in GAR's layout."""
    write_gar(clump_rows(0, TRAIN, 24), folder / "train")
    write_gar(clump_rows(0, HELDOUT, 4), folder / "heldout")


def drawn_objects() -> list[tuple[Image.Image, np.ndarray, str]]:
    """Return (image, mask (H, W) bool, caption) of every object of a few scenes."""
    scenes = [make_scene(1, TRAIN, number) for number in range(NUM_SCENES)]
    return [(scene.image, o.mask, o.caption) for scene in scenes for o in scene.objects]


def write_dam(folder: Path):
    """Write two splits of Describe-Anything: annotations.json and a tar of images each."""
    objects = drawn_objects()
    for split, part in (("COCOStuff", objects[::2]), ("SAM", objects[1::2])):
        images = folder / split / "images"
        images.mkdir(parents=True)
        annotations = {}
        with tarfile.open(images / "000.tar", "w") as tar:
            for number, (image, mask, caption) in enumerate(part):
                name = f"image_{number}"
                data = encode_image(image)
                member = tarfile.TarInfo(f"{name}.jpg")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                region = dict(caption=caption, mask_rle=encode_mask(mask))
                annotations[name] = [region, region | dict(caption=f"{caption} again")]
        (folder / split / "annotations.json").write_text(json.dumps(annotations))


def write_reasonseg(folder: Path):
    """Write ReasonSeg's parquet file of images, questions and masks."""
    rows = [
        dict(
            image=dict(bytes=encode_image(image), path=None),
            text=f"what is {caption}",
            mask=mask.tolist(),
            image_id=str(number),
            ann_id=str(number),
        )
        for number, (image, mask, caption) in enumerate(drawn_objects())
    ]
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "test-00000-of-00001.parquet")


def write_segzero(folder: Path):
    """Write a shard of Seg-Zero's training sets and a folder of masks."""
    (folder / "masks").mkdir(parents=True)
    rows = []
    for number, (image, mask, caption) in enumerate(drawn_objects()):
        image_cell = dict(bytes=encode_image(image), path=None)
        rows.append(dict(id=str(number), problem=caption, solution="", image=image_cell))
        Image.fromarray(mask.astype(np.uint8) * 255).save(folder / "masks" / f"{number}.png")
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "data-00000.arrow"), table.schema) as writer:
        writer.write_table(table)


def write_all(folder: Path):
    """Write a data set of each format below `folder`."""
    write_demo(folder / "demo")
    write_points_demo(folder / "points")
    write_dam(folder / "dam")
    write_reasonseg(folder / "reasonseg")
    write_segzero(folder / "segzero")
    for name in ("refcoco", "refcocog"):
        write_refcoco(drawn_scenes(name, 0, NUM_SCENES, 3), folder / name, name)
