"""Shared code of readers whose rows name image files: where a row's image lies, which table of rows
a folder holds, and rows of JSON, JSONL and CSV."""

import csv
import json
from collections.abc import Iterator, Sequence
from functools import partial
from os.path import isfile
from pathlib import Path

from rl_train.data.base import Reader, Region
from rl_train.data.errors import BadData, reading
from rl_train.data.hub import resolve
from rl_train.data.images import Encoded, ImageCheck, check_read, coco_id, read_cell
from rl_train.data.polygons import Segmentation, encoded_or_damaged
from rl_train.data.rle import RLE

BAD_ROW = "row of another form"
JsonValue = dict | list | str | float | bool | None


class ImageFileReader(Reader):
    """A `Reader` of rows that name image files.

    Args:
        root: folder of the data set.
        image_root: folder that the images lie in, or one that holds it as `folders` say; default is
            `root`.
        folders: places of the images below it, of which the first that has a row's image counts.
    """

    def __init__(
        self,
        root: Path,
        image_root: str | Path | None = None,
        folders: Sequence[str] = ("", "images"),
    ):
        super().__init__()
        self._image_root = Path(image_root) if image_root else None
        self._image_folders = [Path(image_root or root) / folder for folder in folders]
        self._checked: dict[str, tuple[partial[Encoded], ImageCheck]] = {}

    def _check_image(self, name: JsonValue) -> tuple[partial[Encoded], ImageCheck]:
        """Return (a function that reads the image, its `check_read`), of an image once."""
        name = name if isinstance(name, str) else ""
        if name not in self._checked:
            folders = self._image_folders
            # Not Path.is_file, which raises for some names that no file can have.
            holding = (folder for folder in folders if name and isfile(folder / name))
            folder = next(holding, folders[0])
            read = partial(read_cell, dict(path=name), folder, folder)
            self._checked[name] = read, check_read(read)
        return self._checked[name]

    def _add_row(
        self,
        image: JsonValue,
        segmentation: Segmentation | None,
        caption: JsonValue,
        image_id: str,
        category: str = "",
        size: tuple[int, int] | None = None,
    ):
        """Keep a region that a row describes if it can be used; otherwise count the reason.

        Args:
            image: name of its file.
            segmentation: polygons or run-length masks.
            image_id: with the row's file and number: faults are named by it.
            size: (H, W) of the image in which polygons lie, if the row states it.
        """
        _, (size_or_reason, _) = self._check_image(image)
        stored_size = (0, 0) if isinstance(size_or_reason, str) else size_or_reason[::-1]
        rle = encoded_or_damaged(segmentation, size or stored_size)
        self._add_mask(image, rle, caption, image_id, category)

    def _add_mask(
        self,
        image: JsonValue,
        rle: RLE | None,
        caption: JsonValue,
        image_id: str,
        category: str = "",
        objects: tuple[RLE | None, ...] | None = None,
        columns: dict[str, JsonValue] | None = None,
    ):
        """Keep a region whose mask is encoded already; see `_add_row` and `Region`."""
        self._num_rows += 1
        read, checked = self._check_image(image)
        region = Region(
            read, rle, caption, category, image_id, objects=objects, columns=columns or {}
        )
        self._add(region, checked, caption, rle, coco_id(image))

    def _skip_row(self, place: str):
        """Count a row of another form, which holds no region."""
        self._num_rows += 1
        self._skip(BAD_ROW, place)


class TableReader(ImageFileReader):
    """A reader of one file of rows. A layout is a subclass: its places, and `_read_row`.

    [i] -> see `read_sample`; image_id is "file/number of the row", and what `_read_row` adds.

    Args:
        data_dir: folder of the file, or a hub name, see `resolve`.
        split: name of the file without its ending, if there are several.
        image_root: folder that the images lie in as `image_folders` say; default is `data_dir`.

    Raises:
        ValueError: no such file, or one that is unreadable or of another form; no usable row.
        DamagedSample: on access, an image with a good header that does not decode.
    """

    image_folders: Sequence[str] = ("", "images")  # places of the images
    hub_files: Sequence[str] = ("*.json", "*.jpg")  # to download, as `resolve` takes them

    def __init__(
        self,
        data_dir: str | Path,
        split: str | None = None,
        image_root: str | Path | None = None,
    ):
        self._root = resolve(data_dir, list(self.hub_files))
        super().__init__(self._root, image_root, self.image_folders)
        self._read_all(split)
        self._finish(data_dir)

    def _read_all(self, split: str | None):
        """Add all regions. The default reads a JSON list, a row at a time."""
        path = find_table(self._root, split)
        for number, row in enumerate(read_json_list(path)):
            self._read_row(row if isinstance(row, dict) else {}, f"{path.stem}/{number}")

    def _read_row(self, row: dict[str, JsonValue], place: str):
        """Add the regions of a row, or count why there are none.

        Args: row: {} if it is no object; place: "file/number of the row".
        """


def find_table(root: Path, name: str | None, endings: Sequence[str] = (".json",)) -> Path:
    """Return the file of rows in a folder, or in its folder "annotations".

    Args:
        name: of the file without its ending; needed if there are several and none is called
            "annotations".

    Raises:
        ValueError: no such file, or several; names --data_dir or --subsets.
    """
    files = [
        path
        for folder in (root, root / "annotations")
        for path in sorted(folder.glob("*"))
        if path.suffix in endings and path.is_file()
    ]
    kinds = " or ".join(endings)
    if not files:
        raise ValueError(f"--data_dir {root} holds no {kinds}")
    named = [path for path in files if path.stem == (name or "annotations")]
    if len(named) != 1:
        named = files if name is None and len(files) == 1 else []
    if not named:
        held = ", ".join(path.stem for path in files)
        wanted = f"no {name}{'' if len(endings) > 1 else kinds}" if name else f"several {kinds}"
        raise ValueError(f"--data_dir {root} holds {wanted}: name one by --subsets: {held}")
    return named[0]


def read_json_file(path: Path) -> JsonValue:
    """Return what a JSON file holds. Raises BadData that names the file if it cannot be read."""
    with reading(path, "JSON file"):
        return json.loads(path.read_bytes())


def read_json_list(path: Path) -> list[JsonValue]:
    """Return the list in a JSON file. Raises BadData that names the file if it holds none."""
    rows = read_json_file(path)
    if not isinstance(rows, list):
        raise BadData(f"{path} holds no list of rows")
    return rows


def read_table(path: Path) -> Iterator[dict[str, JsonValue] | None]:
    """Yield the rows of a CSV file with a header, or of a file with one JSON object a line.

    A line that is no object gives None. Raises BadData that names the file if it cannot be read.
    """
    with reading(path, "table"), path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
            return
        for line in file:
            if line.strip():
                yield parse_row(line)


def parse_row(line: str) -> dict[str, JsonValue] | None:
    """Return the JSON object of a line, or None if it holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
