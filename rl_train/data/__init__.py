"""Datasets of regions with captions; an item is dict(image, mask, caption, category, image_id).

`image_keys` and `coco_ids` tell which samples share an image; `mask(i, size)` reads a mask alone.
"""

from rl_train.data.dam import DescribeAnythingDataset
from rl_train.data.errors import BadData, DamagedSample, DamagedSamples, check_bad_fraction
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.reasonseg import ReasonSegDataset
from rl_train.data.refcoco import RefCOCODataset
from rl_train.data.registry import DATASETS, EVAL_DATASETS
from rl_train.data.segzero import SegZeroDataset

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
