"""Sa2VA's own layout for fine-tuning: `{data_dir}/annotations.json` and `{data_dir}/images/`.

The file is a list of {"image": file name, "mask": [polygons of mask 1, ..], "text": [phrase of
mask 1, ..]}, as the fine-tuning page of bytedance/Sa2VA describes it and
projects/sa2va/datasets/sa2va_data_finetune.py there reads it. Different: polygons of a mask that
overlap are united, there they are added up; a mask without a phrase, or a phrase without a mask, is
counted as bad, there it is left out.
"""

from itertools import zip_longest

from rl_train.data.image_files import JsonValue, TableReader
from rl_train.data.polygons import Segmentation


class Sa2VADataset(TableReader):
    """The masks of all rows with their phrases, less those that opening finds unusable.

    image_id is "file/row/k", k the number of the mask in its row.
    """

    image_folders = ("images", "")
    hub_files = ("*.json", "*images/*")

    def _read_row(self, row: dict[str, JsonValue], place: str):
        masks, phrases = row.get("mask"), row.get("text")
        if not isinstance(masks, list) or not isinstance(phrases, list) or not masks + phrases:
            self._skip_row(place)
            return
        for k, (mask, phrase) in enumerate(zip_longest(masks, phrases)):
            self._add_row(row.get("image"), polygons(mask), phrase, f"{place}/{k}")


def polygons(mask: Segmentation | None) -> Segmentation | None:
    """Return a mask's list of polygons; one polygon alone stands for a list of it."""
    is_one = isinstance(mask, list) and mask and all(type(n) in (int, float) for n in mask)
    return [mask] if is_one else mask
