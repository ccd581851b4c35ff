"""RefCOCO, RefCOCO+ and RefCOCOg: regions of COCO train2014 images with the phrases that people
referred to them by.

`{root}/{name}/instances.json` is in COCO's format; `{root}/{name}/refs(unc).p` (refcocog:
`refs(umd).p`) is a pickle of a list of {"ref_id", "ann_id", "split", "sentences": [{"sent_id",
"sent"}], ..}. A pickle can run any program, so this one is read by an unpickler that builds lists,
dicts, strings and numbers and refuses everything else.
"""

import json
import pickle
from pathlib import Path

import numpy as np
from pycocotools import mask as coco

from rl_train.data.hub import folder_of
from rl_train.data.images import MAX_PIXELS, NO_IMAGE, check_read, coco_id, map_file
from rl_train.data.masks import BAD_MASK, NO_MASK, check_mask, rle_runs
from rl_train.data.samples import Counts, read_mask, read_sample
from rl_train.data.text import caption_fault

NAMES = {"refcoco": "refs(unc).p", "refcoco+": "refs(unc).p", "refcocog": "refs(umd).p"}
IMAGE_FOLDERS = (
    "",
    "train2014",
    "coco2014/train2014",
    "images/train2014",
    "images/mscoco/images/train2014",
)
# What a file of other things raises.
UNREADABLE = (OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, RecursionError)
UNREADABLE += (pickle.UnpicklingError,)
BAD_POLYGON = "bad polygon"
# Pixels that a polygon may lie off the origin: pycocotools' memory grows with its edges' length.
MAX_SIDE = 100_000


class RefCOCODataset:
    """The referred regions of one split, a row per (ref, sentence), less the unusable ones.

    [i] -> see `read_sample`; image_id is "{name}/{split}/{ref_id}/{sent_id}".

    Args:
        root: folder that holds the folder `name`.
        name: one of NAMES; split: train, val, testA or testB (refcocog: train, val, test).
        image_root: folder of the images or one that holds it as IMAGE_FOLDERS say; default is
            `root`, then `root/name`.

    Raises:
        ValueError: an unknown name or split, an unreadable file, no plain data, no usable row.
        DamagedSample: on access, an image with a good header and end that does not decode.
    """

    def __init__(self, root, name: str = "refcoco", split: str = "val", image_root=None):
        if name not in NAMES:
            raise ValueError(f"--dataset {name} is none of {', '.join(NAMES)}")
        folder = folder_of(root) / name
        bases = [image_root] if image_root else [root, folder]
        self._folders = [Path(base) / sub for base in bases for sub in IMAGE_FOLDERS]
        instances, refs = read_instances(folder / "instances.json"), read_refs(folder / NAMES[name])
        splits = sorted({ref["split"] for ref in refs})
        if split not in splits:
            raise ValueError(
                f"{folder / NAMES[name]} has no split {split!r}; it has {', '.join(splits)}"
            )
        self._name, self._split, self._counts = name, split, Counts()
        refs = [ref for ref in refs if ref["split"] == split]
        self._rows = [row for ref in refs for row in self._usable(ref, *instances)]
        if not self._rows:
            raise ValueError(f"--data_dir {root} holds no usable region of {name}: {self.report()}")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def image_keys(self) -> np.ndarray:
        """(n,) int64 key of each sample's image, the same wherever there is a copy of it."""
        return np.array([key for *_, key in self._rows], dtype=np.int64)

    @property
    def coco_ids(self) -> np.ndarray:
        """(n,) int64 `coco_id` of each sample's image, by its file's name."""
        return np.array([coco_id(row[0].name) for row in self._rows], dtype=np.int64)

    def report(self) -> dict:
        """See `Counts.report`."""
        return self._counts.report(len(self))

    def image_id(self, i: int) -> str:
        """Of sample i, without reading it."""
        return self._rows[i][5]

    def sentence(self, i: int) -> str:
        """Of sample i, as it stands in the file; its caption is cleaned, see `clean_caption`."""
        return self._rows[i][3]

    def __getitem__(self, i: int) -> dict:
        path, segmentation, size, *words, _ = self._rows[i]
        return read_sample(lambda: map_file(path), encode_segmentation(segmentation, *size), *words)

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """See `read_mask`, of sample i."""
        _, segmentation, stated, _, _, image_id, _ = self._rows[i]
        return read_mask(encode_segmentation(segmentation, *stated), size, image_id)

    def _usable(self, ref: dict, images: dict, annotations: dict):
        """Yields the rows of one ref; counts the rest.

        A row is (image file, segmentation, (H, W) of COCO's image, caption, category, image_id,
        key of the image).
        """
        self._counts.rows += len(ref["sentences"])
        image, segmentation, category = annotations.get(ref["ann_id"], (None, None, ""))
        file_name, size = images.get(image, (None, None))
        places = [folder / Path(file_name).name for folder in self._folders] if file_name else []
        path = next((place for place in places if place.is_file()), None)
        image_size, key = check_read(map_file, path) if path else (NO_IMAGE, 0)
        reason, resized = check_segmentation(segmentation, size, image_size)
        if ref["ann_id"] not in annotations:
            reason = "no annotation"
        for sentence in ref["sentences"]:
            if fault := reason or caption_fault(sentence["sent"]):
                self._counts.skipped[fault] += 1
                continue
            self._counts.resized_masks += resized
            image_id = f"{self._name}/{self._split}/{ref['ref_id']}/{sentence['sent_id']}"
            yield path, segmentation, size, sentence["sent"], category, image_id, key


class PlainUnpickler(pickle.Unpickler):
    """Builds lists, tuples, dicts, strings and numbers; raises ValueError for all else."""

    def find_class(self, module, name):
        raise ValueError(f"it asks for {module}.{name}, and a data set needs no code")


def read_refs(path: Path) -> list[dict]:
    """The refs of a pickle, Python 2's too.

    Raises ValueError, naming the file, if it holds anything but plain data, or other refs.
    """
    try:
        with path.open("rb") as file:
            refs = PlainUnpickler(file, encoding="utf-8", errors="replace").load()
        for ref in refs:
            texts = [ref["split"], *(sentence["sent"] for sentence in ref["sentences"])]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("a split or sentence is no text")
            ref["ref_id"], ref["ann_id"], [sentence["sent_id"] for sentence in ref["sentences"]]
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a readable pickle of refs: {error!r}") from error
    return refs


def read_instances(path: Path) -> tuple[dict, dict]:
    """({image id: (file name, (H, W))}, {annotation id: (image id, segmentation, category)}).

    Raises ValueError, naming the file, if it cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
        names = {one["id"]: one["name"] for one in content.get("categories", [])}
        images, annotations = {}, {}
        for one in content["images"]:
            images[one["id"]] = one["file_name"], (one["height"], one["width"])
        for one in content["annotations"]:
            category = names.get(one.get("category_id"), "")
            annotations[one["id"]] = one["image_id"], one.get("segmentation"), category
        return images, annotations
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a readable instances.json: {error!r}") from error


def check_segmentation(
    segmentation, size: tuple[int, int], image_size: tuple[int, int] | str
) -> tuple[str | None, bool]:
    """(why a region cannot be used or None, whether its mask's size is not that of its image).

    size is COCO's (H, W) of the image; image_size the file's (W, H), or why it cannot be used.
    """
    if isinstance(image_size, str) or not segmentation:
        return (image_size if isinstance(image_size, str) else NO_MASK), False
    try:
        return check_mask(encode_segmentation(segmentation, *size), image_size[::-1])
    except ValueError:
        part = segmentation[0] if isinstance(segmentation, list) else segmentation
        return BAD_MASK if isinstance(part, dict) else BAD_POLYGON, False


def encode_segmentation(segmentation, height: int, width: int) -> dict:
    """pycocotools' run-length code of the union of polygons [x, y, x, y, ..] or run-length masks.

    Args:
        segmentation: a list of polygons, one {"counts", "size"} or a list of them.
        height, width: of the image that polygons lie in; run-length masks state their own.

    Raises:
        ValueError: neither; see `check_polygon` and `rle_runs`; masks of different sizes.
    """
    parts = segmentation if isinstance(segmentation, list) else [segmentation]
    if all(isinstance(part, dict) and {"counts", "size"} <= part.keys() for part in parts):
        checked = [rle_runs(part) for part in parts]  # before C code sees them
        if len({tuple(size) for _, *size in checked}) > 1:
            raise ValueError("run-length masks of one region differ in size")
        rles = [
            coco.frPyObjects({"counts": runs.tolist(), "size": size}, *size)
            for runs, *size in checked
        ]
    else:
        sides = all(type(n) is int and 0 < n <= MAX_SIDE for n in (height, width))
        if not sides or height * width > MAX_PIXELS:
            raise ValueError(f"image size {height} x {width}")
        for polygon in parts:
            check_polygon(polygon)
        rles = coco.frPyObjects(parts, height, width)
    return coco.merge(rles)


def check_polygon(polygon):
    """Raise ValueError unless `polygon` is [x, y, x, y, ..] of 3 points or more near the origin."""
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        raise ValueError(f"a polygon is x, y of 3 points or more, not {str(polygon)[:80]}")
    if not all(type(n) in (int, float) and abs(n) <= MAX_SIDE for n in polygon):
        raise ValueError("a coordinate is no number, or far outside of any image")
