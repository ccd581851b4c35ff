"""The training sets of Seg-Zero and VisionReasoner (Ricky06662/refCOCOg_9k_840 and its like).

Arrow shards with the columns id, problem (the phrase) and image, 840 x 840 pixels whatever shape it
had. They hold no masks: those lie as {mask_dir}/{id}.png, where white (above 127) is the target.
"""

from pathlib import Path

import numpy as np

from rl_train.data.arrow import IMAGE, check_images, check_whole, find_shards, map_again, map_shard
from rl_train.data.errors import DamagedSample
from rl_train.data.hub import resolve
from rl_train.data.images import DAMAGED, NOT_COCO, check_read, decode_image, map_file, read_cell
from rl_train.data.masks import BAD_MASK, NO_MASK, encode_mask
from rl_train.data.samples import Counts, read_mask, read_sample
from rl_train.data.text import caption_fault

COLUMNS = {"id": "text", "problem": "text", "image": IMAGE}
BAD_ID = "id that is no file name"
THRESHOLD = 127  # of a mask's grey value


class SegZeroDataset:
    """The phrases of all shards below `arrow_dir` that have a mask, less the unusable ones.

    [i] -> see `read_sample`; image_id is the row's id.

    Args:
        arrow_dir: folder of shards, see `find_shards`, or a hub name, see `resolve`.
        mask_dir: default is its folder "masks"; split: see `resolve`.

    Raises:
        ValueError: no shard, mask folder or usable row; an unreadable shard, a missing column.
        DamagedSample: on access, an image or a mask that does not decode, or an empty mask.
        BadData: on access, a shard is not whole any more.
    """

    def __init__(self, arrow_dir, mask_dir=None, split: str | None = None):
        self._root = resolve(arrow_dir, ["*.arrow", "*masks/*.png"], split=split)
        self._masks = Path(mask_dir or self._root / "masks")
        if not self._masks.is_dir():
            raise ValueError(
                f"--data_dir {arrow_dir}: these sets come without masks, and there is no folder "
                f"{self._masks} with one {{id}}.png for each row"
            )
        self._shards = [path for _, path in find_shards(self._root)]
        self._tables, self._counts = {}, Counts()
        self._rows = [row for shard in range(len(self._shards)) for row in self._scan(shard)]
        if not self._rows:
            raise ValueError(f"--data_dir {arrow_dir} holds no usable region: {self.report()}")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tables": {}}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def image_keys(self) -> np.ndarray:
        """(n,) int64 key of each sample's image, the same wherever there is a copy of it."""
        return np.array([key for *_, key in self._rows], dtype=np.int64)

    @property
    def coco_ids(self) -> np.ndarray:
        """(n,) int64, all NOT_COCO: which images of COCO these are, the set does not say."""
        return np.full(len(self), NOT_COCO, dtype=np.int64)

    def report(self) -> dict:
        """See `Counts.report`."""
        return self._counts.report(len(self))

    def image_id(self, i: int) -> str:
        """Of sample i, without reading it."""
        return self._rows[i][2]

    def __getitem__(self, i: int) -> dict:
        shard, row, name, text, _ = self._rows[i]
        path = self._shards[shard]
        cell = self._table(shard)["image"][row].as_py()
        where = (cell["bytes"], cell["path"], path.parent, self._root)
        return read_sample(lambda: read_cell(*where), self._rle(name), text, "", name)

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """See `read_mask`, of sample i."""
        return read_mask(self._rle(self.image_id(i)), size, self.image_id(i))

    def _rle(self, name: str) -> dict:
        """The mask of a row, run-length coded. Raises DamagedSample if its file does not decode."""
        try:
            grey = np.asarray(decode_image(map_file(self._masks / f"{name}.png")).convert("L"))
        except DAMAGED as error:
            raise DamagedSample(name, BAD_MASK) from error
        return encode_mask(grey > THRESHOLD)

    def _table(self, shard: int):
        """A shard's table. Raises BadData if the file is not whole any more."""
        path = self._shards[shard]
        if shard not in self._tables:
            self._tables[shard] = map_again(path, COLUMNS)
        table, mapping = self._tables[shard]
        check_whole(path, mapping)
        return table

    def _scan(self, shard: int):
        """Yields (shard, row, id, phrase, key of the image) of a shard's usable rows."""
        path, number = self._shards[shard], 0
        table, _ = map_shard(path, COLUMNS)
        for batch in table.to_batches():
            rows = batch.select(["id", "problem"]).to_pylist()
            for (size, key), row in zip(check_images(batch["image"], path.parent), rows):
                name, text, fault = row["id"], row["problem"], None
                if isinstance(size, str):
                    fault = size
                elif not name or Path(name).name != name:  # it would lead out of the folder
                    fault = BAD_ID
                else:
                    found, _ = check_read(map_file, self._masks / f"{name}.png")
                    fault = NO_MASK if isinstance(found, str) else caption_fault(text)
                    self._counts.resized_masks += fault is None and found != size
                if fault:
                    self._counts.skipped[fault] += 1
                else:
                    yield shard, number, name, text, key
                number += 1
        self._counts.rows += number
