"""Columns of masks that the evaluations of all model families share."""

import torch

from rl_train.loggers.pictures import small_mask
from rl_train.rewards import mask_iou
from rl_train.rollout import Batch


def mask_columns(
    masks: list[torch.Tensor], targets: list[torch.Tensor], batch: Batch
) -> dict[str, list]:
    """Return {column: B values} of B masks (H, W) to evaluate: IoU, its parts, the masks."""
    pairs = list(zip(masks, targets, strict=True))
    return dict(
        seg_iou=mask_iou(masks, targets, 1.0).tolist(),
        seg_intersection=[(mask & target).sum().item() for mask, target in pairs],
        seg_union=[(mask | target).sum().item() for mask, target in pairs],
        mask=[small_mask(mask) for mask in masks],
        image_id=batch.image_ids,
        reference=batch.captions,
        index=batch.index,
    )
