"""Datasets of regions with captions; an item is dict(image, mask, caption, category, image_id).

`image_keys` and `coco_ids` say which share an image, and `mask(i, size)` reads one's mask alone.
"""

from functools import partial

from rl_train.data.dam import DescribeAnythingDataset
from rl_train.data.errors import BadData, DamagedSample, DamagedSamples, check_bad_fraction
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.reasonseg import ReasonSegDataset
from rl_train.data.refcoco import NAMES, RefCOCODataset
from rl_train.data.segzero import SegZeroDataset

# By --dataset, of a folder: what is trained on, and what is held out.
DATASETS = {"gar": GraspAnyRegionDataset, "dam": DescribeAnythingDataset, "segzero": SegZeroDataset}
HELDOUT_DATASETS = DATASETS | {"reasonseg": ReasonSegDataset}
for _name in NAMES:
    DATASETS[_name] = partial(RefCOCODataset, name=_name, split="train")
    HELDOUT_DATASETS[_name] = partial(RefCOCODataset, name=_name, split="val")

__all__ = [
    "DATASETS",
    "BadData",
    "DamagedSample",
    "DamagedSamples",
    "DescribeAnythingDataset",
    "GraspAnyRegionDataset",
    "HELDOUT_DATASETS",
    "ReasonSegDataset",
    "RefCOCODataset",
    "SegZeroDataset",
    "check_bad_fraction",
]
