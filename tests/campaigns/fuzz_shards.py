"""Opens mutated Arrow shards, reads their samples: python -m tests.campaigns.fuzz_shards FOLDER
NUMBER

Prints how many were opened, refused with an error, and how many samples were whole and damaged.
"""

import faulthandler
import io
import random
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from rl_train.data import DamagedSample, GraspAnyRegionDataset
from tools.gar_writer import INSTRUCTION, SCHEMA, encode_image, encode_mask

SECONDS = 60  # after which a shard counts as a hang
METADATA = 1600  # bytes at the start of a shard
NUMBERS = (2**31 - 1, 2**40, 2**63 - 1, 2**64 - 1, 0)


def shards() -> list[bytes]:
    """Good ones: a mask or a list of them, plain and compressed."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    rle = encode_mask(np.eye(12, 16, dtype=bool))
    said = [{"from": "human", "value": INSTRUCTION}, {"from": "gpt", "value": "A line."}]
    rows = [
        {
            "image": {"bytes": encode_image(Image.fromarray(pixels), kind), "path": None},
            "mask_rle": rle,
            "conversations": said,
            "catagory": ["line"],
        }
        for kind in ("PNG", "JPEG")
    ]
    listed = SCHEMA.set(1, pa.field("mask_rle", pa.list_(SCHEMA.field("mask_rle").type)))
    several = [row | {"mask_rle": [row["mask_rle"]] * 2} for row in rows]
    made = []
    for schema, table in ((SCHEMA, rows), (listed, several)):
        for new, compression in (
            (pa.ipc.new_stream, None),
            (pa.ipc.new_stream, "zstd"),
        ):
            sink = io.BytesIO()
            with new(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as file:
                file.write_table(pa.Table.from_pylist(table, schema=schema))
            made.append(sink.getvalue())
    return made


def mutate(data: bytearray, rng: random.Random):
    """Changes, deletes or inserts a few bytes, in half of the cases of the metadata."""
    limit = len(data) if rng.random() < 0.5 else min(len(data), METADATA)
    place, change = rng.randrange(limit), rng.random()
    if change < 0.4:
        data[place] ^= 1 << rng.randrange(8)
    elif change < 0.7:
        data[place] = rng.choice((0, 1, 127, 128, 255))
    elif change < 0.8:
        data[place : place + 8] = rng.choice(NUMBERS).to_bytes(8, "little")
    elif change < 0.9:
        del data[place : place + rng.randrange(1, 9)]
    else:
        data[place:place] = rng.randbytes(rng.randrange(1, 9))


def main(folder: Path, num_shards: int):
    originals = shards()
    opened = errors = samples = damaged = 0
    for number in range(num_shards):
        rng = random.Random(number)
        data = bytearray(rng.choice(originals))
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            mutate(data, rng)
        (folder / "data-0.arrow").write_bytes(data)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            dataset = GraspAnyRegionDataset(folder)
        except ValueError:
            errors += 1
            continue
        opened += 1
        for i in range(len(dataset)):
            try:
                sample = dataset[i]
            except DamagedSample:
                damaged += 1
                continue
            samples += 1
            size = (sample["image"].height, sample["image"].width)
            assert sample["mask"].shape == size and sample["mask"].dtype == bool, number
            assert sample["caption"] and isinstance(sample["category"], str), number
    print(opened, errors, samples, damaged)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
