"""ReasonSeg and RefCOCO/+/g as the hub's sets of Seg-Zero hold them, in Parquet.

Columns, by name: image struct<bytes, path>; text; mask list<list<bool>>, the rows of the target.
Where ReasonSeg's annotators said "ignore", its original evaluation leaves these pixels out. The
hub's masks hold them as target, so that published numbers of this family, and those measured here,
compare with each other and not with the original's.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl_train.data.arrow import IMAGE, check_columns
from rl_train.data.base import Reader, Region
from rl_train.data.errors import reading
from rl_train.data.hub import resolve
from rl_train.data.images import Encoded, check_read, read_cell
from rl_train.data.parquet import find_parquet, read_images
from rl_train.data.reasonseg_files import ReasonSegFilesDataset
from rl_train.data.rle import DAMAGED_RLE, RLE, encode_mask

COLUMNS = {"image": IMAGE, "text": pa.string(), "mask": pa.list_(pa.list_(pa.bool_()))}


def open_reasonseg(
    data_dir: str | Path, split: str | None = None, default_split: str = "train"
) -> Reader:
    """Open ReasonSeg in either form: Parquet, which is one split, or the authors' files.

    Raises ValueError as the readers do, and if a split is named of Parquet.
    """
    if any(Path(data_dir).glob("*/*.json")):
        return ReasonSegFilesDataset(data_dir, split or default_split)
    if split:
        raise ValueError(
            f"--subsets {split}: --data_dir {data_dir} holds no folders of JSON files, and Parquet "
            "is one split"
        )
    return ReasonSegDataset(data_dir)


class ReasonSegDataset(Reader):
    """The rows of all *.parquet below `data_dir`, less those that opening finds unusable.

    [i] -> see `read_sample`; image_id is "file/row". Masks are held in memory, run-length coded.
    The set does not tell which images of COCO these are.

    Args:
        data_dir: folder of files, or a hub name, see `resolve`.

    Raises:
        ValueError: no such folder, no file or usable row; names an unreadable file or its column.
        DamagedSample: on access, an image that does not decode, or a file that is gone.
    """

    def __init__(self, data_dir: str | Path):
        super().__init__()
        self._root = resolve(data_dir, ["*.parquet"])
        files = find_parquet(self._root)
        if not files:
            raise ValueError(f"--data_dir {data_dir} holds no *.parquet, at any depth")
        read_images.cache_clear()  # of files that may have been written anew
        for path in files:
            with reading(path, "Parquet file"):
                self._scan(path)
        self._finish(data_dir)

    def _scan(self, path: Path):
        """Add the samples of a file."""
        num_rows = 0
        file = pq.ParquetFile(path)
        check_columns(file.schema_arrow, path, COLUMNS)
        for group in range(file.num_row_groups):
            # Row group by row group, as a file may exceed the memory.
            table = file.read_row_group(group, columns=["text", "mask"])
            for row, (text, mask) in enumerate(zip(table["text"].to_pylist(), table["mask"])):
                read, rle = partial(self._read, path, group, row), encode_rows(mask)
                region = Region(read, rle, text, image_id=f"{path.stem}/{num_rows}")
                self._add(region, check_read(read), text, rle)
                num_rows += 1
        self._num_rows += num_rows

    def _read(self, path: Path, group: int, row: int) -> Encoded:
        return read_cell(read_images(path, group)[row].as_py(), path.parent, self._root)


def encode_rows(cell: pa.ListScalar) -> RLE | None:
    """Return the run-length code of a mask's rows, or None if there is none."""
    rows = cell.values
    if rows is None or not len(rows):
        return None
    flat, lengths = rows.flatten(), pc.list_value_length(rows).to_pylist()
    if flat.null_count or len(set(lengths)) > 1 or not lengths[0]:
        return DAMAGED_RLE
    return encode_mask(np.asarray(flat, dtype=bool).reshape(len(rows), -1))
