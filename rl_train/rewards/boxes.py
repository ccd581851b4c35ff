"""Agreement of masks by their boxes and centres, for masks that hardly overlap yet.

Letters: N masks, H W the pixels of each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def mask_box(mask: Tensor) -> Tensor:
    """Return (x1, y1, x2, y2) float32 around a mask (H, W) bool, to its pixels' outer edges.

    It is on the CPU; an empty mask has zeros.
    """
    columns, rows = mask.any(0).nonzero()[:, 0].cpu(), mask.any(1).nonzero()[:, 0].cpu()
    if not len(columns):
        return torch.zeros(4)
    return torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()


def mask_box_iou(masks: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the IoU (N,) of the boxes around masks and targets (H, W) bool; 0 of an empty one."""
    a, b = (torch.stack([mask_box(mask) for mask in each]) for each in (masks, targets))  # (N, 4)
    sides = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0)
    areas = [(box[:, 2:] - box[:, :2]).prod(1) for box in (a, b)]
    intersection = sides.prod(1)
    return intersection / (areas[0] + areas[1] - intersection).clamp(min=1)


def centre_closeness(masks: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return 1 - d / D (N,): d the distance of the boxes' centres, D the image's diagonal.

    1 for one centre, 0 for opposite corners, and 0 where either mask is empty.
    """
    a, b = (torch.stack([mask_box(mask) for mask in each]) for each in (masks, targets))  # (N, 4)
    distance = torch.linalg.vector_norm((a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) / 2, dim=1)
    diagonal = torch.tensor([mask.shape for mask in targets]).float().norm(dim=1)
    closeness = 1 - distance / diagonal
    return torch.where(a.any(1) & b.any(1), closeness, 0.0)
