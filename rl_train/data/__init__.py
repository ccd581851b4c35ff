"""Datasets of regions with captions; an item is dict(image, mask, caption, category, image_id).

`image_keys` says which share an image, and `mask(i, size)` reads one's mask alone.
"""

from rl_train.data.dam import DescribeAnythingDataset
from rl_train.data.errors import BadData, DamagedSample, DamagedSamples, check_bad_fraction
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.refcoco import RefCOCODataset

DATASETS = {"gar": GraspAnyRegionDataset, "dam": DescribeAnythingDataset}  # by --dataset

__all__ = [
    "DATASETS",
    "BadData",
    "DamagedSample",
    "DamagedSamples",
    "DescribeAnythingDataset",
    "GraspAnyRegionDataset",
    "RefCOCODataset",
    "check_bad_fraction",
]
