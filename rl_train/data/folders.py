"""Folders of images and masks, with a table of rows or with a text beside each mask.

A table is `{data_dir}/*.csv` with a header, or `{data_dir}/*.jsonl` with a JSON object a line. Its
columns are image and mask, which are files below `data_dir`, caption, and category if there is one;
in JSON a mask may also be polygons or run lengths. Without a table the regions of images/NAME.jpg
are masks/NAME.png, or all masks/NAME/*.png, and the caption of masks/X.png is the text in
masks/X.txt. The region is what is not black in a mask's picture.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rl_train.data.image_files import TableReader, find_table, read_table
from rl_train.data.images import DAMAGED, decode_image, read_cell
from rl_train.data.rle import DAMAGED_RLE, RLE, encode_mask

NO_MASK_FILE = "image without a mask"
TABLES = (".csv", ".jsonl")
COLUMNS = {"image", "mask", "caption"}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


class FoldersDataset(TableReader):
    """The rows of a table, or the masks that have a text, less the unusable ones.

    Without a table image_id is the mask's name, and `image_root` is by default images/ in
    `data_dir`. Masks are decoded when the data set is opened and held in memory, run-length coded.
    """

    hub_files = ("*",)

    def _read_all(self, split: str | None):
        if split or any(path.suffix in TABLES for path in self._root.iterdir()):
            path = find_table(self._root, split, TABLES)
            for number, row in enumerate(read_table(path)):
                self._add_table_row(row, f"{path.stem}/{number}")
        else:
            self._scan(self._image_root or self._root / "images")

    def _add_table_row(self, row: dict | None, place: str):
        """Add the region of a table's row."""
        if row is None or not COLUMNS <= row.keys():
            self._skip_row(place)
            return
        mask, caption, category = row["mask"], row["caption"], row.get("category")
        category = category if isinstance(category, str) else ""
        if isinstance(mask, str):
            rle = self._read_mask(mask) if mask else None
            self._add_mask(row["image"], rle, caption, place, category)
        else:
            self._add_row(row["image"], mask, caption, place, category)

    def _scan(self, images: Path):
        """Add the masks of image files. Raises ValueError if a folder is missing."""
        masks = self._root / "masks"
        for folder in (images, masks):
            if not folder.is_dir():
                raise ValueError(
                    f"--data_dir {self._root} holds neither a table (*.csv, *.jsonl) nor images/ "
                    f"and masks/: {folder} is missing"
                )
        for image in sorted(images.iterdir()):
            if image.suffix.lower() not in IMAGE_ENDINGS:
                continue
            names = list(masks_of(masks, image.stem))
            if not names:
                self._num_rows += 1
                self._skip(NO_MASK_FILE, image.name)
            for name in names:
                text = (masks / name).with_suffix(".txt")
                # What is no UTF-8 becomes half characters, which `_add` finds.
                data = text.read_bytes() if text.is_file() else b""
                caption = data.decode("utf-8", "surrogateescape")
                self._add_mask(image.name, self._read_mask(f"masks/{name}"), caption, name)

    def _read_mask(self, name: str) -> RLE | None:
        """Return the mask in a picture below the folder; None if there is no such file."""
        try:
            picture = decode_image(read_cell(dict(path=name), self._root, self._root))
        except FileNotFoundError:
            return None
        except DAMAGED:
            return DAMAGED_RLE
        return encode_mask(np.asarray(picture).any(-1))


def masks_of(folder: Path, stem: str) -> Iterator[str]:
    """Yield the names of the masks of an image, below `folder`."""
    if (folder / f"{stem}.png").is_file():
        yield f"{stem}.png"
    for path in sorted((folder / stem).glob("*.png")):
        yield f"{stem}/{path.name}"
