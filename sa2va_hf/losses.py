"""The mask loss of Sa2VA's supervised training."""

import torch
import torch.nn.functional as F

BCE_WEIGHT, DICE_WEIGHT = 2.0, 0.5


def mask_loss(logits: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
    """(M,) supervised loss 2.0 BCE + 0.5 Dice of mask logits (M, h, w), masks (H, W) bool.

    Targets are nearest-resized to (h, w), as in the supervised training; all pixels count (it
    sampled 12,544 points).
    """
    size = logits.shape[-2:]
    resized = {}
    for t in targets:
        if id(t) not in resized:  # rows about one region share its mask
            pixels = t[None, None].to(logits.device, torch.uint8)
            resized[id(t)] = F.interpolate(pixels, size=size, mode="nearest")[0, 0].float()
    return resized_mask_loss(logits, torch.stack([resized[id(t)] for t in targets]))


def resized_mask_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(M,) `mask_loss` of masks that have the logits' size: target (M, h, w) float32, 0 or 1."""
    bce = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
    probability, target = logits.float().sigmoid().flatten(1), target.flatten(1)
    overlap = 2 * (probability * target).sum(1) + 1
    dice = 1 - overlap / (probability.sum(1) + target.sum(1) + 1)
    return BCE_WEIGHT * bce.flatten(1).mean(1) + DICE_WEIGHT * dice
