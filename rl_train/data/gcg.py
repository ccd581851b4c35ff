"""Captions of whole images with a mask for each phrase (GCG), as GranD-f and Sa2VA's training have
them.

A JSON file is a list of {"file_name", "height", "width", "caption", "groundings": {phrase:
{"token_positives": [start, end] in the caption, "rle_masks": [run-length mask, ..]}}}. The layout
is that of GranDf_HA_GCG_train.json, as dataset/gcg_datasets/GranDf_gcg_ds.py of
mbzuai-oryx/groundingLMM reads it; a phrase's masks are united.
"""

from collections.abc import Sequence

from rl_train.data.image_files import JsonValue, TableReader
from rl_train.data.polygons import encoded_or_damaged, union
from rl_train.data.text import clean_caption

# Characters of no script that stand for the two tags while a caption is cleaned of tags.
OPEN, CLOSE = "\ue000", "\ue001"


class GCGDataset(TableReader):
    """The captions of one JSON file, less the unusable ones.

    A sample has the masks of its phrases as "objects", their union as its mask, and the phrases, in
    the caption's order, as the column "phrases". The column "grounded_caption" is
    `grounded_caption` of it.
    """

    has_objects = True
    image_folders = ("", "images", "GranDf_HA_images/train", "GranDf_HA_images/val_test")

    def _read_row(self, row: dict[str, JsonValue], place: str):
        phrases = phrases_in_order(row.get("groundings"))
        if not phrases:
            self._skip_row(place)
            return
        size = (row.get("height"), row.get("width"))
        masks = tuple(encoded_or_damaged(entry.get("rle_masks"), size) for _, entry in phrases)
        self._add_mask(
            row.get("file_name"),
            union(masks, size),
            row.get("caption"),
            place,
            objects=masks,
            columns=dict(
                phrases=[phrase for phrase, _ in phrases],
                grounded_caption=grounded_caption(row.get("caption"), phrases),
            ),
        )


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
