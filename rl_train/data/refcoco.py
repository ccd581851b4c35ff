"""RefCOCO, RefCOCO+ and RefCOCOg: regions of COCO train2014 images with the phrases that people referred to them by.

`{root}/{name}/instances.json` is in COCO's format; `{root}/{name}/refs(unc).p` (refcocog: `refs(umd).p`) is a pickle of a list
of {"ref_id", "ann_id", "split", "sentences": [{"sent_id", "sent"}], ..}. A pickle can run any program, so this one is read by an
unpickler that builds lists, dicts, strings and numbers and refuses everything else.
"""

import json
import math
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
from pycocotools import mask as coco

from rl_train.data.checks import BAD_MASK, EMPTY_MASK, LOST_MASK, NO_MASK
from rl_train.data.errors import DamagedSample
from rl_train.data.images import (
    DAMAGED,
    MAX_PIXELS,
    NO_IMAGE,
    check_image_path,
    decode_image,
    map_file,
)
from rl_train.data.masks import is_int, resize_nearest, rle_runs
from rl_train.data.text import clean_caption, is_blank

NAMES = {"refcoco": "refs(unc).p", "refcoco+": "refs(unc).p", "refcocog": "refs(umd).p"}
IMAGE_FOLDERS = (
    "",
    "train2014",
    "coco2014/train2014",
    "images/train2014",
    "images/mscoco/images/train2014",
)
BAD_POLYGON = "bad polygon"
MAX_SIDE = 100_000  # pixels that a polygon may lie off the origin: pycocotools' memory grows with the length of its edges


class RefCOCODataset:
    """The referred regions of one split, a row per (ref, sentence); unusable rows are left out at the start and counted.

    [i] -> dict(image PIL RGB, mask (H,W) bool of the image's size, caption str without special tokens, category str,
    image_id str). image_id is "{name}/{split}/{ref_id}/{sent_id}". A mask is the union of its polygons, or run-length coded;
    one of another size than its image is resized to it by nearest pixel.

    Args:
        root: folder that holds the folder `name`.
        name: one of NAMES; split: train, val, testA or testB (refcocog: train, val, test).
        image_root: folder of the images or one that holds it as IMAGE_FOLDERS say; default is `root`, then `root/name`.

    Raises:
        ValueError: an unknown name or split, a missing or unreadable file, a pickle that holds more than plain data, or not one
            usable row.
        DamagedSample: on access, an image that passed the checks of its header and end but does not decode.
    """

    def __init__(self, root, name: str = "refcoco", split: str = "val", image_root=None):
        if name not in NAMES:
            raise ValueError(f"--dataset {name} is none of {', '.join(NAMES)}")
        self._name, self._split = name, split
        folder = Path(root) / name
        self._folders = [
            Path(base) / sub
            for base in ([image_root] if image_root else [root, folder])
            for sub in IMAGE_FOLDERS
        ]
        instances, refs = read_instances(folder / "instances.json"), read_refs(folder / NAMES[name])
        splits = sorted({ref["split"] for ref in refs})
        if split not in splits:
            raise ValueError(
                f"{folder / NAMES[name]} has no split {split!r}; it has {', '.join(splits)}"
            )
        self._skipped, self._num_rows, self._num_resized = Counter(), 0, 0
        self._rows = [
            row for ref in refs if ref["split"] == split for row in self._usable(ref, *instances)
        ]
        if not self._rows:
            raise ValueError(f"--data_dir {root} holds no usable region of {name}: {self.report()}")

    def __len__(self) -> int:
        return len(self._rows)

    def report(self) -> dict:
        """{"rows": read, "kept": rows, "skipped": {reason: rows}, "resized_masks": of the kept, other size than the image}."""
        return {
            "rows": self._num_rows,
            "kept": len(self),
            "skipped": dict(self._skipped),
            "resized_masks": self._num_resized,
        }

    def __getitem__(self, i: int) -> dict:
        path, segmentation, size, caption, category, image_id = self._rows[i]
        try:
            image = decode_image(map_file(path))
        except DAMAGED as error:
            raise DamagedSample(image_id, "damaged image") from error
        mask = decode_segmentation(segmentation, *size)
        if mask.shape != (image.height, image.width):
            mask = resize_nearest(mask, image.height, image.width)  # (H, W) of the image
        return {
            "image": image,
            "mask": mask,
            "caption": caption,
            "category": category,
            "image_id": image_id,
        }

    def _usable(self, ref: dict, images: dict, annotations: dict, categories: dict):
        """Yields the rows of one ref: (image file, segmentation, (H, W) of COCO's image, caption, category, image_id)."""
        self._num_rows += len(ref["sentences"])
        annotation = annotations.get(ref["ann_id"])
        image = images.get(annotation["image_id"]) if annotation else None
        path = self._find(image["file_name"]) if image else None
        found = (
            check_image_path(path.name, path.parent)[0] if path else NO_IMAGE
        )  # (W, H), or why not
        resized = False
        if not isinstance(found, str):
            size = (image["height"], image["width"])
            found, resized = check_segmentation(annotation["segmentation"], size, found[::-1])
        for sentence in ref["sentences"]:
            reason = (
                "no annotation" if annotation is None else found if isinstance(found, str) else None
            )
            if reason is None and is_blank(sentence["sent"]):
                reason = "blank caption"
            if reason is None:
                self._num_resized += resized
                yield (
                    path,
                    annotation["segmentation"],
                    size,
                    clean_caption(sentence["sent"]),
                    categories.get(annotation.get("category_id"), ""),
                    f"{self._name}/{self._split}/{ref['ref_id']}/{sentence['sent_id']}",
                )
            else:
                self._skipped[reason] += 1

    def _find(self, file_name: str) -> Path | None:
        """The image of that name, whatever folder it is said to be in; folders that held one are asked first."""
        for k, folder in enumerate(self._folders):
            path = folder / Path(file_name).name
            if path.is_file():
                self._folders.insert(0, self._folders.pop(k))
                return path
        return None


class PlainUnpickler(pickle.Unpickler):
    """Builds lists, tuples, dicts, strings and numbers; a pickle that names a class or function raises ValueError."""

    def find_class(self, module, name):
        raise ValueError(f"it asks for {module}.{name}, and a data set needs no code")


def read_refs(path: Path) -> list[dict]:
    """The refs of a pickle, Python 2's too. Raises ValueError, naming the file, if it holds anything but plain data or other refs."""
    try:
        with path.open("rb") as file:
            refs = PlainUnpickler(file, encoding="utf-8", errors="replace").load()
        for ref in refs:
            if not isinstance(ref["split"], str) or not all(
                isinstance(s["sent"], str) for s in ref["sentences"]
            ):
                raise ValueError("a split or sentence is no text")
            ref["ref_id"], ref["ann_id"], [s["sent_id"] for s in ref["sentences"]]
    except (
        OSError,
        EOFError,
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        RecursionError,
    ) as error:
        raise ValueError(f"{path} is not a readable pickle of refs: {error!r}") from error
    return refs


def read_instances(path: Path) -> tuple[dict, dict, dict]:
    """({image id: image}, {annotation id: annotation}, {category id: its name}). Raises ValueError, naming the file."""
    try:
        content = json.loads(path.read_bytes())
        images = {
            image["id"]: {name: image[name] for name in ("file_name", "height", "width")}
            for image in content["images"]
        }
        annotations = {
            a["id"]: {
                "image_id": a["image_id"],
                "category_id": a.get("category_id"),
                "segmentation": a.get("segmentation"),
            }
            for a in content["annotations"]
        }
        return images, annotations, {c["id"]: c["name"] for c in content.get("categories", [])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable instances.json: {error!r}") from error


def check_segmentation(
    segmentation, size: tuple[int, int], image_size: tuple[int, int]
) -> tuple[str | None, bool]:
    """(why the mask cannot be used or None, whether it has another size than the image); sizes are (H, W)."""
    if not segmentation:
        return NO_MASK, False
    try:
        rle = encode_segmentation(segmentation, *size)
    except ValueError:
        part = segmentation[0] if isinstance(segmentation, list) else segmentation
        return BAD_MASK if isinstance(part, dict) else BAD_POLYGON, False
    if coco.area(rle) == 0:
        return EMPTY_MASK, False
    resized = tuple(rle["size"]) != image_size
    if resized and not resize_nearest(coco.decode(rle).astype(bool), *image_size).any():
        return LOST_MASK, True
    return None, resized


def decode_segmentation(segmentation, height: int, width: int) -> np.ndarray:
    """(H, W) bool, see `encode_segmentation`."""
    return coco.decode(encode_segmentation(segmentation, height, width)).astype(bool)


def encode_segmentation(segmentation, height: int, width: int) -> dict:
    """pycocotools' run-length code of the union of polygons [x, y, x, y, ..] or of run-length masks.

    Args:
        segmentation: a list of polygons, one {"counts", "size"} or a list of them, counts a str or a list of runs.
        height, width: of the image that polygons lie in; run-length masks state their own.

    Raises:
        ValueError: not one of these forms; a polygon of fewer than 3 points or with a coordinate that is no number in the
            image's neighbourhood; runs that do not sum to the size; masks of different sizes.
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
        if (
            not all(is_int(n) and 0 < n <= MAX_SIDE for n in (height, width))
            or height * width > MAX_PIXELS
        ):
            raise ValueError(f"image size {height} x {width}")
        for polygon in parts:
            check_polygon(polygon)
        rles = coco.frPyObjects(parts, height, width)
    return coco.merge(rles)


def check_polygon(polygon):
    """Raise ValueError unless `polygon` is [x, y, x, y, ..] of at least 3 points within MAX_SIDE of the origin."""
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        raise ValueError(
            f"a polygon is a list of x, y of 3 points or more, not {str(polygon)[:80]}"
        )
    if not all(
        isinstance(n, (int, float))
        and not isinstance(n, bool)
        and math.isfinite(n)
        and abs(n) <= MAX_SIDE
        for n in polygon
    ):
        raise ValueError("a coordinate is no number, or far outside of any image")
