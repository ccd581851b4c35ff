"""The Grasp-Any-Region dataset (HaochenWang/Grasp-Any-Region-Dataset) from its Arrow shards.

Columns, by name: image struct<bytes, path>; mask_rle struct<counts, size>, or a list of them (one sample each), or no
such column (the whole image is the region); conversations list<struct<from, value>>; catagory (the dataset's spelling)
or category, a string or a list of them.
"""

import mmap
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl_train.data.arrow import field, find_shards, is_list, lists, map_shard
from rl_train.data.checks import (
    IMAGE,
    LOST_MASK,
    NO_MASK,
    RLE,
    check_images,
    check_rles,
    lost_at,
    number_images,
)
from rl_train.data.errors import DamagedSample
from rl_train.data.hub import resolve
from rl_train.data.images import DAMAGED, decode_image, read_path
from rl_train.data.masks import decode_runs, resize_nearest, rle_runs
from rl_train.data.text import clean_caption, is_blank

COLUMNS = {"image": IMAGE, "conversations": [{"from": "text", "value": "text"}]}
OPTIONAL = {
    "mask_rle": (RLE, [RLE]),
    "catagory": ("text", ["text"]),
    "category": ("text", ["text"]),
}
ASSISTANT = ("gpt", "assistant")
SINGLE = -1  # region number of a row that holds one region and not a list of them
ROWS_AT_ONCE = 500  # that a scan holds in memory


class GraspAnyRegionDataset:
    """The captioned regions of all shards below `data_dir`; unusable rows are left out at the start and counted.

    [i] -> dict(image PIL RGB, mask (H,W) bool of the image's size, caption str without special tokens, category str,
    image_id str). image_id is "part/file/row", with "-k" behind it for region k of a row that holds several and "-tK"
    for answer K if `turns` is "all"; it does not change when a part is added. Images are decoded on access and never
    rotated (EXIF), since the masks belong to the stored pixels; a mask of another size than its image is resized to it
    by nearest pixel.

    Args:
        data_dir: folder of shards, see `find_shards`, or a hub name, see `resolve`.
        parts: names of folders to read; None reads all.
        turns: "first" = the assistant's first answer is the caption; "all" = one sample for each answer.

    Raises:
        ValueError: no shard, an unknown part, an unreadable shard, a missing column, or not one usable region.
        DamagedSample: on access, an image that passed the checks of its header and end but does not decode.
    """

    def __init__(self, data_dir, parts: list[str] | None = None, turns: str = "first"):
        if turns not in ("first", "all"):
            raise ValueError(f"turns is first or all, not {turns!r}")
        self._shards, self._turns = find_shards(resolve(data_dir), parts), turns  # (part, path)
        self._tables = {}  # shard -> table, mapped on first use in each process
        self._skipped, self._num_rows, self._num_resized = Counter(), 0, 0
        found = np.concatenate([self._scan(shard) for shard in range(len(self._shards))])
        self._samples, self._keys = (
            found[:, :4].astype(np.int32),
            found[:, 4].copy(),
        )  # (shard, row, region, turn), image
        if len(self) == 0:
            raise ValueError(f"--data_dir {data_dir} holds no usable region: {self.report()}")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tables": {}}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def images(self) -> np.ndarray:
        """(n,) int64 number of each sample's image, the same for all rows that hold a copy of it."""
        return number_images(self._keys)

    def report(self) -> dict:
        """{"rows": read, "kept": regions, "skipped": {reason: rows or regions}, "resized_masks": of the kept}."""
        return {
            "rows": self._num_rows,
            "kept": len(self),
            "skipped": dict(self._skipped),
            "resized_masks": self._num_resized,
        }

    def __getitem__(self, i: int) -> dict:
        shard, row, region, turn = self._samples[i].tolist()
        part, path = self._shards[shard]
        table = self._table(shard)
        image_id = (
            f"{part}/{path.stem}/{row}"
            + ("" if region == SINGLE else f"-{region}")
            + (f"-t{turn}" if self._turns == "all" else "")
        )
        try:
            image = decode_image(_image_bytes(table["image"][row], path.parent))
        except DAMAGED as error:
            raise DamagedSample(image_id, "damaged image") from error
        if "mask_rle" in table.column_names:
            rle = table["mask_rle"][row].as_py()
            mask = decode_runs(
                *rle_runs(rle if region == SINGLE else rle[region])
            )  # (H, W) of the RLE
        else:
            mask = np.ones((image.height, image.width), dtype=bool)
        if mask.shape != (image.height, image.width):
            mask = resize_nearest(mask, image.height, image.width)  # (H, W) of the image
        answers = [
            said["value"]
            for said in table["conversations"][row].as_py()
            if said and said["from"] in ASSISTANT
        ]
        return {
            "image": image,
            "mask": mask,
            "caption": clean_caption(answers[turn]),
            "category": _category(table, row),
            "image_id": image_id,
        }

    def _table(self, shard: int) -> pa.Table:
        if shard not in self._tables:
            self._tables[shard] = map_shard(self._shards[shard][1], COLUMNS, OPTIONAL)[0]
        return self._tables[shard]

    def _scan(self, shard: int) -> np.ndarray:
        """(n, 5) int64 usable samples of a shard (shard, row, region, turn, key of the image); counts the rest by reason."""
        path = self._shards[shard][1]
        table, mapping = map_shard(path, COLUMNS, OPTIONAL)
        found = [np.zeros((0, 5), dtype=np.int64)]
        start = 0
        for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
            usable = np.array(list(self._usable(batch, path.parent)), dtype=np.int64).reshape(-1, 4)
            found.append(np.column_stack([np.full(len(usable), shard), usable + [start, 0, 0, 0]]))
            start += len(batch)
            mapping.madvise(mmap.MADV_DONTNEED)  # pages read so far
        self._num_rows += start
        return np.concatenate(found)

    def _usable(self, batch: pa.RecordBatch, folder: Path):
        """Yields (row, region, turn, key of the image) of one batch. Decodes no image: of each it reads the start and the end."""
        every_turn, images, regions = (
            _answers(batch["conversations"]),
            check_images(batch["image"], folder),
            _regions(batch),
        )
        for row, (answers, (size, key), (region_reasons, region_sizes, first)) in enumerate(
            zip(every_turn, images, regions)
        ):
            if isinstance(answers, str) or isinstance(size, str) or not region_reasons:
                self._skipped[
                    answers
                    if isinstance(answers, str)
                    else size
                    if isinstance(size, str)
                    else NO_MASK
                ] += 1
                continue
            turns = [
                turn
                for turn, text in enumerate(answers[:1] if self._turns == "first" else answers)
                if not is_blank(text)
            ]
            blank = (1 if self._turns == "first" else len(answers)) - len(turns)
            if blank:
                self._skipped["blank caption"] += blank
            if not turns:
                continue
            width, height = size
            for k, (reason, mask_size) in enumerate(zip(region_reasons, region_sizes)):
                resized = mask_size is not None and mask_size != [height, width]
                if (
                    reason is None
                    and resized
                    and lost_at(
                        (height, width), mask_size, lambda: _rle(batch["mask_rle"], row, first + k)
                    )
                ):
                    reason = LOST_MASK
                if reason is not None:
                    self._skipped[reason] += 1
                    continue
                self._num_resized += resized * len(turns)
                yield from ((row, first + k, turn, key) for turn in turns)


def _answers(conversations: pa.Array) -> list[list[str | None] | str]:
    """Per row the assistant's answers, or the reason why there is none."""
    lengths, said = lists(conversations)
    speaks = pc.is_in(
        field(said, "from", pa.string()).cast(pa.string()), value_set=pa.array(ASSISTANT)
    )
    texts = field(said, "value", pa.string()).filter(speaks).to_pylist()
    until = np.concatenate([[0], np.cumsum(speaks.to_numpy(zero_copy_only=False))])[
        np.cumsum(lengths)
    ].tolist()
    found, start = [], 0
    for end, length in zip(until, lengths.tolist()):
        found.append("no conversation" if length == 0 else texts[start:end] or "no assistant turn")
        start = end
    return found


def _regions(batch: pa.RecordBatch):
    """Yields per row (reasons, sizes, number of the first region), see `check_rles`; the lists are empty for a row without masks."""
    if "mask_rle" not in batch.schema.names:
        yield from ([[None], [None], SINGLE] for _ in range(len(batch)))
    elif is_list(batch["mask_rle"].type):
        lengths, rles = lists(batch["mask_rle"])
        reasons, sizes = (values.tolist() for values in check_rles(rles))
        ends = np.cumsum(lengths).tolist()
        yield from (
            [reasons[end - length : end], sizes[end - length : end], 0]
            for end, length in zip(ends, lengths.tolist())
        )
    else:
        reasons, sizes = (values.tolist() for values in check_rles(batch["mask_rle"]))
        yield from ([[reason], [size], SINGLE] for reason, size in zip(reasons, sizes))


def _rle(column: pa.Array, row: int, region: int) -> dict:
    rle = column[row].as_py()
    return rle if region == SINGLE else rle[region]


def _image_bytes(cell: pa.StructScalar, folder: Path):
    """The encoded image of a struct<bytes, path> cell; raises one of DAMAGED."""
    return (
        cell["bytes"].as_buffer()
        if cell["bytes"].is_valid
        else read_path(cell["path"].as_py(), folder)
    )


def _category(table: pa.Table, row: int) -> str:
    """The category, several joined by a comma; "" where the dataset states none."""
    for column in ("catagory", "category"):
        if column in table.column_names:
            category = table[column][row].as_py() or ""
            return (
                category
                if isinstance(category, str)
                else ", ".join(name for name in category if name)
            )
    return ""
