"""Captions of whole images with a mask for each phrase (GCG), as GranD-f and Sa2VA's training have
them.

A JSON file is a list of {"file_name", "height", "width", "caption", "groundings": {phrase:
{"token_positives": [start, end] in the caption, "rle_masks": [run-length mask, ..]}}}. The layout
is that of GranDf_HA_GCG_train.json, as dataset/gcg_datasets/GranDf_gcg_ds.py of
mbzuai-oryx/groundingLMM reads it; a phrase's masks are united.
"""

from collections.abc import Sequence
from pathlib import Path

from rl_train.data.hub import resolve
from rl_train.data.image_files import (
    BAD_ROW,
    ImageFileReader,
    JsonValue,
    find_table,
    read_json_list,
)
from rl_train.data.polygons import encoded_or_damaged, union
from rl_train.data.text import clean_caption

FOLDERS = ("", "images", "GranDf_HA_images/train", "GranDf_HA_images/val_test")
# Characters of no script that stand for the two tags while a caption is cleaned of tags.
OPEN, CLOSE = "\ue000", "\ue001"


class GCGDataset(ImageFileReader):
    """The captions of one JSON file, less the unusable ones.

    [i] -> see `read_sample`; a sample has the masks of its phrases as "objects", their union as its
    mask, and the phrases, in the caption's order, as the column "phrases". The column
    "grounded_caption" is `grounded_caption` of it. image_id is "file/row".

    Args:
        data_dir: folder of the JSON file, or a hub name, see `resolve`.
        split: name of the JSON file without its ending, if there are several.
        image_root: folder that the images lie in as FOLDERS say; default is `data_dir`.

    Raises:
        ValueError: no such file, or one that is unreadable or no list; no usable row.
        DamagedSample: on access, an image with a good header that does not decode.
    """

    has_objects = True

    def __init__(
        self,
        data_dir: str | Path,
        split: str | None = None,
        image_root: str | Path | None = None,
    ):
        root = resolve(data_dir, ["*.json", "*.jpg"])
        super().__init__(root, image_root, FOLDERS)
        path = find_table(root, split)
        for number, row in enumerate(read_json_list(path)):
            place, fields = f"{path.stem}/{number}", row if isinstance(row, dict) else {}
            phrases = phrases_in_order(fields.get("groundings"))
            if not phrases:
                self._num_rows += 1
                self._skip(BAD_ROW, place)
                continue
            size = (fields.get("height"), fields.get("width"))
            masks = tuple(encoded_or_damaged(entry.get("rle_masks"), size) for _, entry in phrases)
            self._add_mask(
                fields.get("file_name"),
                union(masks, size),
                fields.get("caption"),
                place,
                objects=masks,
                columns=dict(
                    phrases=[phrase for phrase, _ in phrases],
                    grounded_caption=grounded_caption(fields.get("caption"), phrases),
                ),
            )
        self._finish(data_dir)


def phrases_in_order(groundings: JsonValue) -> list[tuple[str, dict]]:
    """Return the phrases and their entries by their place in the caption, [] if one has no place.

    A place is [start, end]. Phrases at one place keep the order of the file.
    """
    entries = list(groundings.items()) if isinstance(groundings, dict) else []
    starts = []
    for _, entry in entries:
        place = entry.get("token_positives") if isinstance(entry, dict) else None
        if not isinstance(place, list) or [type(n) for n in place] != [int, int]:
            return []
        starts.append(place[0])
    order = sorted(range(len(entries)), key=starts.__getitem__)
    return [entries[k] for k in order]


def grounded_caption(caption: JsonValue, phrases: Sequence[tuple[str, dict]]) -> str:
    """Return the cleaned caption with tags around each phrase and [SEG] behind it.

    As projects/sa2va/datasets/data_utils of bytedance/Sa2VA writes it: "<p> A dog </p> [SEG] sits".

    Args: phrases: see `phrases_in_order`; a caption that is no text gives "".
    """
    text = caption if isinstance(caption, str) else ""
    text = text.replace(OPEN, " ").replace(CLOSE, " ")
    for _, entry in reversed(phrases):  # the last first, so that the places before it hold
        start, end = entry["token_positives"]
        text = f"{text[:start]}{OPEN}{text[start:end]}{CLOSE}{text[end:]}"
    return clean_caption(text).replace(OPEN, "<p> ").replace(CLOSE, " </p> [SEG]")
