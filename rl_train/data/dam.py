"""Describe-Anything (nvidia/describe-anything-dataset): JSON beside images in tar files.

`{root}/{SPLIT}/annotations.json` holds {sample_id: region | [region, ..] | {"regions" (or "items",
"objects", "annotations", "list"): [..]} | {k: region}} with region = {"caption": ..,
"mask_rle": {"size": [H, W], "counts": ..}}. The image of sample `id` is the member `{id}.jpg` of
one of `{root}/{SPLIT}/images/*.tar`, or the first frame `{id}.{t}.jpg` of a video (SAV). In the
hub's form Arrow shards `*.arrow` anywhere in the split stand in for the tar files, with `__key__`
and a column `jpg` (or `{t}.jpg`). A `pickle` member or column is never opened.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pyarrow as pa

from rl_train.data.arrow import ArrowShard, natural
from rl_train.data.base import Reader, Region
from rl_train.data.errors import reading
from rl_train.data.hub import resolve
from rl_train.data.images import NO_IMAGE, Encoded, check_read, coco_id, map_file, read_cell

REGION_LISTS = ("regions", "items", "objects", "annotations", "list")
REGION_FIELDS = {"caption", "mask_rle"}
IMAGE_NAME = re.compile(r"(?:\./)*(.+)\.(?:jpe?g|png)", re.IGNORECASE | re.DOTALL)
VIDEO_FRAME = re.compile(r"(.+)\.(\d{1,15})", re.DOTALL)  # id and time
FILES = ["*annotations.json", "*.tar", "*.arrow"]
Json = dict | list | str | float | bool | None  # a value of a JSON file, of any form
# Number of an image's file, and its position there: first and last byte of a tar file's member, or
# column and row of a shard.
Location = tuple[int, int, int]
BAD_NAME = "name of unprintable characters"


class DescribeAnythingDataset(Reader):
    """The captioned regions of all splits below `root`, less those that opening finds unusable.

    [i] -> see `read_sample`; category "", image_id "SPLIT/sample_id/k", with k the region's
    position in its list or its key (0 for a lone region).

    Captions and masks are held as text in an Arrow array, 1.4 KB a region, which workers share.
    Python objects would be copied page by page into each worker.

    Args:
        root: folder of splits, one split's folder, or a hub name, see `resolve`.
        splits: names of folders to read, and to fetch; None reads all.

    Raises:
        ValueError: no annotations.json, an unknown split, an unreadable file, no usable region.
        DamagedSample: on access, an image with a good header that does not decode.
    """

    def __init__(self, root: str | Path, splits: list[str] | None = None):
        super().__init__()
        self._files: list[Path | ArrowShard] = []  # tar files and shards
        for folder in find_splits(resolve(root, FILES, splits), splits):
            self._scan(folder)
        # (n,) JSON of [image_id, caption, mask_rle, `Location`]
        self._samples = pa.array(self._samples, pa.large_string())
        self._finish(root)

    def image_id(self, i: int) -> str:
        return json.loads(self._samples[i].as_py())[0]

    def _place(self, sample: str) -> str:
        return json.loads(sample)[0]

    def _region(self, i: int) -> Region:
        _, caption, rle, location = json.loads(self._samples[i].as_py())
        return Region(lambda: self._read(location), rle, caption)

    def _read(self, location: Location) -> Encoded:
        """Read the encoded image at `location`."""
        number, start, end = location
        file = self._files[number]
        if isinstance(file, Path):
            return map_file(file)[start:end]
        return read_cell(file.table.column(start)[end].as_py(), file.path.parent, file.path.parent)

    def _scan(self, folder: Path):
        """Add the regions of a split."""
        locations = self._find_images(folder)
        for sample_id, value in read_annotations(folder / "annotations.json").items():
            self._num_rows += 1
            regions = regions_of(value)
            if not regions:
                self._skipped["no region"] += 1
                continue
            location = locations.get(sample_id)
            size, key = check_read(lambda: self._read(location)) if location else (NO_IMAGE, 0)
            for k, region in regions:
                image_id = f"{folder.name}/{sample_id}/{k}"
                fields = region if isinstance(region, dict) else {}
                caption, rle = fields.get("caption"), fields.get("mask_rle")
                # A line break would split a line of the log; half a character cannot be printed.
                image = (size if image_id.isprintable() else BAD_NAME, key)
                text = json.dumps([image_id, caption, rle, location])
                self._add(text, image, caption, rle, coco_id(sample_id))

    def _find_images(self, folder: Path) -> dict[str, Location]:
        """Find the image of each sample: {id: its location}.

        `{id}.jpg`, else the first of `{id}.{t}.jpg`, in `{folder}/images/*.tar` and in the Arrow
        shards below `folder`. Raises BadData that names a damaged file.
        """
        tars = sorted(folder.glob("images/*.tar"), key=lambda path: natural(path.name))
        tars = [path for path in tars if path.is_file()]  # reading a pipe would wait for ever
        arrows = sorted(folder.rglob("*.arrow"), key=lambda path: natural(path.as_posix()))
        files = [*tars, *(ArrowShard(path, {"__key__": pa.string()}) for path in arrows)]
        first = {}  # id -> (time, location)
        for number, file in enumerate(files, len(self._files)):
            images = shard_cells(file.table) if isinstance(file, ArrowShard) else tar_members(file)
            for name, start, end in images:  # of a shard: column and row
                match = IMAGE_NAME.fullmatch(name)
                if not match:
                    continue
                frame = VIDEO_FRAME.fullmatch(match[1])
                # The same name may be a picture's id, or a frame of a video's.
                names = [(match[1], -1)] + ([(frame[1], int(frame[2]))] if frame else [])
                for key, time in names:  # a plain name comes before all frames
                    if key not in first or time < first[key][0]:
                        first[key] = time, (number, start, end)
        self._files += files
        return {key: location for key, (_, location) in first.items()}


def read_annotations(path: Path) -> dict:
    """Return {sample_id: its value} of annotations.json. Raises BadData that names the file.

    The whole file is read at once: for 1.5 million regions (2.1 GB) that takes 5.2 GB and 31 s.
    """
    with reading(path, "annotations.json"):
        return dict(json.loads(path.read_bytes()).items())  # AttributeError if it is no object


def regions_of(value: Json) -> list[tuple[str, Json]]:
    """Return (key or position, region) of a sample's value in any form; empty if none fits."""
    if isinstance(value, dict) and not REGION_FIELDS & value.keys():
        value = next((value[name] for name in REGION_LISTS if name in value), value)
    if isinstance(value, dict):
        return [("0", value)] if REGION_FIELDS & value.keys() else list(value.items())
    return [(str(k), region) for k, region in enumerate(value)] if isinstance(value, list) else []


def find_splits(root: Path, splits: list[str] | None) -> list[Path]:
    """Return the split folders in natural order.

    Raises:
        ValueError: one of `splits` is missing.
    """
    if (root / "annotations.json").is_file():
        folders = [root.resolve()]
    else:
        paths = [path.parent for path in root.glob("*/annotations.json")]
        folders = sorted(paths, key=lambda path: natural(path.name))
    names = [folder.name for folder in folders]
    for split in splits or []:
        if split not in names:
            raise ValueError(
                f"--data_dir {root} has no split {split!r}; it has {', '.join(names)}."
            )
    if not folders:
        raise ValueError(f"--data_dir {root} holds no annotations.json, nor does a folder in it.")
    return [folder for folder in folders if splits is None or folder.name in splits]


def tar_members(path: Path) -> list[tuple[str, int, int]]:
    """Return [(name, start, end)] of a tar file's regular files; links are left out."""
    with reading(path, "tar file"), tarfile.open(path, "r:") as tar:
        # Python before 3.11.14 would go round for ever behind a member of a negative size.
        members = takewhile(lambda member: member.size >= 0, tar)
        files = [member for member in members if member.isreg()]
    return [(file.name, file.offset_data, file.offset_data + file.size) for file in files]


def shard_cells(table: pa.Table) -> Iterator[tuple[str, int, int]]:
    """Yield (`{__key__}.{column}`, column, row) of the image cells of a shard."""
    for column, name in enumerate(table.column_names):
        if IMAGE_NAME.fullmatch(f"0.{name}"):
            valid = table.column(column).is_valid().to_pylist()
            for row, key in enumerate(table["__key__"].to_pylist()):
                if key is not None and valid[row]:
                    yield f"{key}.{name}", column, row
