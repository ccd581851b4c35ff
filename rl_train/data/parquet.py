"""Parquet files of rows with images, of which one row group at a time is in memory."""

from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_train.data.arrow import RowFile, check_columns, natural
from rl_train.data.errors import reading


class ParquetShard(RowFile):
    """A `RowFile` of Parquet."""

    @cached_property
    def names(self) -> list[str]:
        """Return the names of its columns. Raises BadData: unreadable, a column is missing."""
        with reading(self.path, "Parquet file"):
            schema = pq.ParquetFile(self.path).schema_arrow
        check_columns(schema, self.path, self.columns)
        return schema.names

    @cached_property
    def starts(self) -> np.ndarray:
        """Return the number of the first row of each row group, and of the row after the last."""
        metadata = pq.ParquetFile(self.path).metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(int)

    def rows(self, names: list[str]) -> Iterator[dict]:
        present = [name for name in names if name in self.names]
        with reading(self.path, "Parquet file"):
            for batch in pq.ParquetFile(self.path).iter_batches(columns=present):
                yield from batch.to_pylist()

    def image(self, row: int) -> dict | None:
        group = int(np.searchsorted(self.starts, row, side="right")) - 1
        return read_images(self.path, group)[row - int(self.starts[group])].as_py()


def find_parquet(data_dir: Path) -> list[Path]:
    """Return the files *.parquet below `data_dir`, in natural order (part 10 after part 2)."""
    return sorted(data_dir.glob("**/*.parquet"), key=lambda path: natural(str(path)))


@lru_cache(maxsize=1)
def read_images(path: Path, group: int) -> pa.ChunkedArray:
    """Read the images of a row group; the last one is cached, for samples read in order."""
    return pq.ParquetFile(path).read_row_group(group, columns=["image"])["image"]
