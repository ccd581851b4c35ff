"""Intersection over union of segmentation masks, the reward of loop 1.

Letters: N samples, H W the pixels of the ground truth at its own size; B, G, K: see `best_objects`.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

ON_TARGET = "on_target"  # reward component: 1 if a mask lies on the region and on no other, else 0
# Pixels of pairs of masks that are compared in one call. Each takes up to 7 bytes: both masks,
# their intersection or union, and its int32 of the sum.
PIXELS_AT_ONCE = 2**25


def rows_by_size(sizes: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Return {size: the rows of that size, ascending}, to compute them together."""
    rows = {}
    for row, size in enumerate(sizes):
        rows.setdefault(size, []).append(row)
    return rows


def mask_iou(
    pred: Tensor | Sequence[Tensor], target: Tensor | Sequence[Tensor], empty_value: float = 0.0
) -> Tensor:
    """Return |pred and target| / |pred or target| of every sample, as (N,) float32 in [0, 1].

    Args:
        pred: (N, H, W) bool, or N masks (H, W) bool whose sizes may differ between samples.
        target: the same number of masks in the same shapes.
        empty_value: the IoU where both masks are empty. Masks of true captions in evaluations, and
            the rewards of points, pass 1.0; tasks of sampled masks overwrite these rows
            (`with_no_target_reward`).

    Raises:
        ValueError: a mask is not bool (resizing and thresholding are the caller's), or the
            shapes or the number of masks differ.
    """
    if isinstance(pred, Tensor) and isinstance(target, Tensor):
        return _batch_iou(pred, target, empty_value)
    pairs = list(zip(pred, target, strict=True))
    for p, t in pairs:
        _check_masks(p[None], t[None])
    iou = [None] * len(pairs)
    for size, rows in rows_by_size(p.shape for p, _ in pairs).items():
        at_once = _masks_at_once(size.numel())
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            preds, targets = (torch.stack(masks) for masks in zip(*(pairs[row] for row in part)))
            for row, value in zip(part, _batch_iou(preds, targets, empty_value)):
                iou[row] = value
    return torch.stack(iou) if iou else torch.zeros(0)  # (N,)


def mask_confidence(logits: Tensor) -> Tensor:
    """Return the mean of the sigmoid inside the masks of logits (N, H, W), as (N,) in (.5, 1).

    0 of an empty mask.
    """
    inside = logits > 0
    total = (torch.sigmoid(logits) * inside).sum((1, 2), dtype=torch.float32)
    return total / inside.sum((1, 2)).clamp(min=1)


def _check_masks(pred: Tensor, target: Tensor):
    """Raise ValueError unless both are bool and of one shape (N, H, W)."""
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


def _masks_at_once(pixels: int) -> int:
    """Return how many pairs of so many pixels are compared in one call, at least one."""
    return max(1, PIXELS_AT_ONCE // max(1, pixels))


def _area(masks: Tensor) -> Tensor:
    """Return the pixels (..,) int32 of masks (.., H, W)."""
    # The sum converts each pixel to its own type first: int64 would take twice the memory.
    return masks.sum((-2, -1), dtype=torch.int32)


def _quotient(intersection: Tensor, union: Tensor, empty_value: float) -> Tensor:
    """Return intersection / union of pixel counts as float32, empty_value where the union is 0."""
    # float64 holds the pixel counts exactly, so the quotient is rounded once, to float32.
    iou = intersection.double() / union.clamp(min=1).double()
    return torch.where(union == 0, empty_value, iou).float()


def _batch_iou(pred: Tensor, target: Tensor, empty_value: float) -> Tensor:
    """Return the (N,) float32 IoU of two (N, H, W) bool tensors; ValueError as in `mask_iou`."""
    _check_masks(pred, target)
    return _quotient(_area(pred & target), _area(pred | target), empty_value)


def _pair_counts(masks: Tensor, objects: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pixels of each mask's intersection and union with each object, (G, K) int32 both.

    Args:
        masks: (G, H, W) bool, each of which is compared with each of objects: (K, H, W) bool.

    Raises:
        ValueError: as in `mask_iou`.
    """
    _check_masks(masks[:1], objects[:1])
    shared, areas = [], []  # (g, K) and (g,)
    # As many masks at a time as memory allows: (G, K, H, W) of large images take too much.
    for part in masks.split(_masks_at_once(objects.numel())):
        shared.append(_area(part[:, None] & objects))
        areas.append(_area(part))
    intersection = torch.cat(shared)
    return intersection, torch.cat(areas)[:, None] + _area(objects) - intersection


def _object_iou(
    masks: Sequence[Tensor], targets: Sequence[Tensor], others: Sequence[Tensor]
) -> Tensor:
    """Return the IoU (N, 1 + K) of each mask with its target and the others, on the masks' device.

    K is the largest of the samples'; 0 stands where a sample has fewer. Args: see `best_objects`.
    """
    G, shape = len(masks) // len(targets), (2, len(masks), 1 + max(map(len, others), default=0))
    intersection, union = torch.zeros(shape, dtype=torch.int32, device=masks[0].device)
    for i, (target, distractors) in enumerate(zip(targets, others, strict=True)):
        rows = slice(i * G, (i + 1) * G)
        of_sample = torch.stack(list(masks[rows]))  # (G, H, W)
        objects = torch.cat([target[None], distractors]).to(of_sample.device)  # (1 + K, H, W)
        counts = _pair_counts(of_sample, objects)
        intersection[rows, : len(objects)], union[rows, : len(objects)] = counts
    return _quotient(intersection, union, 0.0)


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
    iou = _object_iou(masks, targets, others)  # (N, 1 + K)
    highest, index = iou.max(1)
    is_alone = (iou == highest[:, None]).sum(1) == 1  # a tie lies on no object
    return torch.where(is_alone & (highest > 0), index, -1).cpu()


def best_object_iou(
    masks: Sequence[Tensor], targets: Sequence[Tensor], others: Sequence[Tensor]
) -> Tensor:
    """Return the IoU (N,) of each mask with the object that it fits best: see `best_objects`."""
    return _object_iou(masks, targets, others).amax(1).cpu()


def on_target(
    masks: Sequence[Tensor], targets: Sequence[Tensor], others: Sequence[Tensor]
) -> Tensor:
    """Return whether each mask lies on its target, (N,) float32, 1 or 0; see `best_objects`.

    An empty mask lies on an empty target.
    """
    is_on, G = best_objects(masks, targets, others) == 0, len(masks) // len(targets)
    has_target = torch.stack([target.any() for target in targets]).tolist()
    rows = [row for row in range(len(masks)) if not has_target[row // G]]
    if rows:
        is_on[rows] = ~torch.stack([masks[row].any() for row in rows]).cpu()
    return is_on.float()


def mask_spread(masks: torch.Tensor) -> float:
    """Return 1 - mean pairwise IoU of (G, H, W) bool masks; two empty masks are alike."""
    iou = _quotient(*_pair_counts(masks, masks), 1.0)  # (G, G)
    off_diagonal = ~torch.eye(len(masks), dtype=torch.bool, device=masks.device)
    return 1 - iou[off_diagonal].mean().item()
