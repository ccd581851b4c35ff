"""Datasets of regions with captions; an item is dict(image, mask, caption, category, image_id).

`image_keys` and `coco_ids` tell which samples share an image; `mask(i, size)` reads a mask alone.
"""

from functools import partial

from rl_train.data.dam import DescribeAnythingDataset
from rl_train.data.errors import BadData, DamagedSample, DamagedSamples, check_bad_fraction
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.reasonseg import ReasonSegDataset
from rl_train.data.refcoco import REFCOCO_NAMES, RefCOCODataset
from rl_train.data.segzero import SegZeroDataset

# {--dataset: reader of a folder}; below, those of --eval_data_dir.
DATASETS = {
    "gar": GraspAnyRegionDataset,
    "dam": DescribeAnythingDataset,
    "segzero": SegZeroDataset,
    **{name: partial(RefCOCODataset, name=name, split="train") for name in REFCOCO_NAMES},
}
EVAL_DATASETS = {
    **DATASETS,
    "reasonseg": ReasonSegDataset,
    **{name: partial(RefCOCODataset, name=name, split="val") for name in REFCOCO_NAMES},
}

__all__ = [
    "DATASETS",
    "BadData",
    "DamagedSample",
    "DamagedSamples",
    "DescribeAnythingDataset",
    "EVAL_DATASETS",
    "GraspAnyRegionDataset",
    "ReasonSegDataset",
    "RefCOCODataset",
    "SegZeroDataset",
    "check_bad_fraction",
]
