"""The Grasp-Any-Region dataset (HaochenWang/Grasp-Any-Region-Dataset) from its Arrow shards.

Columns, by name: image struct<bytes, path>; mask_rle struct<counts, size>, or a list of them (one
sample each), or no such column (the whole image is the region); conversations
list<struct<from, value>>; catagory (the dataset's spelling) or category, a string or a list of
them. `tools.convert_data` writes objects too, a list of masks, where captions name several regions
or none, and columns, a JSON object of what tasks receive by name.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rl_train.data.arrow import IMAGE, ArrowShard, find_shards
from rl_train.data.base import Reader, Region
from rl_train.data.errors import BadData
from rl_train.data.hub import resolve
from rl_train.data.images import check_read, coco_id, read_cell
from rl_train.data.rle import RLE, whole_mask

TURN = pa.struct([("from", pa.string()), ("value", pa.string())])
COLUMNS = {"image": IMAGE, "conversations": pa.list_(TURN)}
CATEGORIES = ("catagory", "category")
HUMAN, ASSISTANT = ("human", "user"), ("gpt", "assistant")
SINGLE_REGION = -1  # region number of a row that holds one region and not a list of them


class GraspAnyRegionDataset(Reader):
    """The captioned regions of all shards below `data_dir`, less those that opening finds unusable.

    [i] -> see `read_sample`. image_id is "part/file/row", with "-k" behind it for region k of a
    row that holds several; it does not change when a part is added.

    Args:
        data_dir: folder of shards, see `find_shards`, or a hub name, see `resolve`.
        parts: names of folders to read, and to fetch; None reads all.

    Raises:
        ValueError: no shard or usable region, an unknown part, unreadable shard, missing column.
        DamagedSample: on access, an image with a good header that does not decode.
    """

    def __init__(self, data_dir: str | Path, parts: list[str] | None = None):
        super().__init__()
        self._root = resolve(data_dir, ["*.arrow"], parts)
        shards = find_shards(self._root, parts)
        self._parts = [part for part, _ in shards]
        self._shards = [ArrowShard(path, COLUMNS) for _, path in shards]
        self.has_objects = any("objects" in shard.table.column_names for shard in self._shards)
        for number in range(len(shards)):
            self._scan(number)
        self._samples = np.array(self._samples, np.int64)  # (n, 3) shard, row, region
        self._finish(data_dir)

    def image_id(self, i: int) -> str:
        shard, row, region = self._samples[i].tolist()
        suffix = "" if region == SINGLE_REGION else f"-{region}"
        return f"{self._parts[shard]}/{self._shards[shard].path.stem}/{row}{suffix}"

    def _place(self, sample: tuple[int, int, int]) -> str:
        shard, row, _ = sample
        return f"{self._shards[shard].path.relative_to(self._root)} row {row}"

    def _region(self, i: int) -> Region:
        number, row, region = self._samples[i].tolist()
        shard = self._shards[number]
        table = shard.table
        rle = table["mask_rle"][row].as_py() if "mask_rle" in table.column_names else None
        columns = [name for name in CATEGORIES if name in table.column_names]
        category = table[columns[0]][row].as_py() if columns else None
        names = category if isinstance(category, list) else [category]
        question, answer = first_turns(table["conversations"][row].as_py())
        objects = table["objects"][row].as_py() if "objects" in table.column_names else None
        cell = table["columns"][row].as_py() if "columns" in table.column_names else None
        rle = rle if region == SINGLE_REGION else rle[region]
        return Region(
            lambda: read_cell(shard.image(row), shard.path.parent, self._root),
            rle,
            answer,
            ", ".join(str(name) for name in names if name),
            question=question,
            answer=answer if question is not None else None,
            objects=self._objects(objects, rle),
            columns=read_columns(cell, shard, row),
        )

    def _objects(self, cell: list[RLE] | None, rle: RLE | None) -> tuple[RLE, ...] | None:
        """Return `Region.objects` of a row; a row without its own names the one region."""
        if not self.has_objects:
            return None
        return (rle,) if cell is None else tuple(cell)

    def _scan(self, number: int):
        """Add the samples (number of the shard, row, region) of a shard."""
        shard = self._shards[number]
        names = ["image", "conversations", "mask_rle", "objects", "columns"]
        for row, values in enumerate(shard.rows(names)):
            cell = values["image"] or {}
            question, caption = first_turns(values["conversations"])
            if further := read_columns(values.get("columns"), shard, row):
                question = f"{question} {further}"  # other columns are other data
            image = check_read(lambda: read_cell(cell, shard.path.parent, self._root))
            rles = values.get("mask_rle", whole_mask(image[0]))
            self._num_rows += 1
            is_list = isinstance(rles, list) and len(rles) > 0
            for region, rle in enumerate(rles) if is_list else [(SINGLE_REGION, rles)]:
                sample, coco = (number, row, region), coco_id(cell.get("path"))
                objects = self._objects(values.get("objects"), rle)
                self._add(sample, image, caption, rle, coco, question, objects)


def read_columns(cell: str | None, shard: ArrowShard, row: int) -> dict[str, Any]:
    """Return `Region.columns` of a row. Raises BadData if the cell is no JSON object."""
    if cell is None:
        return {}
    try:
        columns = json.loads(cell)
    except (TypeError, ValueError):  # a cell of another type, or no JSON
        columns = None
    if not isinstance(columns, dict):
        raise BadData(f"{shard.path} row {row}: the column columns is no JSON object")
    return columns


def first_turns(conversation: list[dict | None] | None) -> tuple[str | None, str | None]:
    """Return (question, answer): the assistant's first turn and the human's last one before it.

    Each is None if there is none.
    """
    question = None
    for turn in conversation or []:
        if turn and turn.get("from") in ASSISTANT:
            return question, turn.get("value")
        if turn and turn.get("from") in HUMAN:
            question = turn.get("value")
    return None, None
