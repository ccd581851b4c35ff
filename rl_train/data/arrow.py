"""Arrow shards on disk: where they are, memory-mapped tables, and columns as numpy sees them."""

import mmap
import re
from glob import escape, glob
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl_train.data.images import map_file

# What a column holds: "bytes", "text", "int", [list of], {field: of a struct}, (one, or the other)
LEAVES = {
    "bytes": (pa.types.is_binary, pa.types.is_large_binary),
    "text": (pa.types.is_string, pa.types.is_large_string),
    "int": (pa.types.is_integer,),
}
LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def find_shards(data_dir: Path, parts: list[str] | None = None) -> list[tuple[str, Path]]:
    """(part, path) of the shards below `data_dir`, in natural order (Part10 after Part2).

    A shard is a file `data-*.arrow` at any depth or `*.arrow` directly in `data_dir` (but no `cache-*.arrow`, which
    `datasets` leaves behind). Its part is its folder below `data_dir`; shards in `data_dir` itself have that
    folder's name, so that their part is the same when the folder above is read.

    Raises:
        ValueError: no such folder, no shard in it, or a name in `parts` that no folder has.
    """
    if not data_dir.is_dir():
        raise ValueError(f"--data_dir {data_dir} is not a folder.")
    paths = {
        Path(p)
        for pattern in ("**/data-*.arrow", "*.arrow")
        for p in glob(f"{escape(str(data_dir))}/{pattern}", recursive=True)
    }
    shards = [
        (path.parent.relative_to(data_dir).as_posix(), path)
        for path in paths
        if not path.name.startswith("cache-")
    ]
    shards = [(data_dir.resolve().name if part == "." else part, path) for part, path in shards]
    if not shards:
        raise ValueError(
            f"--data_dir {data_dir} holds no Arrow shard (data-*.arrow at any depth, or *.arrow directly in it)."
        )
    if parts is not None:
        for name in parts:
            if not any(_in_part(part, name) for part, _ in shards):
                known = ", ".join(sorted({part for part, _ in shards}, key=natural))
                raise ValueError(f"--data_dir {data_dir} has no part {name!r}; it has {known}.")
        shards = [
            (part, path) for part, path in shards if any(_in_part(part, name) for name in parts)
        ]
    return sorted(shards, key=lambda shard: (natural(shard[0]), natural(shard[1].name)))


def map_shard(
    path: Path, columns: dict, optional: dict | None = None
) -> tuple[pa.Table, mmap.mmap]:
    """The table of an IPC stream or IPC file, and the memory map that it reads from: nothing of it is copied.

    Pages of the map that were read count as this process's memory until `madvise(MADV_DONTNEED)`.

    Args:
        columns: name -> what it holds (see LEAVES); optional: of columns that may be absent.

    Raises:
        ValueError: naming the file, which is unreadable, lacks one of `columns`, or has one that holds something else.
    """
    try:
        mapping = map_file(path)
        source = pa.BufferReader(pa.py_buffer(mapping))
        reader = (
            pa.ipc.open_file(source) if mapping[:6] == b"ARROW1" else pa.ipc.open_stream(source)
        )
        table = reader.read_all()
        table.validate(full=True)  # offsets inside of their buffers, text that is UTF-8
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable Arrow shard: {error}") from error
    check_columns(table, path, columns, optional)
    return table, mapping


def check_columns(table: pa.Table, path: Path, columns: dict, optional: dict | None = None):
    """Check what the columns of a shard hold, see `map_shard`. Raises ValueError that names the file and the column."""
    for name, wanted in (columns | (optional or {})).items():
        if table.column_names.count(name) > 1:
            raise ValueError(f"{path} has more than one column {name!r}.")
        if name in table.column_names:
            kind = table.schema.field(name).type
            if not _holds(kind, wanted):
                raise ValueError(f"{path}: column {name!r} holds {kind}, not {_words(wanted)}.")
        elif name in columns:
            raise ValueError(
                f"{path} has no column {name!r}; it has {', '.join(table.column_names)}."
            )


def field(array: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
    """Field `name` of a column of structs, null where the struct is; a column without any value is read as of type `kind`."""
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    values = pc.struct_field(array, name)
    return values.cast(kind) if pa.types.is_null(values.type) else values


def lists(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """((n,) int64 length of each list, 0 for null; the values of all of them) of a column of lists."""
    if pa.types.is_null(array.type):
        return np.zeros(len(array), dtype=np.int64), pa.nulls(0)
    lengths = pc.fill_null(pc.list_value_length(array).cast(pa.int64()), 0)
    return lengths.to_numpy(zero_copy_only=False), array.flatten()


def byte_strings(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """((C,) uint8, (n + 1,) int64 offsets into it): the values of a text or binary column, not copied."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    if offsets is None or len(array) == 0:
        return np.zeros(0, dtype=np.uint8), np.zeros(len(array) + 1, dtype=np.int64)
    offsets = np.frombuffer(offsets, dtype=np.int64 if wide else np.int32)[
        array.offset : array.offset + len(array) + 1
    ]
    return np.frombuffer(data or b"", dtype=np.uint8), offsets.astype(np.int64)


def valid(array: pa.Array) -> np.ndarray:
    """(n,) bool: not null."""
    return array.is_valid().to_numpy(zero_copy_only=False)


def is_list(kind: pa.DataType) -> bool:
    return any(test(kind) for test in LISTS)


def natural(text: str) -> list:
    """Sort key that compares the numbers in `text` as numbers."""
    return [
        (int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", text)
    ]


def _in_part(part: str, name: str) -> bool:
    return name == part or name in part.split("/")


def _holds(kind: pa.DataType, wanted) -> bool:
    """Whether values of type `kind` are what is wanted; a column without any value may be of type null."""
    if pa.types.is_null(kind):
        return True
    if isinstance(wanted, tuple):
        return any(_holds(kind, one) for one in wanted)
    if isinstance(wanted, list):
        return is_list(kind) and _holds(kind.value_type, wanted[0])
    if isinstance(wanted, dict):
        return pa.types.is_struct(kind) and all(
            [f.name for f in kind].count(name) == 1 and _holds(kind.field(name).type, of)
            for name, of in wanted.items()
        )
    return any(test(kind) for test in LEAVES[wanted])


def _words(wanted) -> str:
    if isinstance(wanted, tuple):
        return " or ".join(map(_words, wanted))
    if isinstance(wanted, list):
        return f"list<{_words(wanted[0])}>"
    if isinstance(wanted, dict):
        return f"struct<{', '.join(f'{name}: {_words(of)}' for name, of in wanted.items())}>"
    return wanted
