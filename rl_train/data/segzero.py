"""The training sets of Seg-Zero and VisionReasoner (Ricky06662/refCOCOg_9k_840 and its like).

Parquet files or Arrow shards with the columns id, problem (the phrase), solution (boxes and
points), image (840 x 840 pixels whatever shape it had), img_height and img_width (which it had).
They hold no masks. If masks lie as {mask_dir}/{id}.png, where white (above 127) is the target, they
are used.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from rl_train.data.arrow import IMAGE, ArrowShard, RowFile, find_shards
from rl_train.data.base import Reader, Region, read_image, read_mask
from rl_train.data.errors import DamagedSample
from rl_train.data.hub import resolve
from rl_train.data.images import (
    DAMAGED,
    MAX_IMAGE_SIDE,
    MAX_PIXELS,
    Encoded,
    ImageCheck,
    check_read,
    decode_image,
    map_file,
    read_cell,
)
from rl_train.data.parquet import ParquetShard, find_parquet, read_images
from rl_train.data.rle import BAD_MASK, RLE, encode_mask, mask_size, whole_mask
from rl_train.data.text import clean_caption
from rl_train.points.published import parse_solution

COLUMNS = {"id": pa.string(), "problem": pa.string(), "image": IMAGE}
OPTIONAL = ("solution", "img_height", "img_width")  # the last two together
THRESHOLD = 127  # of a mask's grey value
BAD_SOLUTION, BAD_SIZE = "no solution of boxes and points", "bad img_height or img_width"


@dataclass
class SolvedRegion(Region):
    """A row of these sets.

    Attributes:
        solution: the column's text, None if it holds no boxes and points.
        size: (H, W) that the image had before it was made square; None: it still has.
    """

    solution: str | None = None
    size: tuple[int, int] | None = None


class SegZeroDataset(Reader):
    """The phrases of all files below `data_dir`, less the unusable ones.

    With a folder of masks these are the phrases that have one, without it those that have a
    solution, and `has_masks` is False. [i] -> see `read_sample`; image_id is the row's id. The
    image has the shape that it had before it was made square. The stored one is under
    "stored_image", the solution under "solution", if there is one. The set does not tell which
    images of COCO these are.

    Args:
        data_dir: folder of *.parquet at any depth or of shards, see `find_shards`; one such file of
            Parquet; or a hub name, see `resolve`.
        mask_dir: default is its folder "masks".

    Raises:
        ValueError: no file or usable row; an unreadable file, a missing column.
        DamagedSample: on access, an image or a mask that does not decode, or an empty mask.
    """

    def __init__(self, data_dir: str | Path, mask_dir: str | Path | None = None):
        super().__init__()
        one_file = Path(data_dir).suffix == ".parquet" and Path(data_dir).is_file()
        patterns = ["*.arrow", "*.parquet", "*masks/*.png"]
        self._root = Path(data_dir).parent if one_file else resolve(data_dir, patterns)
        self._masks = Path(mask_dir or self._root / "masks")
        self.has_masks = self._masks.is_dir()
        files = [Path(data_dir)] if one_file else find_parquet(self._root)
        read_images.cache_clear()  # of files that may have been written anew
        if files:
            shards = [ParquetShard(path, COLUMNS) for path in files]
        else:
            shards = [ArrowShard(path, COLUMNS) for _, path in find_shards(self._root)]
        for shard in shards:
            self._scan(shard)
        try:
            self._finish(data_dir)
        except ValueError as error:
            if self.has_masks or BAD_SOLUTION not in self._skipped:
                raise
            raise ValueError(
                f"{error}: without a folder {self._masks} of one {{id}}.png for each row these "
                "sets need the column 'solution'"
            ) from error

    def _scan(self, shard: RowFile):
        """Add the rows of a file."""
        for number, row in enumerate(shard.rows(["id", "problem", *OPTIONAL])):
            self._num_rows += 1
            read = partial(self._read, shard, number)
            region = SolvedRegion(read, None, row["problem"], image_id=row["id"])
            image = check_read(read)
            if "img_height" in row and "img_width" in row:
                region.size = (row["img_height"], row["img_width"])
                if not is_image_size(region.size):
                    image = (BAD_SIZE, 0)
            if is_solution(row.get("solution")):
                region.solution = row["solution"]
            self._add(region, *self._usable(region, image))

    def _usable(
        self, region: SolvedRegion, image: ImageCheck
    ) -> tuple[ImageCheck, str | None, RLE | None]:
        """Return arguments of `_add`: the image or why the row is unusable, phrase and mask."""
        if self.has_masks:
            return image, region.caption, self._mask_area(region.image_id)
        if not region.solution and not isinstance(image[0], str):
            image = (BAD_SOLUTION, 0)
        return image, region.caption, whole_mask(image[0])

    def _read(self, shard: RowFile, row: int) -> Encoded:
        return read_cell(shard.image(row), shard.path.parent, self._root)

    def _mask_area(self, name: str | None) -> RLE | None:
        """Return a mask of the size of a row's mask file, or None."""
        # A name with a slash could lead out of the folder.
        if not isinstance(name, str) or not name or Path(name).name != name:
            return None
        size, key = check_read(lambda: map_file(self._masks / f"{name}.png"))
        mask = whole_mask(size)
        return mask and mask | dict(file_key=key)  # tells another mask of this size

    def __getitem__(self, i: int) -> dict:
        region = self._samples[i]
        stored = image = read_image(region, region.image_id)
        if region.size and region.size != (stored.height, stored.width):
            image = stored.resize(region.size[::-1], Image.Resampling.BICUBIC)
        sample = dict(
            image=image,
            mask=self.mask(i, mask_size(image.height, image.width)),
            caption=clean_caption(region.caption),
            category=region.category,
            image_id=region.image_id,
        )
        if image is not stored:
            sample["stored_image"] = stored
        if region.solution:
            sample["solution"] = region.solution
        return sample

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """Read the mask of sample i at `size` (H, W); an empty one if the set has no masks."""
        if not self.has_masks:
            return np.zeros(size, dtype=bool)
        name = self.image_id(i)
        try:
            image = decode_image(map_file(self._masks / f"{name}.png"))
        except DAMAGED as error:
            raise DamagedSample(name, BAD_MASK) from error
        return read_mask(encode_mask(np.asarray(image.convert("L")) > THRESHOLD), size, name)


def is_image_size(size: tuple[int | None, int | None]) -> bool:
    """Return whether (H, W) is the size of an image that can be used."""
    if any(type(side) is not int or not 0 < side <= MAX_IMAGE_SIDE for side in size):
        return False
    return size[0] * size[1] <= MAX_PIXELS


def is_solution(text: str | None) -> bool:
    """Return whether `text` holds boxes and points."""
    if not isinstance(text, str):
        return False
    try:
        parse_solution(text)
    except ValueError:
        return False
    return True
