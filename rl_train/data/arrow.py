"""Files of rows with images; Arrow shards, which are memory-mapped."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from glob import escape, glob
from pathlib import Path

import pyarrow as pa

from rl_train.data.errors import BadData, reading

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
# Rows that `ArrowShard.rows` holds in memory at once, with their encoded images.
ROWS_AT_ONCE = 16


@dataclass
class RowFile:
    """A file of rows with images, opened at its first use in each process.

    Attributes:
        columns: {name: type} of the columns that it must have, see `check_columns`.
    """

    path: Path
    columns: dict[str, pa.DataType]

    def __getstate__(self) -> dict:  # without what was opened
        return dict(path=self.path, columns=self.columns)

    def rows(self, names: list[str]) -> Iterator[dict]:
        """Yield {column of `names`: value} of each row; a column that is absent has no key."""
        raise NotImplementedError

    def image(self, row: int) -> dict | None:
        """Return the cell of the column "image"."""
        raise NotImplementedError


class ArrowShard(RowFile):
    """A `RowFile` of Arrow, mapped into memory."""

    @cached_property
    def table(self) -> pa.Table:
        """Map the table into memory, see `read_shard`."""
        return read_shard(self.path, self.columns)

    def rows(self, names: list[str]) -> Iterator[dict]:
        table = self.table.select([name for name in names if name in self.table.column_names])
        for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
            yield from batch.to_pylist()

    def image(self, row: int) -> dict | None:
        return self.table["image"][row].as_py()


def find_shards(data_dir: Path, parts: list[str] | None = None) -> list[tuple[str, Path]]:
    """Return (part, path) of the shards below `data_dir`, in natural order (Part10 after Part2).

    A shard is a file `data-*.arrow` at any depth or `*.arrow` directly in `data_dir`. The files
    `cache-*.arrow` that `datasets` leaves behind do not count. Its part is its folder below
    `data_dir`. Shards in `data_dir` itself have that folder's name, the same as when the folder
    above is read.

    Raises:
        ValueError: no shard, or a name in `parts` that no folder has.
    """
    shards = {}  # path -> part
    for pattern in ("**/data-*.arrow", "*.arrow"):
        for path in map(Path, glob(f"{escape(str(data_dir))}/{pattern}", recursive=True)):
            folder = path.parent.relative_to(data_dir).as_posix()
            if not path.name.startswith("cache-"):
                shards[path] = data_dir.resolve().name if folder == "." else folder
    if not shards:
        raise ValueError(
            f"--data_dir {data_dir} holds no data-*.arrow, at any depth, nor *.arrow: these are of "
            "--dataset gar; another layout is read by --dataset dam, refcoco, segzero, sa2va, "
            "coco, folders, muse or reasonseg"
        )
    folders = {part: {part, *part.split("/")} for part in shards.values()}
    for name in parts or []:
        if not any(name in names for names in folders.values()):
            raise ValueError(
                f"--data_dir {data_dir} has no part {name!r}; it has "
                f"{', '.join(sorted(folders, key=natural))}."
            )
    return sorted(
        ((part, path) for path, part in shards.items() if not parts or folders[part] & set(parts)),
        key=lambda shard: (natural(shard[0]), natural(shard[1].name)),
    )


def read_shard(path: Path, columns: dict[str, pa.DataType]) -> pa.Table:
    """Map the table of an Arrow IPC stream into memory.

    Raises:
        BadData: the file is unreadable, or one of `columns` is missing or of another type.
    """
    with reading(path, "Arrow shard"):
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        table.validate(full=True)  # offsets inside of their buffers, text that is UTF-8
    check_columns(table.schema, path, columns)
    return table


def check_columns(schema: pa.Schema, path: Path, columns: dict[str, pa.DataType]):
    """Raise BadData, naming file and column, if one is missing or does not convert to its type."""
    for name, expected in columns.items():
        if schema.names.count(name) != 1:
            raise BadData(
                f"{path} has no column {name!r}, or two of them; it has {', '.join(schema.names)}."
            )
        actual = schema.field(name).type
        try:
            # An empty array converts if the types do.
            pa.array([], actual).cast(expected)
        except pa.ArrowException as error:
            raise BadData(f"{path}: column {name!r} holds {actual}, not {expected}.") from error


def natural(text: str) -> list:
    """Return a sort key that compares the numbers in `text` as numbers."""
    runs = re.split(r"(\d+)", text)  # digits and other characters in turn
    return [(int(run), "") if run.isdecimal() else (-1, run) for run in runs]
