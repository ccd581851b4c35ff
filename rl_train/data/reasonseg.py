"""ReasonSeg and RefCOCO/+/g as the hub's sets of Seg-Zero hold them, in Parquet, for evaluation.

Columns, by name: image struct<bytes, path>; text; mask list<list<bool>>, the rows of the target.
Where ReasonSeg's annotators said "ignore", its original evaluation leaves these pixels out. The
hub's masks hold them as target, so that published numbers of this family, and those measured here,
compare with each other and not with the original's.
"""

from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl_train.data.arrow import IMAGE, check_columns, check_images, natural
from rl_train.data.errors import BadData
from rl_train.data.hub import folder_of
from rl_train.data.images import NOT_COCO, read_cell
from rl_train.data.masks import BAD_MASK, NO_MASK, check_mask, encode_mask
from rl_train.data.samples import Counts, read_mask, read_sample
from rl_train.data.text import caption_fault

COLUMNS = {"image": IMAGE, "text": "text", "mask": [["bool"]]}
UNREADABLE = (pa.ArrowException, OSError, ValueError)


class ReasonSegDataset:
    """The rows of all *.parquet below `data_dir`, less those that opening finds unusable.

    [i] -> see `read_sample`; image_id is "file/row". Masks are held in memory, run-length coded.

    Raises:
        ValueError: no such folder, no file or usable row; names an unreadable file or its column.
        DamagedSample: on access, an image with a good header and end that does not decode.
        BadData: on access, a file is not readable any more.
    """

    def __init__(self, data_dir):
        self._root, self._counts = folder_of(data_dir), Counts()
        files = self._root.glob("**/*.parquet")
        self._files = sorted(files, key=lambda path: natural(str(path)))
        if not self._files:
            raise ValueError(f"--data_dir {data_dir} holds no *.parquet, at any depth")
        self._open = None  # (file, row group, its images), of this process
        self._rows = [row for number in range(len(self._files)) for row in self._scan(number)]
        if not self._rows:
            raise ValueError(f"--data_dir {data_dir} holds no usable region: {self.report()}")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_open": None}

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
        return self._rows[i][5]

    def __getitem__(self, i: int) -> dict:
        number, group, row, rle, text, image_id, _ = self._rows[i]
        cell, folder = self._images(number, group)[row].as_py(), self._files[number].parent
        where = (cell["bytes"], cell["path"], folder, self._root)
        return read_sample(lambda: read_cell(*where), rle, text, "", image_id)

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """See `read_mask`, of sample i."""
        return read_mask(self._rows[i][3], size, self._rows[i][5])

    def _images(self, number: int, group: int) -> pa.ChunkedArray:
        """The images of a row group; the last one is kept, for samples are read in order."""
        if self._open is None or self._open[:2] != (number, group):
            path = self._files[number]
            try:
                table = pq.ParquetFile(path).read_row_group(group, columns=["image"])
            except UNREADABLE as error:
                raise BadData(f"{path} was whole when it was opened: {error}") from error
            self._open = number, group, table["image"]
        return self._open[2]

    def _scan(self, number: int):
        """Yields (file, row group, row in it, mask, text, image_id, key of the image)."""
        path, skipped, place = self._files[number], self._counts.skipped, 0
        try:
            file = pq.ParquetFile(path)
            check_columns(file.schema_arrow.empty_table(), path, COLUMNS)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(COLUMNS))
                images = chain.from_iterable(
                    check_images(chunk, path.parent, self._root) for chunk in table["image"].chunks
                )
                for row, (size, key) in enumerate(images):
                    text, image_id = table["text"][row].as_py(), f"{path.stem}/{place}"
                    rle = _mask(table["mask"][row])
                    reason, resized = (rle if isinstance(rle, str) else None), False
                    if isinstance(size, str):
                        reason = size
                    elif reason is None:
                        reason, resized = check_mask(rle, size[::-1])
                    if reason := reason or caption_fault(text):
                        skipped[reason] += 1
                    else:
                        self._counts.resized_masks += resized
                        yield number, group, row, rle, text, image_id, key
                    place += 1
        except UNREADABLE as error:
            if str(path) in str(error):
                raise
            raise ValueError(f"{path} is not a readable Parquet file: {error}") from error
        self._counts.rows += place


def _mask(cell: pa.ListScalar) -> dict | str:
    """The run-length code of a mask's rows, or why there is none."""
    rows = cell.values
    if rows is None or not len(rows):
        return NO_MASK
    flat, lengths = rows.flatten(), pc.list_value_length(rows).to_pylist()
    if flat.null_count or len(set(lengths)) > 1 or not lengths[0]:
        return BAD_MASK
    return encode_mask(flat.to_numpy(zero_copy_only=False).reshape(len(rows), -1))
