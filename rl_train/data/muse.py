"""Questions whose answers are several objects, as MUSE has them.

A JSON file is a list of {"file_name" (or "coco_url"), "height", "width", "questions": [text, ..],
"answers": [[{"segmentation", "category_name", "rephrased_name", ..}, ..], ..]}: answers[k] are the
objects of questions[k]. The layout is that of utils/multi_reason_seg_dataset.py of
MaverickRen/PixelLM, which adds up polygons that overlap; here they are united. Images are COCO's:
file_name lies in train2014; of a coco_url the last two parts are folder and file.
"""

from rl_train.data.image_files import JsonValue, TableReader
from rl_train.data.polygons import encoded_or_damaged, union
from rl_train.data.refcoco import IMAGE_FOLDERS


class MUSEDataset(TableReader):
    """The questions of one JSON file, less the unusable ones.

    A sample has the objects, their union as its mask and their names as its category. image_id is
    "file/row/k", k the number of the question in its row.
    """

    has_objects = True
    image_folders = (*IMAGE_FOLDERS, "images", "images/mscoco/images", "coco2017")

    def _read_row(self, row: dict[str, JsonValue], place: str):
        questions, answers = row.get("questions"), row.get("answers")
        is_row = isinstance(questions, list) and isinstance(answers, list)
        if not is_row or len(questions) != len(answers) or not questions:
            self._skip_row(place)
            return
        size = (row.get("height"), row.get("width"))
        for k, (question, objects) in enumerate(zip(questions, answers)):
            objects = [item if isinstance(item, dict) else {} for item in as_list(objects)]
            masks = tuple(encoded_or_damaged(item.get("segmentation"), size) for item in objects)
            names = [item.get("rephrased_name") or item.get("category_name") for item in objects]
            self._add_mask(
                image_name(row),
                union(masks, size) if masks else None,
                question,
                f"{place}/{k}",
                category=", ".join(str(name) for name in names if name),
                objects=masks or None,
            )


def as_list(value: JsonValue) -> list:
    """Return the list itself, or [] in place of anything else."""
    return value if isinstance(value, list) else []


def image_name(row: dict) -> str | None:
    """Return the image's file below the folder of images; None if the row names none."""
    url = row.get("coco_url")
    if row.get("file_name") or not isinstance(url, str):
        return row.get("file_name")
    return "/".join(url.split("/")[-2:])
