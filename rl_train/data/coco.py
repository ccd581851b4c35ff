"""COCO's instances JSON: each annotation with a "segmentation" is a region.

`{data_dir}/*.json`, or `{data_dir}/annotations/*.json`, is {"images": [{"id", "file_name",
"height", "width"}], "annotations": [{"image_id", "segmentation", "category_id", ..}],
"categories": [{"id", "name"}]}. The caption is the annotation's own "caption" or "description".
"""

from rl_train.data.errors import BadData
from rl_train.data.image_files import JsonValue, TableReader, find_table, read_json_file

CAPTION_KEYS = ("caption", "description")  # of an annotation, the first that it has


class COCODataset(TableReader):
    """The annotations of one JSON file that have a caption, less the unusable ones."""

    image_folders = ("", "images", "train2014", "val2014", "train2017", "val2017")
    category_captions = False  # whether the category's name is a caption where there is no other

    def _read_all(self, split: str | None):
        path = find_table(self._root, split)
        content = read_json_file(path)
        for key in ("images", "annotations"):
            if not isinstance(content, dict) or not isinstance(content.get(key), list):
                raise BadData(f"{path} has no list {key!r}: it is no file of COCO's instances")
        images, categories = by_id(content["images"]), by_id(content.get("categories"))
        for number, annotation in enumerate(content["annotations"]):
            place = f"{path.stem}/{number}"
            if not isinstance(annotation, dict):
                self._skip_row(place)
                continue
            image = images.get(str(annotation.get("image_id")), {})
            name = categories.get(str(annotation.get("category_id")), {}).get("name")
            captions = [annotation[key] for key in CAPTION_KEYS if annotation.get(key)]
            captions += [name] if self.category_captions and name else []
            self._add_row(
                image.get("file_name"),
                annotation.get("segmentation"),
                captions[0] if captions else None,
                place,
                category=name if isinstance(name, str) else "",
                size=stated_size(image),
            )


class COCONamesDataset(COCODataset):
    """`COCODataset` with the category's name where an annotation has no caption."""

    category_captions = True


def stated_size(image: dict) -> tuple[int, int] | None:
    """Return (H, W) of an image if the file states it."""
    size = (image.get("height"), image.get("width"))
    return None if None in size else size


def by_id(entries: JsonValue) -> dict[str, dict]:
    """Return {id, as text: entry} of a list of objects."""
    entries = entries if isinstance(entries, list) else []
    return {str(entry.get("id")): entry for entry in entries if isinstance(entry, dict)}
