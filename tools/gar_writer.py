"""Writes regions with captions in the Arrow layout of the Grasp-Any-Region dataset.

`{folder}/Fine-Grained-Dataset-Part1/data-000NN-of-000MM.arrow` with the columns image, mask_rle,
conversations and catagory (the dataset's own spelling). `rl_train/data/gar.py` reads it back.
"""

import io
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image
from pycocotools import mask as coco_mask

MASK = pa.struct([("counts", pa.string()), ("size", pa.list_(pa.int64()))])
INSTRUCTION = "<image>\nDescribe the masked region in detail."
SCHEMA = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("mask_rle", MASK),
        ("conversations", pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))),
        ("catagory", pa.list_(pa.string())),
    ]
)


def write_gar(
    rows: Iterable[dict],
    folder: str | Path,
    rows_per_shard: int = 500,
    part: str = "Fine-Grained-Dataset-Part1",
    image_format: str = "PNG",
) -> list[Path]:
    """Write rows as shards and return their paths; of a generator one shard is held at a time.

    Raises ValueError if the folder holds shards already: they are neither replaced nor mixed.

    Args:
        rows: of dicts with "image" (PIL), "mask" ((H, W) bool), "caption" and "category" (str or
            list of str). With "image_bytes" that file is stored as it is, in place of "image";
            with "image_path" alone only this path is, which begins at the folder of the part. A
            "question" stands in place of INSTRUCTION. If the rows have "objects" ((K, H, W) bool),
            their masks are a column; "columns", a dict, is one in JSON.
        image_format: PNG or JPEG.
    """
    part_folder = Path(folder) / part
    if any(part_folder.glob("*.arrow")):
        raise ValueError(f"{part_folder} already holds shards: name another folder")
    part_folder.mkdir(parents=True, exist_ok=True)
    unfinished, records_left = [], _records(rows, image_format)
    while records := list(islice(records_left, rows_per_shard)):
        # Named at the end, when the number of shards is known.
        path = part_folder / f"data-{len(unfinished):05d}.arrow.part"
        write_records(records, path)
        unfinished.append(path)
    return [
        path.rename(part_folder / f"data-{i:05d}-of-{len(unfinished):05d}.arrow")
        for i, path in enumerate(unfinished)
    ]


def write_shard(rows: Iterable[dict], path: Path):
    """Write the rows of one shard, see `write_gar`; the file is there once it is whole."""
    unfinished = path.with_name(f"{path.name}.part")
    write_records(list(_records(rows, "PNG")), unfinished)
    unfinished.rename(path)


def write_records(records: list[dict], path: Path):
    """Write the records of one shard."""
    schema = SCHEMA
    if any("objects" in record for record in records):
        schema = schema.append(pa.field("objects", pa.list_(MASK)))
    if any("columns" in record for record in records):
        schema = schema.append(pa.field("columns", pa.string()))
    with pa.ipc.new_stream(str(path), schema) as writer:
        writer.write_table(pa.Table.from_pylist(records, schema=schema), max_chunksize=100)


def encode_mask(mask: np.ndarray) -> dict:
    """Encode a mask (H, W) bool as COCO's run lengths, {"counts": str, "size": [H, W]}."""
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"counts": rle["counts"].decode("ascii"), "size": [int(n) for n in rle["size"]]}


def encode_image(image: Image.Image, image_format: str = "PNG") -> bytes:
    """Encode an image as a PNG or JPEG file."""
    file = io.BytesIO()
    image.save(file, format=image_format)
    return file.getvalue()


def _records(rows, image_format: str):
    """Yield the record of each row; of rows with one image after another it is encoded once."""
    image = data = None
    for row in rows:
        if row["image"] is not image:
            image = row["image"]
            data = row.get("image_bytes")
            if not data and not row.get("image_path"):
                data = encode_image(image, image_format)
        yield _record(row, data)


def _record(row: dict, image_data: bytes | None) -> dict:
    width, height = row["image"].size
    assert row["mask"].shape == (height, width), "a mask has the size of its image"
    category, further = row["category"], {}
    if "objects" in row:
        further["objects"] = [encode_mask(mask) for mask in row["objects"]]
    if "columns" in row:
        further["columns"] = json.dumps(row["columns"])
    return further | {
        "image": {"bytes": image_data, "path": row.get("image_path")},
        "mask_rle": encode_mask(row["mask"]),
        "conversations": [
            {"from": "human", "value": row.get("question") or INSTRUCTION},
            {"from": "gpt", "value": row["caption"]},
        ],
        "catagory": [category] if isinstance(category, str) else list(category),
    }
