"""The Grasp-Any-Region dataset (HaochenWang/Grasp-Any-Region-Dataset) from its Arrow shards.

Columns, by name: image struct<bytes, path>; mask_rle struct<counts, size>, or a list of them (one
sample each), or no such column (the whole image is the region); conversations
list<struct<from, value>>; catagory (the dataset's spelling) or category, a string or a list of
them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from rl_train.data.arrow import IMAGE, Shard, find_shards
from rl_train.data.base import Reader, Region
from rl_train.data.hub import resolve
from rl_train.data.images import check_read, coco_id, read_cell
from rl_train.data.rle import whole_mask

TURN = pa.struct([("from", pa.string()), ("value", pa.string())])
COLUMNS = {"image": IMAGE, "conversations": pa.list_(TURN)}
CATEGORIES = ("catagory", "category")
ASSISTANT = ("gpt", "assistant")
SINGLE = -1  # region number of a row that holds one region and not a list of them


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
        self._shards = [Shard(path, COLUMNS) for _, path in shards]
        scans = [np.array(list(self._scan(k)), np.int64).reshape(-1, 5) for k in range(len(shards))]
        rows = np.concatenate(scans)  # (n, 5) shard, row, region, key of the image, its COCO id
        self._samples = rows[:, :3].copy()
        self._keep(data_dir, rows[:, 3], rows[:, 4])

    def image_id(self, i: int) -> str:
        shard, row, region = self._samples[i].tolist()
        suffix = "" if region == SINGLE else f"-{region}"
        return f"{self._parts[shard]}/{self._shards[shard].path.stem}/{row}{suffix}"

    def _region(self, i: int) -> Region:
        number, row, region = self._samples[i].tolist()
        shard = self._shards[number]
        table = shard.table
        rle = table["mask_rle"][row].as_py() if "mask_rle" in table.column_names else None
        columns = [name for name in CATEGORIES if name in table.column_names]
        category = table[columns[0]][row].as_py() if columns else None
        names = category if isinstance(category, list) else [category]
        return Region(
            lambda: read_cell(table["image"][row].as_py(), shard.path.parent, self._root),
            rle if region == SINGLE else rle[region],
            first_answer(table["conversations"][row].as_py()),
            ", ".join(str(name) for name in names if name),
        )

    def _scan(self, number: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (shard, row, region, key and COCO id of the image) of a shard's usable samples."""
        shard = self._shards[number]
        for row, values in enumerate(shard.rows(["image", "conversations", "mask_rle"])):
            cell, caption = values["image"] or {}, first_answer(values["conversations"])
            size, key = check_read(lambda: read_cell(cell, shard.path.parent, self._root))
            whole = None if isinstance(size, str) else whole_mask(*size)
            rles = values.get("mask_rle", whole)
            self._num_rows += 1
            several = isinstance(rles, list) and len(rles) > 0
            for region, rle in enumerate(rles) if several else [(SINGLE, rles)]:
                if self._usable(size, caption, rle):
                    yield number, row, region, key, coco_id(cell.get("path"))


def first_answer(conversation: list[dict | None] | None) -> str | None:
    """The assistant's first turn, or None."""
    turns = [turn for turn in conversation or [] if turn and turn.get("from") in ASSISTANT]
    return turns[0].get("value") if turns else None
