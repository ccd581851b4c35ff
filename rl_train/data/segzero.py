"""The training sets of Seg-Zero and VisionReasoner (Ricky06662/refCOCOg_9k_840 and its like).

Arrow shards with the columns id, problem (the phrase) and image, 840 x 840 pixels whatever shape it
had. They hold no masks: those lie as {mask_dir}/{id}.png, where white (above 127) is the target.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from rl_train.data.arrow import IMAGE, Shard, find_shards
from rl_train.data.base import Reader, Region
from rl_train.data.errors import DamagedSample
from rl_train.data.hub import resolve
from rl_train.data.images import (
    DAMAGED,
    Encoded,
    check_read,
    decode_image,
    map_file,
    read_cell,
)
from rl_train.data.rle import BAD_MASK, RLE, encode_mask, whole_mask

COLUMNS = {"id": pa.string(), "problem": pa.string(), "image": IMAGE}
THRESHOLD = 127  # of a mask's grey value


class SegZeroDataset(Reader):
    """The phrases of all shards below `arrow_dir` that have a mask, less the unusable ones.

    [i] -> see `read_sample`; image_id is the row's id. The set does not tell which images of COCO
    these are.

    Args:
        arrow_dir: folder of shards, see `find_shards`, or a hub name, see `resolve`.
        mask_dir: default is its folder "masks".

    Raises:
        ValueError: no shard, mask folder or usable row; an unreadable shard, a missing column.
        DamagedSample: on access, an image or a mask that does not decode, or an empty mask.
    """

    def __init__(self, arrow_dir: str | Path, mask_dir: str | Path | None = None):
        super().__init__()
        self._root = resolve(arrow_dir, ["*.arrow", "*masks/*.png"])
        self._masks = Path(mask_dir or self._root / "masks")
        if not self._masks.is_dir():
            raise ValueError(
                f"--data_dir {arrow_dir}: these sets come without masks, and there is no folder "
                f"{self._masks} with one {{id}}.png for each row"
            )
        for _, path in find_shards(self._root):
            shard = Shard(path, COLUMNS)
            for row, values in enumerate(shard.rows(list(COLUMNS))):
                name, text, read = values["id"], values["problem"], partial(self._read, shard, row)
                self._num_rows += 1
                region = Region(read, None, text, image_id=name)
                self._add(region, check_read(read), text, self._mask_area(name))
        self._finish(arrow_dir)

    def _read(self, shard: Shard, row: int) -> Encoded:
        return read_cell(shard.table["image"][row].as_py(), shard.path.parent, self._root)

    def _mask_area(self, name: str | None) -> RLE | None:
        """Return a mask of the size of a row's mask file, or None."""
        if (
            not isinstance(name, str) or not name or Path(name).name != name
        ):  # it would lead out of the folder
            return None
        size, key = check_read(lambda: map_file(self._masks / f"{name}.png"))
        mask = whole_mask(size)
        return mask and mask | dict(file_key=key)  # tells another mask of this size

    def _region(self, i: int) -> Region:
        region = self._samples[i]
        try:
            image = decode_image(map_file(self._masks / f"{region.image_id}.png"))
        except DAMAGED as error:
            raise DamagedSample(region.image_id, BAD_MASK) from error
        return replace(region, rle=encode_mask(np.asarray(image.convert("L")) > THRESHOLD))
