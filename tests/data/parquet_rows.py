"""Rows of Seg-Zero's and VisionReasoner's training sets, as Parquet in the published layout."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SIDE = 56  # pixels of the stored square image, in place of 840
SIZE = (60, 90)  # (H, W) of the image that it was


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def segzero_solution(k: int = 0) -> str:
    return f"<box>({100 + k},200),(500,600)</box><points>(300,400),(200,300)</points>"


def visionreasoner_solution(k: int = 0) -> str:
    items = [dict(bbox_2d=[100 + k, 200, 500, 600], point_2d=[300, 400])]
    items.append(dict(bbox_2d=[600, 600, 800, 800], point_2d=[700, 700]))
    return json.dumps(items)


def row(k: int = 0, solution: str | None = None, size: tuple = SIZE, **changes: object) -> dict:
    """One row: noise of (seed k), stored square."""
    rng = np.random.default_rng(k)
    pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    stored = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    whole = dict(
        id=f"img_{k}",
        problem=f"the Cup number {k}.",
        solution=segzero_solution(k) if solution is None else solution,
        image=dict(bytes=png(stored), path=None),
        img_height=size[0],
        img_width=size[1],
    )
    return whole | changes


def write_parquet(folder: Path, rows: list[dict], name="train-00000-of-00001", group=2) -> Path:
    """Write data/{name}.parquet below `folder`, `group` rows a row group."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = dict(id=pa.string(), problem=pa.string(), solution=pa.string(), image=image)
    columns |= dict(img_height=pa.int64(), img_width=pa.int64())
    schema = pa.schema([(name, columns[name]) for name in columns if name in rows[0]])
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, folder / "data" / f"{name}.parquet", row_group_size=group)
    return folder
