"""RefCOCO, RefCOCO+ and RefCOCOg: regions of COCO train2014 images with the phrases that people
referred to them by.

`{root}/{name}/instances.json` is in COCO's format; `{root}/{name}/refs(unc).p` (refcocog:
`refs(umd).p`) is a pickle of a list of {"ref_id", "ann_id", "split", "sentences": [{"sent_id",
"sent"}], ..}. A pickle can run any program, so this one is read by an unpickler that builds lists,
dicts, strings and numbers and refuses everything else.
"""

import json
import math
import pickle
from pathlib import Path

from pycocotools import mask as coco

from rl_train.data.images import MAX_PIXELS, NO_IMAGE, check_read, map_file
from rl_train.data.masks import BAD_MASK, NO_MASK, check_mask, is_int, rle_runs
from rl_train.data.samples import Counts, read_sample
from rl_train.data.text import is_blank

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
    """The referred regions of one split, a row per (ref, sentence); unusable rows are left out at
    the start and counted.

    [i] -> dict(image PIL RGB, mask (H, W) bool of the image's size, caption str without special
    tokens, category str, image_id str). image_id is "{name}/{split}/{ref_id}/{sent_id}". A mask is
    the union of its polygons, or run-length coded.

    Args:
        root: folder that holds the folder `name`.
        name: one of NAMES; split: train, val, testA or testB (refcocog: train, val, test).
        image_root: folder of the images or one that holds it as IMAGE_FOLDERS say; default is
            `root`, then `root/name`.

    Raises:
        ValueError: an unknown name or split, a missing or unreadable file, a pickle that holds
            more than plain data, or not one usable row.
        DamagedSample: on access, an image that passed the checks of its header and end but does
            not decode.
    """

    def __init__(self, root, name: str = "refcoco", split: str = "val", image_root=None):
        if name not in NAMES:
            raise ValueError(f"--dataset {name} is none of {', '.join(NAMES)}")
        folder = Path(root) / name
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

    def report(self) -> dict:
        """See `Counts.report`."""
        return self._counts.report(len(self))

    def __getitem__(self, i: int) -> dict:
        path, segmentation, size, *words = self._rows[i]
        return read_sample(lambda: map_file(path), encode_segmentation(segmentation, *size), *words)

    def _usable(self, ref: dict, images: dict, annotations: dict, categories: dict):
        """Yields the rows of one ref; counts the rest.

        A row is (image file, segmentation, (H, W) of COCO's image, caption, category, image_id).
        """
        self._counts.rows += len(ref["sentences"])
        annotation = annotations.get(ref["ann_id"])
        image = images.get(annotation["image_id"]) if annotation else None
        path = self._find(image["file_name"]) if image else None
        size = (image["height"], image["width"]) if image else None
        reason, resized = "no annotation" if annotation is None else NO_IMAGE, False
        if path:
            reason, _ = check_read(map_file, path)
        if not isinstance(reason, str):  # the image's (W, H)
            reason, resized = check_segmentation(annotation["segmentation"], size, reason[::-1])
        for sentence in ref["sentences"]:
            why = reason or ("blank caption" if is_blank(sentence["sent"]) else None)
            if why:
                self._counts.skipped[why] += 1
                continue
            self._counts.resized += resized
            category = categories.get(annotation.get("category_id"), "")
            image_id = f"{self._name}/{self._split}/{ref['ref_id']}/{sentence['sent_id']}"
            yield path, annotation["segmentation"], size, sentence["sent"], category, image_id

    def _find(self, file_name: str) -> Path | None:
        """The image of that name, whatever folder it is said to be in.

        Folders that held one are asked first.
        """
        for k, folder in enumerate(self._folders):
            path = folder / Path(file_name).name
            if path.is_file():
                self._folders.insert(0, self._folders.pop(k))
                return path
        return None


class PlainUnpickler(pickle.Unpickler):
    """Builds lists, tuples, dicts, strings and numbers; refuses whatever names a class or function
    with ValueError."""

    def find_class(self, module, name):
        raise ValueError(f"it asks for {module}.{name}, and a data set needs no code")


def read_refs(path: Path) -> list[dict]:
    """The refs of a pickle, Python 2's too.

    Raises:
        ValueError: naming the file, which holds anything but plain data, or other refs.
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


def read_instances(path: Path) -> tuple[dict, dict, dict]:
    """({image id: image}, {annotation id: annotation}, {category id: its name}).

    Raises:
        ValueError: naming the file, which is not readable.
    """
    try:
        content = json.loads(path.read_bytes())
        images = {
            image["id"]: {name: image[name] for name in ("file_name", "height", "width")}
            for image in content["images"]
        }
        annotations = {
            one["id"]: {
                "image_id": one["image_id"],
                "category_id": one.get("category_id"),
                "segmentation": one.get("segmentation"),
            }
            for one in content["annotations"]
        }
        return images, annotations, {c["id"]: c["name"] for c in content.get("categories", [])}
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a readable instances.json: {error!r}") from error


def check_segmentation(
    segmentation, size: tuple[int, int], image_size: tuple[int, int]
) -> tuple[str | None, bool]:
    """(why the mask cannot be used or None, whether it has another size than the image).

    Args:
        size: (H, W) of the image to COCO; image_size: (H, W) of the image file.
    """
    if not segmentation:
        return NO_MASK, False
    try:
        return check_mask(encode_segmentation(segmentation, *size), image_size)
    except ValueError:
        part = segmentation[0] if isinstance(segmentation, list) else segmentation
        return BAD_MASK if isinstance(part, dict) else BAD_POLYGON, False


def encode_segmentation(segmentation, height: int, width: int) -> dict:
    """pycocotools' run-length code of the union of polygons [x, y, x, y, ..] or run-length masks.

    Args:
        segmentation: a list of polygons, one {"counts", "size"} or a list of them, counts a str or
            a list of runs.
        height, width: of the image that polygons lie in; run-length masks state their own.

    Raises:
        ValueError: not one of these forms; a polygon of fewer than 3 points or with a coordinate
            that is no number in the image's neighbourhood; runs that do not sum to the size; masks
            of different sizes.
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
        sides = all(is_int(n) and 0 < n <= MAX_SIDE for n in (height, width))
        if not sides or height * width > MAX_PIXELS:
            raise ValueError(f"image size {height} x {width}")
        for polygon in parts:
            check_polygon(polygon)
        rles = coco.frPyObjects(parts, height, width)
    return coco.merge(rles)


def check_polygon(polygon):
    """Raise ValueError unless `polygon` is [x, y, x, y, ..] of 3 points or more near the origin."""
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        raise ValueError(
            f"a polygon is a list of x, y of 3 points or more, not {str(polygon)[:80]}"
        )
    for n in polygon:
        is_number = isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n)
        if not is_number or abs(n) > MAX_SIDE:
            raise ValueError("a coordinate is no number, or far outside of any image")
