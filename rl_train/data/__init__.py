"""Datasets of regions with captions; each item is dict(image, mask, caption, category, image_id)."""
from rl_train.data.gar import GraspAnyRegionDataset

DATASETS = {"gar": GraspAnyRegionDataset}      # by --dataset

__all__ = ["DATASETS", "GraspAnyRegionDataset"]
