"""Sa2VA's own layout for fine-tuning: `{data_dir}/annotations.json` and `{data_dir}/images/`.

The file is a list of {"image": file name, "mask": [polygons of mask 1, ..], "text": [phrase of
mask 1, ..]}, as the fine-tuning page of bytedance/Sa2VA describes it and
projects/sa2va/datasets/sa2va_data_finetune.py there reads it. Different: polygons of a mask that
overlap are united, there they are added up; a mask without a phrase, or a phrase without a mask, is
counted as bad, there it is left out.
"""

from itertools import zip_longest
from pathlib import Path

from rl_train.data.hub import resolve
from rl_train.data.image_files import BAD_ROW, ImageFileReader, find_table, read_json_list
from rl_train.data.polygons import Segmentation


class Sa2VADataset(ImageFileReader):
    """The masks of all rows with their phrases, less those that opening finds unusable.

    [i] -> see `read_sample`; image_id is "file/row/k", k the number of the mask in its row.

    Args:
        data_dir: folder of annotations.json, or a hub name, see `resolve`.
        split: name of another JSON file there, without its ending.
        image_root: folder of the images; default is images/ in `data_dir`, or `data_dir`.

    Raises:
        ValueError: no such file, or one that is unreadable or no list; no usable row.
        DamagedSample: on access, an image with a good header that does not decode.
    """

    def __init__(
        self,
        data_dir: str | Path,
        split: str | None = None,
        image_root: str | Path | None = None,
    ):
        root = resolve(data_dir, ["*.json", "*images/*"])
        super().__init__(root, image_root, ("images", ""))
        path = find_table(root, split)
        for number, row in enumerate(read_json_list(path)):
            place, fields = f"{path.stem}/{number}", row if isinstance(row, dict) else {}
            masks, phrases = fields.get("mask"), fields.get("text")
            if not isinstance(masks, list) or not isinstance(phrases, list) or not masks + phrases:
                self._num_rows += 1
                self._skip(BAD_ROW, place)
                continue
            for k, (mask, phrase) in enumerate(zip_longest(masks, phrases)):
                self._add_row(fields.get("image"), polygons(mask), phrase, f"{place}/{k}")
        self._finish(data_dir)


def polygons(mask: Segmentation | None) -> Segmentation | None:
    """Return a mask's list of polygons; one polygon alone stands for a list of it."""
    is_one = isinstance(mask, list) and mask and all(type(n) in (int, float) for n in mask)
    return [mask] if is_one else mask
