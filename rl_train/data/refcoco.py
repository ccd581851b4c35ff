"""RefCOCO, RefCOCO+, RefCOCOg and gRefCOCO: regions of COCO train2014 images with the phrases that
people referred to them by.

`{root}/{name}/instances.json` is in COCO's format; `{root}/{name}/refs(unc).p` (refcocog:
`refs(umd).p`) is a pickle of a list of {"ref_id", "ann_id", "split", "sentences": [{"sent_id",
"sent"}], ..}. A pickle can run any program, so this one is read by an unpickler that builds lists,
dicts, strings and numbers and refuses everything else.

gRefCOCO's list is JSON, `grefs(unc).json`: "ann_id" is a list of the regions that a phrase names,
[-1] if it names none (or "no_target" is true), and "image_id" tells the image. Crowds among the
regions are left out, as in gres_model/data/datasets/grefer.py of henghuiding/ReLA.
"""

import json
import pickle
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rl_train.data.base import Reader, Region
from rl_train.data.errors import reading
from rl_train.data.images import check_read, coco_id, map_file
from rl_train.data.polygons import Segmentation, encoded_or_damaged, union

GREFCOCO = "grefcoco"
REFCOCO_NAMES = {
    "refcoco": "refs(unc).p",
    "refcoco+": "refs(unc).p",
    "refcocog": "refs(umd).p",
    GREFCOCO: "grefs(unc).json",
}
NO_TARGET = [-1]  # the regions of a phrase that names none
IMAGE_FOLDERS = (
    "",
    "train2014",
    "coco2014/train2014",
    "images/train2014",
    "images/mscoco/images/train2014",
)


class Annotation(NamedTuple):
    """A region of instances.json."""

    image: int | None  # its id
    segmentation: Segmentation | None
    category: str
    is_crowd: bool


NO_ANNOTATION = Annotation(None, None, "", False)


class RefCOCODataset(Reader):
    """The referred regions of one split, a row per (ref, sentence), less the unusable ones.

    [i] -> see `read_sample`; image_id is "{name}/{split}/{ref_id}/{sent_id}".

    Args:
        root: folder that holds the folder `name`.
        name: one of REFCOCO_NAMES; split: train, val, testA or testB (refcocog: train, val, test).
        image_root: folder of the images or one that holds it as IMAGE_FOLDERS say; default is
            `root`, then `root/name`.

    Raises:
        ValueError: an unknown name or split, an unreadable file, no plain data, no usable row.
        DamagedSample: on access, an image with a good header that does not decode.
    """

    def __init__(
        self,
        root: str | Path,
        name: str = "refcoco",
        split: str = "val",
        image_root: str | Path | None = None,
    ):
        super().__init__()
        self.has_objects = name == GREFCOCO
        data_dir = Path(root) / name
        bases = [image_root] if image_root else [root, data_dir]
        folders = [Path(base) / sub for base in bases for sub in IMAGE_FOLDERS]
        images, annotations = read_instances(data_dir / "instances.json")
        refs = read_refs(data_dir / REFCOCO_NAMES[name])
        splits = sorted({ref["split"] for ref in refs})
        if split not in splits:
            file = data_dir / REFCOCO_NAMES[name]
            raise ValueError(f"{file} has no split {split!r}; it has {', '.join(splits)}")
        for ref in [ref for ref in refs if ref["split"] == split]:
            if self.has_objects:
                image, segmentations, category = named_regions(ref, annotations)
            else:
                image, segmentation, category, _ = annotations.get(ref["ann_id"], NO_ANNOTATION)
                segmentations = [segmentation]
            file_name, size = images.get(image, ("", (0, 0)))
            paths = [folder / Path(file_name).name for folder in folders]
            read = partial(map_file, next((path for path in paths if path.is_file()), ""))
            checked = check_read(read)
            masks = tuple(encoded_or_damaged(shape, size) for shape in segmentations)
            rle = union(masks, size) if self.has_objects else masks[0]
            objects = masks if self.has_objects else None
            for sentence in ref["sentences"]:
                text = sentence["sent"]
                self._num_rows += 1
                image_id = f"{name}/{split}/{ref['ref_id']}/{sentence['sent_id']}"
                region = Region(read, rle, text, category, image_id, objects=objects)
                self._add(region, checked, text, rle, coco_id(file_name))
        self._finish(root)

    def sentence(self, i: int) -> str:
        """Return the phrase of sample i as the file has it; its caption is cleaned."""
        return self._samples[i].caption


class PlainUnpickler(pickle.Unpickler):
    """Builds lists, tuples, dicts, strings and numbers; raises ValueError for all else."""

    def find_class(self, module: str, name: str):
        # Only a pickle of classes or functions comes here: one that could run code.
        raise ValueError(f"it asks for {module}.{name}, and a data set needs no code")


def named_regions(ref: dict, annotations: dict) -> tuple[int, list[Segmentation | None], str]:
    """Return (image id, segmentations, categories) of the regions that gRefCOCO's phrases name.

    They are [] if the phrases name none. A region of another image has None.
    """
    annotation_ids = as_list(ref["ann_id"])
    if ref.get("no_target") or annotation_ids == NO_TARGET:
        annotation_ids = []
    regions = [annotations.get(number, NO_ANNOTATION) for number in annotation_ids]
    regions = [region for region in regions if not region.is_crowd]
    segmentations = [r.segmentation if r.image == ref["image_id"] else None for r in regions]
    if annotation_ids and not regions:  # crowds alone
        segmentations = [None]
    names = dict.fromkeys(region.category for region in regions if region.category)
    return ref["image_id"], segmentations, ", ".join(names)


def as_list(annotation_ids: int | list[int]) -> list[int]:
    return annotation_ids if isinstance(annotation_ids, list) else [annotation_ids]


def read_refs(path: Path) -> list[dict]:
    """Read the refs of a pickle, Python 2's too, or of JSON.

    Raises BadData, naming the file, if it holds anything but plain data, or other refs.
    """
    is_json = path.suffix == ".json"
    with reading(path, "list of refs" if is_json else "pickle of refs"):
        if is_json:
            refs = json.loads(path.read_bytes())
            _ = [hash((ref["image_id"], *as_list(ref["ann_id"]))) for ref in refs]
        else:
            with path.open("rb") as file:
                refs = PlainUnpickler(file, encoding="utf-8", errors="replace").load()
        # Touch every field that is read later: a missing or wrong one is then the file's fault.
        for ref in refs:
            sentences = [
                (sentence["sent_id"], sentence["sent"] + "") for sentence in ref["sentences"]
            ]
            _ = ref["ref_id"], ref["ann_id"], ref["split"] + "", sentences
    return refs


def read_instances(path: Path) -> tuple[dict, dict]:
    """Read instances.json.

    Returns:
        {image id: (file name, (H, W))}, {annotation id: its `Annotation`}.

    Raises BadData, naming the file, if it cannot be read.
    """
    with reading(path, "instances.json"):
        content = json.loads(path.read_bytes())
        names = {entry["id"]: entry["name"] for entry in content.get("categories", [])}
        images = {
            entry["id"]: (entry["file_name"], (entry["height"], entry["width"]))
            for entry in content["images"]
        }
        return images, {
            entry["id"]: Annotation(
                entry["image_id"],
                entry.get("segmentation"),
                names.get(entry.get("category_id"), ""),
                bool(entry.get("iscrowd")),
            )
            for entry in content["annotations"]
        }
