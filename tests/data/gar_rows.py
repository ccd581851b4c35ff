"""Rows of Grasp-Any-Region for the tests: a good one, what to change in it, and how it is read."""

import numpy as np
import pyarrow as pa
from PIL import Image

from rl_train.data import GraspAnyRegionDataset
from tools.gar_writer import SCHEMA, encode_image, encode_mask

W, H = 40, 30


MASK = np.zeros((H, W), dtype=bool)


MASK[5:20, 10:35] = True


IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8))


PNG, JPEG = encode_image(IMAGE), encode_image(IMAGE, "JPEG")


def turns(*pairs):
    return [{"from": who, "value": text} for who, text in pairs]


def row(**changes):
    good = {
        "image": {"bytes": PNG, "path": None},
        "mask_rle": encode_mask(MASK),
        "conversations": turns(("human", "<image>\nDescribe."), ("gpt", "A cup.")),
        "catagory": ["cup"],
    }
    return good | changes


def write(path, rows, schema=SCHEMA, ipc=pa.ipc.new_stream):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows, schema=schema)
    with ipc(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def read(tmp_path, *rows, schema=SCHEMA):
    write(tmp_path / "Part1" / "data-00000-of-00001.arrow", rows, schema)
    return GraspAnyRegionDataset(tmp_path)


def ids(dataset):
    return [dataset[i]["image_id"] for i in range(len(dataset))]
