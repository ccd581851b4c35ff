"""COCO's instances JSON: each annotation with a "segmentation" is a region.

`{data_dir}/*.json`, or `{data_dir}/annotations/*.json`, is {"images": [{"id", "file_name",
"height", "width"}], "annotations": [{"image_id", "segmentation", "category_id", ..}],
"categories": [{"id", "name"}]}. The caption is the annotation's own "caption" or "description".
"""

from pathlib import Path

from rl_train.data.errors import BadData
from rl_train.data.hub import resolve
from rl_train.data.image_files import (
    BAD_ROW,
    ImageFileReader,
    JsonValue,
    find_table,
    read_json_file,
)

CAPTION_KEYS = ("caption", "description")  # of an annotation, the first that it has
IMAGE_FOLDERS = ("", "images", "train2014", "val2014", "train2017", "val2017")


class COCODataset(ImageFileReader):
    """The annotations of one JSON file that have a caption, less the unusable ones.

    [i] -> see `read_sample`; image_id is "file/number of the annotation".

    Args:
        data_dir: folder of the JSON file, or a hub name, see `resolve`.
        split: name of the JSON file without its ending, if there are several.
        image_root: folder that the images lie in as IMAGE_FOLDERS say; default is `data_dir`.
        category_captions: where an annotation has no caption, the name of its category is one.

    Raises:
        ValueError: no such file, or one that is unreadable or of another form; no usable row.
        DamagedSample: on access, an image with a good header that does not decode.
    """

    def __init__(
        self,
        data_dir: str | Path,
        split: str | None = None,
        image_root: str | Path | None = None,
        category_captions: bool = False,
    ):
        root = resolve(data_dir, ["*.json", "*.jpg", "*.png"])
        super().__init__(root, image_root, IMAGE_FOLDERS)
        path = find_table(root, split)
        content = read_json_file(path)
        for key in ("images", "annotations"):
            if not isinstance(content, dict) or not isinstance(content.get(key), list):
                raise BadData(f"{path} has no list {key!r}: it is no file of COCO's instances")
        images, categories = by_id(content["images"]), by_id(content.get("categories"))
        for number, annotation in enumerate(content["annotations"]):
            place = f"{path.stem}/{number}"
            if not isinstance(annotation, dict):
                self._num_rows += 1
                self._skip(BAD_ROW, place)
                continue
            image = images.get(str(annotation.get("image_id")), {})
            name = categories.get(str(annotation.get("category_id")), {}).get("name")
            captions = [annotation[key] for key in CAPTION_KEYS if annotation.get(key)]
            captions += [name] if category_captions and name else []
            self._add_row(
                image.get("file_name"),
                annotation.get("segmentation"),
                captions[0] if captions else None,
                place,
                category=name if isinstance(name, str) else "",
                size=stated_size(image),
            )
        self._finish(data_dir)


def stated_size(image: dict) -> tuple[int, int] | None:
    """Return (H, W) of an image if the file states it."""
    size = (image.get("height"), image.get("width"))
    return None if None in size else size


def by_id(entries: JsonValue) -> dict[str, dict]:
    """Return {id, as text: entry} of a list of objects."""
    entries = entries if isinstance(entries, list) else []
    return {str(entry.get("id")): entry for entry in entries if isinstance(entry, dict)}
