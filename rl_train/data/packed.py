"""Where images lie inside of larger files: members of tar files, cells of Arrow shards.

Nothing is unpacked or unpickled.
"""

import re
import tarfile
from pathlib import Path

import pyarrow as pa

from rl_train.data.arrow import IMAGE, check_columns, image_cells, map_shard, natural

IMAGE_NAME = re.compile(r"(?:\./)*(.+)\.(?:jpe?g|png)", re.IGNORECASE | re.DOTALL)
FRAME = re.compile(r"(.+)\.(\d{1,15})", re.DOTALL)  # id and time of a video's frame
BLOCK = 512  # of a tar file


def find_images(folder: Path) -> tuple[dict[str, tuple[Path, int, int]], int]:
    """({id: (file, start, end)}: the bytes of each sample's image, number of tar members ignored).

    `{id}.jpg`, else the first of `{id}.{t}.jpg`, in `{folder}/images/*.tar` and in the Arrow
    shards below `folder`. Ignored are links and names that lead out of the folder.

    Raises:
        ValueError: naming a tar file or shard that is damaged or cut off.
    """
    best, num_ignored = {}, 0
    for path in sorted(folder.glob("images/*.tar"), key=lambda path: natural(path.name)):
        members, ignored = tar_members(path)
        num_ignored += ignored
        _keep_first(best, members, path)
    for path in sorted(folder.rglob("*.arrow"), key=lambda path: natural(path.as_posix())):
        _keep_first(best, _cells(path), path)
    return {key: (path, start, end) for key, (_, path, start, end) in best.items()}, num_ignored


def tar_members(path: Path) -> tuple[list[tuple[str, int, int]], int]:
    """([(name, start, end)] of a tar file's regular files, number of links and unsafe names)."""
    members, num_ignored = [], 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members.clear()  # which would else hold every header
                unsafe = member.name.startswith("/") or ".." in member.name.split("/")
                if unsafe or not (member.isfile() or member.isdir()):
                    num_ignored += 1
                elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None:
                    start = member.offset_data
                    members.append((member.name, start, start + member.size))
            tar.fileobj.seek(tar.offset)  # tarfile ends at a bad header as at the end
            if tar.fileobj.read(BLOCK).strip(b"\0"):
                raise tarfile.ReadError(f"bad header at byte {tar.offset}")
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a readable tar file: {error}") from error
    if members and max(end for _, _, end in members) > path.stat().st_size:
        raise ValueError(f"{path} is not a readable tar file: it is cut off")
    return members, num_ignored


def _cells(path: Path):
    """Yields (`{__key__}.{column}`, start, end) of the image cells of an Arrow shard."""
    table, mapping = map_shard(path, {"__key__": "text"})
    base = pa.py_buffer(mapping).address
    for name in filter(lambda name: IMAGE_NAME.fullmatch(f"0.{name}"), table.column_names):
        check_columns(table, path, {name: ("bytes", IMAGE)})
        for batch in table.select(["__key__", name]).to_batches():
            for key, (data, _) in zip(batch["__key__"].to_pylist(), image_cells(batch[name])):
                if key is None or data is None:
                    continue
                start = pa.py_buffer(data).address - base
                if len(data) and not 0 <= start < len(mapping):
                    raise ValueError(
                        f"{path} is compressed, which its images must not be: write it without "
                        "compression."
                    )
                yield f"{key}.{name}", start, start + len(data)


def _keep_first(best: dict, members, path: Path):
    """Put the images among `members` into `best`: {id: (time, path, start, end)}.

    Of each the earliest, a plain name before all.
    """
    for name, start, end in members:
        if match := IMAGE_NAME.fullmatch(name):
            frame = FRAME.fullmatch(match[1])
            for key, time in [(match[1], -1)] + ([(frame[1], int(frame[2]))] if frame else []):
                if key not in best or time < best[key][0]:
                    best[key] = (time, path, start, end)
