"""Arrow shards on disk: where they are, and their tables, memory-mapped and checked."""

import mmap
import re
from glob import escape, glob
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl_train.data.errors import BadData
from rl_train.data.images import check_read, map_file, read_cell

# What a column holds: "bytes", "text", "int", "bool", [list of], {field: of a struct},
# (one, or the other)
LEAVES = {
    "bytes": (pa.types.is_binary, pa.types.is_large_binary),
    "text": (pa.types.is_string, pa.types.is_large_string),
    "int": (pa.types.is_integer,),
    "bool": (pa.types.is_boolean,),
}
MAPPED = {}  # {shard: its bytes when this process mapped it}
LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
IMAGE = {"bytes": "bytes", "path": "text"}
RLE = {"counts": ("text", "bytes", ["int"]), "size": ["int"]}


def find_shards(data_dir: Path, parts: list[str] | None = None) -> list[tuple[str, Path]]:
    """(part, path) of the shards below `data_dir`, in natural order (Part10 after Part2).

    A shard is a file `data-*.arrow` at any depth or `*.arrow` directly in `data_dir` (but no
    `cache-*.arrow`, which `datasets` leaves behind). Its part is its folder below `data_dir`, for
    shards in `data_dir` itself that folder's name: the same as when the folder above is read.

    Raises:
        ValueError: no such folder, no shard in it, or a name in `parts` that no folder has.
    """
    if not data_dir.is_dir():
        raise ValueError(f"--data_dir {data_dir} is not a folder.")
    shards = {}  # path -> part
    for pattern in ("**/data-*.arrow", "*.arrow"):
        for path in map(Path, glob(f"{escape(str(data_dir))}/{pattern}", recursive=True)):
            folder = path.parent.relative_to(data_dir).as_posix()
            if not path.name.startswith("cache-"):
                shards[path] = data_dir.resolve().name if folder == "." else folder
    if not shards:
        raise ValueError(f"--data_dir {data_dir} holds no data-*.arrow, at any depth, nor *.arrow.")
    known = sorted(set(shards.values()), key=natural)
    folders = {part: {part, *part.split("/")} for part in known}
    for name in parts or []:
        if not any(name in names for names in folders.values()):
            names = ", ".join(known)
            raise ValueError(f"--data_dir {data_dir} has no part {name!r}; it has {names}.")
    return sorted(
        ((part, path) for path, part in shards.items() if not parts or folders[part] & set(parts)),
        key=lambda shard: (natural(shard[0]), natural(shard[1].name)),
    )


def map_shard(path: Path, columns: dict, optional={}) -> tuple[pa.Table, mmap.mmap]:
    """The table of an IPC stream or IPC file, and the memory map that it reads from, uncopied.

    Pages of the map that were read count as this process's memory until `madvise(MADV_DONTNEED)`.

    Args:
        columns: name -> what it holds (see LEAVES); optional: of columns that may be absent.

    Raises:
        ValueError: naming the file: unreadable, one of `columns` missing, or of another kind.
    """
    try:
        mapping = map_file(path)
        source = pa.BufferReader(pa.py_buffer(mapping))
        is_file = mapping[:6] == b"ARROW1"
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        table = reader.read_all()
        table.validate(full=True)  # offsets inside of their buffers, text that is UTF-8
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable Arrow shard: {error}") from error
    check_columns(table, path, columns, optional)
    MAPPED[path] = len(mapping)
    return table, mapping


def map_again(path: Path, columns: dict, optional={}) -> tuple[pa.Table, mmap.mmap]:
    """As `map_shard`, of a shard that was whole when the data set was opened. Raises BadData."""
    try:
        return map_shard(path, columns, optional)
    except ValueError as error:
        raise BadData(f"it was whole when it was opened: {error}") from error


def shards_cut_short() -> list[Path]:
    """The shards that are now shorter than when this process mapped them, or gone."""
    return [path for path, n in MAPPED.items() if not path.is_file() or path.stat().st_size < n]


def check_whole(path: Path, mapping: mmap.mmap):
    """Raise BadData if a mapped file was cut short, which ends a process that reads on (SIGBUS)."""
    if mapping.size() < len(mapping):
        raise BadData(
            f"{path} was cut short while it was read: it has {mapping.size()} bytes of "
            f"{len(mapping)}"
        )


def check_columns(table: pa.Table, path: Path, columns: dict, optional={}):
    """Check what a shard's columns hold, see `map_shard`. Raises ValueError that names both."""
    for name, wanted in (columns | optional).items():
        if table.column_names.count(name) > 1:
            raise ValueError(f"{path} has more than one column {name!r}.")
        if name in table.column_names:
            kind = table.schema.field(name).type
            if not _holds(kind, wanted):
                raise ValueError(f"{path}: column {name!r} holds {kind}, not {wanted}.")
        elif name in columns:
            known = ", ".join(table.column_names)
            raise ValueError(f"{path} has no column {name!r}; it has {known}.")


def check_images(images: pa.Array, folder: Path, root: Path | None = None):
    """Yields (`check_image`, `image_key`) of each cell struct<bytes, path>; see `read_cell`."""
    for data, path in image_cells(images):
        yield check_read(read_cell, data, path, folder, root)


def image_names(images: pa.Array) -> list[str | None]:
    """The path of each cell of bytes or struct<bytes, path>."""
    if pa.types.is_struct(images.type):
        return pc.struct_field(images, "path").to_pylist()
    return [None] * len(images)


def image_cells(images: pa.Array) -> list[tuple[memoryview | None, str | None]]:
    """(bytes, path) of each cell of bytes or struct<bytes, path>; the bytes are not copied."""
    paths = image_names(images)
    if pa.types.is_struct(images.type):
        images = pc.struct_field(images, "bytes")
    if pa.types.is_null(images.type) or len(images) == 0:
        return [(None, path) for path in paths]
    wide = pa.types.is_large_binary(images.type)
    _, offsets, data = images.buffers()
    offsets = np.frombuffer(offsets, np.int64 if wide else np.int32)
    offsets = offsets[images.offset : images.offset + len(images) + 1].tolist()
    data, valid = memoryview(data or b""), images.is_valid().to_pylist()
    spans = zip(offsets, offsets[1:], valid, paths)
    return [(data[start:end] if good else None, path) for start, end, good, path in spans]


def natural(text: str) -> list:
    """Sort key that compares the numbers in `text` as numbers."""
    pieces = re.split(r"(\d+)", text)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]


def _holds(kind: pa.DataType, wanted) -> bool:
    """Whether values of type `kind` are what is wanted; a column of no value may be of null."""
    if pa.types.is_null(kind):
        return True
    if isinstance(wanted, tuple):
        return any(_holds(kind, one) for one in wanted)
    if isinstance(wanted, list):
        return any(test(kind) for test in LISTS) and _holds(kind.value_type, wanted[0])
    if isinstance(wanted, dict):
        return pa.types.is_struct(kind) and all(
            [f.name for f in kind].count(name) == 1 and _holds(kind.field(name).type, of)
            for name, of in wanted.items()
        )
    return any(test(kind) for test in LEAVES[wanted])
