"""The Grasp-Any-Region dataset (HaochenWang/Grasp-Any-Region-Dataset) from its Arrow shards.

Columns, by name: image struct<bytes, path>; mask_rle struct<counts, size>, or a list of them (one
sample each), or no such column (the whole image is the region); conversations
list<struct<from, value>>; catagory (the dataset's spelling) or category, a string or a list of
them.
"""

import mmap

import numpy as np
import pyarrow as pa

from rl_train.data.arrow import (
    IMAGE,
    RLE,
    check_images,
    check_whole,
    find_shards,
    image_names,
    map_again,
    map_shard,
)
from rl_train.data.hub import resolve
from rl_train.data.images import coco_id, read_cell
from rl_train.data.masks import check_mask
from rl_train.data.samples import Counts, read_mask, read_sample
from rl_train.data.text import caption_fault

COLUMNS = {"image": IMAGE, "conversations": [{"from": "text", "value": "text"}]}
CATEGORIES = ("catagory", "category")
OPTIONAL = {"mask_rle": (RLE, [RLE]), **dict.fromkeys(CATEGORIES, ("text", ["text"]))}
ASSISTANT = ("gpt", "assistant")
SINGLE = -1  # region number of a row that holds one region and not a list of them
ROWS_AT_ONCE = 500  # that a scan holds in memory


class GraspAnyRegionDataset:
    """The captioned regions of all shards below `data_dir`, less those that opening finds unusable.

    [i] -> see `read_sample`. image_id is "part/file/row", with "-k" behind it for region k of a
    row that holds several and "-tK" for answer K if `turns` is "all"; it does not change when a
    part is added.

    Args:
        data_dir: folder of shards, see `find_shards`, or a hub name, see `resolve`.
        parts: names of folders to read, and to fetch; None reads all.
        turns: "first" = the assistant's first answer is the caption; "all" = one sample for each.
        split: see `resolve`.

    Raises:
        ValueError: no shard or usable region, an unknown part, unreadable shard, missing column.
        DamagedSample: on access, an image with a good header and end that does not decode.
        BadData: on access, a shard is not whole any more.
    """

    def __init__(self, data_dir, parts=None, turns: str = "first", split: str | None = None):
        if turns not in ("first", "all"):
            raise ValueError(f"turns is first or all, not {turns!r}")
        self._root, self._turns = resolve(data_dir, ["*.arrow"], parts, split), turns
        self._shards = find_shards(self._root, parts)  # (part, path)
        self._tables = {}  # shard -> (table, map), opened on first use in each process
        self._counts = Counts()
        found = [np.array(list(self._scan(shard)), np.int64) for shard in range(len(self._shards))]
        # (n, 6): shard, row, region, turn, key of the image, its COCO id
        self._samples = np.concatenate([one.reshape(-1, 6) for one in found])
        if len(self) == 0:
            raise ValueError(f"--data_dir {data_dir} holds no usable region: {self.report()}")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tables": {}}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def image_keys(self) -> np.ndarray:
        """(n,) int64 key of each sample's image, the same wherever there is a copy of it."""
        return self._samples[:, 4]

    @property
    def coco_ids(self) -> np.ndarray:
        """(n,) int64 `coco_id` of each sample's image, by its path."""
        return self._samples[:, 5]

    def report(self) -> dict:
        """See `Counts.report`."""
        return self._counts.report(len(self))

    def image_id(self, i: int) -> str:
        """Of sample i, without reading it."""
        shard, row, region, turn, *_ = self._samples[i].tolist()
        part, path = self._shards[shard]
        of_many = "" if region == SINGLE else f"-{region}"
        return f"{part}/{path.stem}/{row}{of_many}" + f"-t{turn}" * (self._turns == "all")

    def __getitem__(self, i: int) -> dict:
        shard, row, region, turn, *_ = self._samples[i].tolist()
        table, path = self._table(shard), self._shards[shard][1]
        said = answers(table["conversations"][row].as_py())
        cell = table["image"][row].as_py()
        return read_sample(
            lambda: read_cell(cell["bytes"], cell["path"], path.parent, self._root),
            rle_of(table, row, region),
            said[turn],
            category_of(table, row),
            self.image_id(i),
        )

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """See `read_mask`, of sample i."""
        shard, row, region, *_ = self._samples[i].tolist()
        return read_mask(rle_of(self._table(shard), row, region), size, self.image_id(i))

    def _table(self, shard: int) -> pa.Table:
        """A shard's table. Raises BadData if the file is not whole any more."""
        path = self._shards[shard][1]
        if shard not in self._tables:
            self._tables[shard] = map_again(path, COLUMNS, OPTIONAL)
        table, mapping = self._tables[shard]
        check_whole(path, mapping)
        return table

    def _scan(self, shard: int):
        """Yields (shard, row, region, turn, key and COCO id of the image) of its usable samples.

        Decodes no image: of each it reads the start and the end.
        """
        path, number = self._shards[shard][1], 0
        table, mapping = map_shard(path, COLUMNS, OPTIONAL)
        names = [name for name in ("conversations", "mask_rle") if name in table.column_names]
        for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
            images = check_images(batch["image"], path.parent, self._root)
            coco = map(coco_id, image_names(batch["image"]))
            for (size, key), of_coco, row in zip(images, coco, batch.select(names).to_pylist()):
                for region, turn in self._usable(size, row):
                    yield shard, number, region, turn, key, of_coco
                number += 1
            mapping.madvise(mmap.MADV_DONTNEED)  # pages read so far
        self._counts.rows += number

    def _usable(self, size: tuple[int, int] | str, row: dict):
        """Yields (region, turn) of a row's usable samples; counts the rest.

        size is that of the image, (W, H), or why it cannot be used.
        """
        skipped, conversation = self._counts.skipped, row["conversations"]
        said = answers(conversation or [])
        if not said:
            skipped["no assistant turn" if conversation else "no conversation"] += 1
            return
        if isinstance(size, str):
            skipped[size] += 1
            return
        said = said[:1] if self._turns == "first" else said
        faults = list(map(caption_fault, said))
        turns = [turn for turn, fault in enumerate(faults) if fault is None]
        skipped.update(filter(None, faults))
        if not turns:
            return
        rles = row.get("mask_rle")
        for region, rle in enumerate(rles) if rles and isinstance(rles, list) else [(SINGLE, rles)]:
            reason, resized = check_mask(rle, size[::-1]) if "mask_rle" in row else (None, False)
            if reason is not None:
                skipped[reason] += 1
                continue
            self._counts.resized_masks += resized * len(turns)
            yield from ((region, turn) for turn in turns)


def answers(conversation: list[dict | None]) -> list[str | None]:
    """What the assistant says, turn by turn."""
    return [said["value"] for said in conversation if said and said["from"] in ASSISTANT]


def rle_of(table: pa.Table, row: int, region: int) -> dict | None:
    """The run-length mask of a row's region; None where the table has none: the whole image."""
    rle = table["mask_rle"][row].as_py() if "mask_rle" in table.column_names else None
    return rle if region == SINGLE else rle[region]


def category_of(table: pa.Table, row: int) -> str:
    """The category, several joined by a comma; "" where the dataset states none."""
    for column in CATEGORIES:
        if column in table.column_names:
            names = table[column][row].as_py() or ""
            return names if isinstance(names, str) else ", ".join(filter(None, names))
    return ""
