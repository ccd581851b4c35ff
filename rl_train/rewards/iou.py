"""Intersection over union of segmentation masks, the reward of loop 1.

Letters: N samples, H W the pixels of the ground truth at its own size; B, G, K: see `best_objects`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ON_TARGET = "on_target"  # reward component: 1 if a mask lies on the region and on no other, else 0


def mask_iou(
    pred: Tensor | Sequence[Tensor], target: Tensor | Sequence[Tensor], empty_value: float = 0.0
) -> Tensor:
    """Return |pred and target| / |pred or target| of every sample, as (N,) float32 in [0, 1].

    Args:
        pred: (N, H, W) bool, or N masks (H, W) bool whose sizes may differ between samples.
        target: the same number of masks in the same shapes.
        empty_value: the IoU where both masks are empty. Training skips such samples before
            they get here; evaluation passes 1.0.

    Raises:
        ValueError: a mask is not bool (resizing and thresholding are the caller's), or the
            shapes or the number of masks differ.
    """
    if isinstance(pred, Tensor) and isinstance(target, Tensor):
        return _batch_iou(pred, target, empty_value)
    iou = [_batch_iou(p[None], t[None], empty_value) for p, t in zip(pred, target, strict=True)]
    return torch.cat(iou) if iou else torch.zeros(0)  # (N,)


def mask_confidence(logits: Tensor) -> Tensor:
    """Return the mean of the sigmoid inside the masks of logits (N, H, W), as (N,) in (.5, 1).

    0 of an empty mask.
    """
    inside = logits > 0
    total = (torch.sigmoid(logits) * inside).sum((1, 2), dtype=torch.float32)
    return total / inside.sum((1, 2)).clamp(min=1)


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


def best_objects(
    masks: Sequence[Tensor], targets: Sequence[Tensor], others: Sequence[Tensor]
) -> Tensor:
    """Return the index of the object that each mask lies on, (N,) int64.

    0 is the target, k the k-th of the others, -1 none. A mask lies on the object with which its IoU
    is above 0 and larger than with any other.

    Args:
        masks: N = B*G masks (H, W) bool, row i*G+j about sample i.
        targets: B masks (H, W) bool; others: B of (K, H, W) bool.
    """
    G, best = len(masks) // len(targets), []
    for i, (target, distractors) in enumerate(zip(targets, others, strict=True)):
        objects = torch.cat([target[None], distractors])  # (1 + K, H, W)
        # One mask at a time: (G, 1 + K, H, W) of large images take too much memory.
        for mask in masks[i * G : (i + 1) * G]:
            iou = _batch_iou(mask.expand_as(objects), objects.to(mask.device), 0.0)  # (1 + K,)
            at_best = (iou == iou.max()).nonzero()[:, 0]  # a tie lies on no object
            best.append(at_best.item() if len(at_best) == 1 and iou.max() > 0 else -1)
    return torch.tensor(best)


def best_object_iou(
    masks: Sequence[Tensor], targets: Sequence[Tensor], others: Sequence[Tensor]
) -> Tensor:
    """Return the IoU (N,) of each mask with the object that it fits best: see `best_objects`."""
    G, best = len(masks) // len(targets), []
    for i, (target, distractors) in enumerate(zip(targets, others, strict=True)):
        objects = torch.cat([target[None], distractors])  # (1 + K, H, W)
        for mask in masks[i * G : (i + 1) * G]:
            best.append(_batch_iou(mask.expand_as(objects), objects.to(mask.device), 0.0).max())
    return torch.stack(best).cpu()


def on_target(
    masks: Sequence[Tensor], targets: Sequence[Tensor], others: Sequence[Tensor]
) -> Tensor:
    """Return whether each mask lies on its target, (N,) float32, 1 or 0; see `best_objects`.

    On an empty target lies an empty mask.
    """
    best, G = best_objects(masks, targets, others), len(masks) // len(targets)
    both_empty = [not (targets[row // G].any() or mask.any()) for row, mask in enumerate(masks)]
    return ((best == 0) | torch.tensor(both_empty)).float()


def mask_spread(masks: torch.Tensor) -> float:
    """Return 1 - mean pairwise IoU of (G, H, W) bool masks; two empty masks are alike."""
    iou = torch.stack([mask_iou(masks, mask.expand_as(masks), 1.0) for mask in masks])  # (G, G)
    off_diagonal = ~torch.eye(len(masks), dtype=torch.bool, device=masks.device)
    return 1 - iou[off_diagonal].mean().item()
