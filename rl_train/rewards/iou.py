"""Intersection over union of segmentation masks, the reward of loop 1.

Letters: N samples, H W the pixels of the ground truth at its own size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def mask_iou(
    pred: Tensor | Sequence[Tensor], target: Tensor | Sequence[Tensor], empty_value: float = 0.0
) -> Tensor:
    """Return |pred and target| / |pred or target| of every sample, as (N,) float32 in [0, 1].

    Args:
        pred: (N, H, W) bool, or N masks (H, W) bool whose sizes may differ between samples.
        target: same form and shapes as `pred`.
        empty_value: the IoU where both masks are empty. Training skips such samples before
            they get here; evaluation passes 1.0.

    Raises:
        ValueError: a mask is not bool (resizing and thresholding are the caller's), or the
            shapes or the number of masks differ.
    """
    if isinstance(pred, Tensor) and isinstance(target, Tensor):
        return _batch_iou(pred, target, empty_value)
    if isinstance(pred, Tensor) or isinstance(target, Tensor):
        raise ValueError(
            "mask_iou takes two tensors (N, H, W) or two lists of (H, W) masks, not one of each"
        )
    if len(pred) != len(target):
        raise ValueError(f"mask_iou got {len(pred)} predicted and {len(target)} target masks")
    if not pred:
        return torch.zeros(0)
    return torch.cat(
        [_batch_iou(p[None], t[None], empty_value) for p, t in zip(pred, target)]
    )  # (N,)


def _batch_iou(pred: Tensor, target: Tensor, empty_value: float) -> Tensor:
    """Return the (N,) float32 IoU of two (N, H, W) bool tensors; ValueError as in `mask_iou`."""
    if pred.dtype != torch.bool or target.dtype != torch.bool:
        raise ValueError(
            f"mask_iou takes bool masks, got {pred.dtype} {tuple(pred.shape)} "
            f"and {target.dtype} {tuple(target.shape)}"
        )
    if pred.shape != target.shape or pred.ndim != 3:
        raise ValueError(
            "mask_iou takes equal shapes (N, H, W), "
            f"got {tuple(pred.shape)} and {tuple(target.shape)}"
        )
    intersection = (pred & target).sum(dim=(1, 2))  # (N,) int64 pixels
    union = (pred | target).sum(dim=(1, 2))  # (N,) int64 pixels
    # float64 holds the pixel counts exactly, so the quotient is rounded once, to float32.
    iou = intersection.double() / union.clamp(min=1).double()
    return torch.where(union == 0, empty_value, iou).float()


def mask_spread(masks: torch.Tensor) -> float:
    """1 - mean pairwise IoU of (G, H, W) bool masks; two empty masks are alike."""
    flat = masks.flatten(1).float()
    inter = flat @ flat.T
    area = flat.sum(1)
    union = area[:, None] + area[None] - inter
    iou = torch.where(union > 0, inter / union.clamp(min=1), 1.0)
    off_diagonal = ~torch.eye(len(masks), dtype=torch.bool, device=masks.device)
    return 1 - iou[off_diagonal].mean().item()
