"""Arrow shards on disk: where they are, memory-mapped tables, and the images in their cells."""
import base64
import re
from glob import escape, glob
from pathlib import Path

import pyarrow as pa
from PIL import Image

DAMAGED_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what PIL raises for one


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
    paths = {Path(p) for pattern in ("**/data-*.arrow", "*.arrow")
             for p in glob(f"{escape(str(data_dir))}/{pattern}", recursive=True)}
    shards = [(path.parent.relative_to(data_dir).as_posix(), path) for path in paths if not path.name.startswith("cache-")]
    shards = [(data_dir.resolve().name if part == "." else part, path) for part, path in shards]
    if not shards:
        raise ValueError(f"--data_dir {data_dir} holds no Arrow shard (data-*.arrow at any depth, or *.arrow directly in it).")
    if parts is not None:
        for name in parts:
            if not any(_in_part(part, name) for part, _ in shards):
                raise ValueError(f"--data_dir {data_dir} has no part {name!r}; it has {', '.join(sorted({p for p, _ in shards}, key=_natural))}.")
        shards = [(part, path) for part, path in shards if any(_in_part(part, name) for name in parts)]
    return sorted(shards, key=lambda shard: (_natural(shard[0]), _natural(shard[1].name)))


def map_shard(path: Path, columns: dict[str, tuple[str, ...]]) -> pa.Table:
    """The table of an IPC stream or IPC file, memory-mapped: nothing of it is copied.

    Args:
        columns: name -> fields of its struct, or of the structs in its list.

    Raises:
        ValueError: naming the file, which is unreadable, or lacks one of `columns` or a field of it.
    """
    try:
        source = pa.memory_map(str(path))
        is_file_format = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file_format else pa.ipc.open_stream(source)
        table = reader.read_all()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable Arrow shard: {error}") from error
    for name, fields in columns.items():
        if name not in table.column_names:
            raise ValueError(f"{path} has no column {name!r}; it has {', '.join(table.column_names)}.")
        kind = table.schema.field(name).type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if not pa.types.is_null(kind) and not (pa.types.is_struct(kind) and set(fields) <= {field.name for field in kind}):
            raise ValueError(f"{path}: column {name!r} holds {kind}, not a struct of {', '.join(fields)}.")
    return table


def open_image(cell: pa.StructScalar, folder: Path) -> Image.Image:
    """The image of a struct<bytes, path> cell, its header read and its pixels not yet decoded.

    The bytes, else the path: `data:..;base64,..` or a file relative to `folder`. Raises one of DAMAGED_IMAGE.
    """
    data = cell["bytes"] if cell.is_valid else None
    if data is not None and data.is_valid:
        return Image.open(pa.BufferReader(data.as_buffer()))
    path = cell["path"].as_py() if cell.is_valid else None
    if not path:
        raise FileNotFoundError("neither bytes nor a path")
    if path.startswith("data:"):
        return Image.open(pa.BufferReader(base64.b64decode(path.partition("base64,")[2])))
    return Image.open(folder / path)


def _in_part(part: str, name: str) -> bool:
    return name == part or name in part.split("/")


def _natural(text: str) -> list:
    """Sort key that compares the numbers in `text` as numbers."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", text)]
