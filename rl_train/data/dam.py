"""Describe-Anything (nvidia/describe-anything-dataset): JSON beside images in tar files.

`{root}/{SPLIT}/annotations.json` holds {sample_id: region | [region, ..] | {"regions" (or "items",
"objects", "annotations", "list"): [..]} | {k: region}} with region = {"caption": ..,
"mask_rle": {"size": [H, W], "counts": ..}}. The image of sample `id` is the member `{id}.jpg` of
one of `{root}/{SPLIT}/images/*.tar`, or the first frame `{id}.{t}.jpg` of a video (SAV). In the
hub's form uncompressed Arrow shards `*.arrow` anywhere in the split stand in for the tar files,
with `__key__` and a column `jpg` (or `{t}.jpg`). A `pickle` member or column is never opened.
"""

import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from rl_train.data.arrow import IMAGE, check_columns, image_cells, map_shard, natural
from rl_train.data.hub import resolve
from rl_train.data.images import NO_IMAGE, check_image, coco_id, image_key, map_file
from rl_train.data.masks import check_mask
from rl_train.data.samples import Counts, read_mask, read_sample
from rl_train.data.text import caption_fault

REGION_LISTS = ("regions", "items", "objects", "annotations", "list")
REGION_FIELDS = {"caption", "mask_rle"}
IMAGE_NAME = re.compile(r"(?:\./)*(.+)\.(?:jpe?g|png)", re.IGNORECASE | re.DOTALL)
FRAME = re.compile(r"(.+)\.(\d{1,15})", re.DOTALL)  # id and time of a video's frame
BLOCK = 512  # of a tar file
FILES = ["*annotations.json", "*.tar", "*.arrow"]
BAD_NAME = "name of unprintable characters"


class DescribeAnythingDataset:
    """The captioned regions of all splits below `root`, less those that opening finds unusable.

    [i] -> see `read_sample`; category "", image_id "SPLIT/sample_id/k", with k the region's place
    in its list or its key (0 for a lone region).

    Captions and masks are held as text in Arrow arrays, 1.4 KB a region, which workers share; as
    Python objects they would be copied page by page into each.

    Args:
        root: folder of splits, one split's folder, or a hub name, see `resolve`.
        splits: names of folders to read, and to fetch; None reads all.

    Raises:
        ValueError: no annotations.json, an unknown split, an unreadable file, no usable region.
        DamagedSample: on access, an image with a good header and end that does not decode.
    """

    def __init__(self, root, splits: list[str] | None = None):
        self._files, self._counts, self._num_ignored = [], Counts(), 0
        texts, places = [], []
        for folder in find_splits(resolve(root, FILES, splits), splits):
            found = list(self._scan(folder))
            texts.append(pa.array([text for text, _ in found], pa.large_string()))
            places += [place for _, place in found]
        # JSON of [image_id, caption, mask_rle]; (n, 5) int64 image's file, start, end, key, COCO id
        self._regions = pa.chunked_array(texts)
        self._places = np.array(places, dtype=np.int64).reshape(-1, 5)
        if len(self) == 0:
            raise ValueError(f"--data_dir {root} holds no usable region: {self.report()}")

    def __len__(self) -> int:
        return len(self._places)

    @property
    def image_keys(self) -> np.ndarray:
        """(n,) int64 key of each sample's image, the same wherever there is a copy of it."""
        return self._places[:, 3]

    @property
    def coco_ids(self) -> np.ndarray:
        """(n,) int64 `coco_id` of each sample's image, by the sample's name."""
        return self._places[:, 4]

    def report(self) -> dict:
        """See `Counts.report`; and "ignored_members", see `find_images`."""
        return self._counts.report(len(self)) | {"ignored_members": self._num_ignored}

    def image_id(self, i: int) -> str:
        """Of sample i, without reading it."""
        return json.loads(self._regions[i].as_py())[0]

    def __getitem__(self, i: int) -> dict:
        file, start, end, *_ = self._places[i].tolist()
        image_id, caption, rle = json.loads(self._regions[i].as_py())
        path = self._files[file]
        return read_sample(lambda: map_file(path)[start:end], rle, caption, "", image_id)

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """See `read_mask`, of sample i."""
        image_id, _, rle = json.loads(self._regions[i].as_py())
        return read_mask(rle, size, image_id)

    def _scan(self, folder: Path):
        """Yields (JSON text, place of the image) of a split's usable regions; counts the rest."""
        images, num_ignored = find_images(folder)
        self._num_ignored += num_ignored
        paths = sorted({path for path, _, _ in images.values()})
        files = {path: (len(self._files) + k, map_file(path)) for k, path in enumerate(paths)}
        self._files += paths
        for sample_id, value in read_annotations(folder / "annotations.json").items():
            self._counts.rows += 1
            regions = regions_of(value)
            if not regions:
                self._counts.skipped["no region"] += 1
                continue
            place, size = None, NO_IMAGE
            if sample_id in images:
                path, start, end = images[sample_id]
                number, mapping = files[path]
                data = memoryview(mapping)[start:end]
                place = number, start, end, image_key(data), coco_id(sample_id)
                size = check_image(data)
            for k, region in regions:
                reason, resized = check_region(region, size)
                image_id = f"{folder.name}/{sample_id}/{k}"
                if not image_id.isprintable():  # a line break in the log, or what it cannot print
                    reason = reason or BAD_NAME
                if reason is not None:
                    self._counts.skipped[reason] += 1
                    continue
                self._counts.resized_masks += resized
                yield json.dumps([image_id, region["caption"], region["mask_rle"]]), place


def read_annotations(path: Path) -> dict:
    """{sample_id: its value} of annotations.json. Raises ValueError, naming the file, if it cannot.

    The whole file is read at once: for 1.5 million regions (2.1 GB) that takes 5.2 GB and 31 s.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable annotations.json: {error}") from error
    return content


def regions_of(value) -> list[tuple[str, object]]:
    """(key or place, region) of one sample's value, in any of its forms; empty for any other."""
    if isinstance(value, dict) and not REGION_FIELDS & value.keys():
        value = next((value[name] for name in REGION_LISTS if name in value), value)
    if isinstance(value, dict):
        return [("0", value)] if REGION_FIELDS & value.keys() else list(value.items())
    return [(str(k), region) for k, region in enumerate(value)] if isinstance(value, list) else []


def check_region(region, image_size: tuple[int, int] | str) -> tuple[str | None, bool]:
    """(why a region cannot be used or None, whether its mask's size is not that of its image).

    image_size is (W, H), or why the image cannot be used.
    """
    caption = region.get("caption") if isinstance(region, dict) else None
    if reason := caption_fault(caption):
        return reason, False
    if isinstance(image_size, str):
        return image_size, False
    return check_mask(region.get("mask_rle"), image_size[::-1])


def find_splits(root: Path, names: list[str] | None) -> list[Path]:
    """The split folders in natural order. Raises ValueError if there is none, or none of a name."""
    if (root / "annotations.json").is_file():
        folders = [root.resolve()]
    else:
        folders = [path.parent for path in root.glob("*/annotations.json")]
        folders.sort(key=lambda folder: natural(folder.name))
    if not folders:
        raise ValueError(f"--data_dir {root} holds no annotations.json, nor does a folder in it.")
    known = [folder.name for folder in folders]
    for name in names or []:
        if name not in known:
            raise ValueError(f"--data_dir {root} has no split {name!r}; it has {', '.join(known)}.")
    return [folder for folder in folders if names is None or folder.name in names]


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
        if not path.is_file():  # opening a pipe would wait for ever
            raise OSError("it is no file")
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members.clear()  # which would else hold every header
                if member.size < 0:  # of which tarfile would go round for ever
                    raise tarfile.ReadError(f"a member of {member.size} bytes")
                unsafe = member.name.startswith("/") or ".." in member.name.split("/")
                if unsafe or not (member.isfile() or member.isdir()):
                    num_ignored += 1
                elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None:
                    start = member.offset_data
                    members.append((member.name, start, start + member.size))
            tar.fileobj.seek(tar.offset)  # tarfile ends at a bad header as at the end
            if tar.fileobj.read(BLOCK).strip(b"\0"):
                raise tarfile.ReadError(f"bad header at byte {tar.offset}")
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError) as error:
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
