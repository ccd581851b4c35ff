"""The Grasp-Any-Region dataset (HaochenWang/Grasp-Any-Region-Dataset) from its Arrow shards.

Columns, by name: image struct<bytes, path>; mask_rle struct<counts, size>, or a list of them (one sample each);
conversations list<struct<from, value>>; catagory (the dataset's spelling) or category, a string or a list of them.
"""
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from rl_train.data.arrow import DAMAGED_IMAGE, find_shards, map_shard, open_image
from rl_train.data.masks import decode_runs, foreground, resize_nearest, rle_runs
from rl_train.data.text import clean_caption

NEEDED_COLUMNS = {"image": ("bytes", "path"), "mask_rle": ("counts", "size"), "conversations": ("from", "value")}
CATEGORY_COLUMNS = ("catagory", "category")
ASSISTANT = ("gpt", "assistant")
SINGLE = -1  # region number of a row that holds one region and not a list of them


class GraspAnyRegionDataset:
    """The captioned regions of all shards below `data_dir`; unusable rows are left out at the start and counted.

    [i] -> dict(image PIL RGB, mask (H,W) bool of the image's size, caption str without special tokens, category str,
    image_id str). image_id is "part/file/row", with "-k" behind it for region k of a row that holds several; it does
    not change when a part is added. Images are decoded on access and never rotated (EXIF), since the masks belong to
    the stored pixels; a mask of another size than its image is resized to it by nearest pixel.

    Args:
        data_dir: folder of shards, see `find_shards`.
        parts: names of folders to read; None reads all.

    Raises:
        ValueError: no shard, an unknown part, an unreadable shard, a missing column, or not one usable region;
            on access, an image whose header was good but whose pixels do not decode.
    """

    def __init__(self, data_dir, parts: list[str] | None = None):
        self._shards = find_shards(Path(data_dir), parts)         # (part, path)
        self._tables = {}                                         # shard -> table, mapped on first use in each process
        self._skipped, self._num_rows, self._num_resized = Counter(), 0, 0
        regions = [region for shard in range(len(self._shards)) for region in self._usable_regions(shard)]
        self._regions = np.array(regions, dtype=np.int64).reshape(-1, 3)                       # shard, row, region
        if not regions:
            raise ValueError(f"--data_dir {data_dir} holds no usable region: {self.report()}")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tables": {}}

    def __len__(self) -> int:
        return len(self._regions)

    def report(self) -> dict:
        """{"rows": read, "kept": regions, "skipped": {reason: rows or regions}, "resized_masks": of the kept, other size than the image}."""
        return {"rows": self._num_rows, "kept": len(self), "skipped": dict(self._skipped), "resized_masks": self._num_resized}

    def __getitem__(self, i: int) -> dict:
        shard, row, region = self._regions[i].tolist()
        part, path = self._shards[shard]
        table = self._table(shard)
        image_id = f"{part}/{path.stem}/{row}" + ("" if region == SINGLE else f"-{region}")
        try:
            with open_image(table["image"][row], path.parent) as file:
                image = file.convert("RGB")
        except DAMAGED_IMAGE as error:
            raise ValueError(f"the image of {image_id} does not decode: {error}") from error
        rle = table["mask_rle"][row].as_py()
        mask = decode_runs(*rle_runs(rle if region == SINGLE else rle[region]))                # (H, W) of the RLE
        if mask.shape != (image.height, image.width):
            mask = resize_nearest(mask, image.height, image.width)                             # (H, W) of the image
        return {"image": image, "mask": mask, "caption": _caption(table["conversations"][row].as_py()),
                "category": _category(table, row), "image_id": image_id}

    def _table(self, shard: int) -> pa.Table:
        if shard not in self._tables:
            self._tables[shard] = map_shard(self._shards[shard][1], NEEDED_COLUMNS)
        return self._tables[shard]

    def _usable_regions(self, shard: int):
        """Yields (shard, row, region) and counts the rest by reason. Decodes no image: of each it reads the header."""
        table, folder = self._table(shard), self._shards[shard][1].parent
        self._num_rows += len(table)
        texts, rles = table["conversations"].to_pylist(), table["mask_rle"].to_pylist()       # small beside the images
        for row, (turns, rle) in enumerate(zip(texts, rles)):
            try:
                _caption(turns)
                if not rle:
                    raise _Unusable("no mask")
                width, height = _image_size(table["image"][row], folder)
            except _Unusable as reason:
                self._skipped[str(reason)] += 1
                continue
            for region, one in [(SINGLE, rle)] if isinstance(rle, dict) else enumerate(rle):
                try:
                    self._num_resized += _check_mask(one, height, width)
                    yield shard, row, region
                except _Unusable as reason:
                    self._skipped[str(reason)] += 1


class _Unusable(Exception):
    """A row or region that is left out; the message is the reason it is counted under."""


def _caption(turns: list[dict] | None) -> str:
    """The first answer of the assistant, cleaned."""
    if not turns:
        raise _Unusable("no conversation")
    answers = [turn["value"] for turn in turns if turn["from"] in ASSISTANT]
    if not answers:
        raise _Unusable("no assistant turn")
    caption = clean_caption(answers[0] or "")
    if not caption:
        raise _Unusable("blank caption")
    return caption


def _image_size(cell: pa.StructScalar, folder: Path) -> tuple[int, int]:
    """(W, H) by the image's header."""
    try:
        with open_image(cell, folder) as image:
            return image.size
    except FileNotFoundError:
        raise _Unusable("no image")
    except DAMAGED_IMAGE:
        raise _Unusable("unreadable image header")


def _check_mask(rle: dict | None, height: int, width: int) -> bool:
    """Whether the mask has another size than its (height, width) image; raises _Unusable if no pixel of it is left there."""
    if not rle or rle["counts"] is None:
        raise _Unusable("no mask")
    try:
        runs, *size = rle_runs(rle)
    except ValueError:
        raise _Unusable("bad mask RLE")
    if foreground(runs) == 0:
        raise _Unusable("empty mask")
    if size == [height, width]:
        return False
    if not resize_nearest(decode_runs(runs, *size), height, width).any():
        raise _Unusable("mask empty at the image's size")
    return True


def _category(table: pa.Table, row: int) -> str:
    """The category, several joined by a comma; "" where the dataset states none."""
    for column in CATEGORY_COLUMNS:
        if column in table.column_names:
            category = table[column][row].as_py() or ""
            return category if isinstance(category, str) else ", ".join(name for name in category if name)
    return ""
