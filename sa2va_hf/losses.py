"""The mask loss of Sa2VA's supervised training."""

import torch
import torch.nn.functional as F

from .to_device import to_device

BCE_WEIGHT, DICE_WEIGHT = 2.0, 0.5


def mask_loss(logits: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss (M,) 2.0 BCE + 0.5 Dice of mask logits (M, h, w) and masks (H, W) bool.

    All pixels count (the published supervised training sampled 12,544 points).
    """
    return resized_mask_loss(logits, resize_masks(targets, logits))


def resize_masks(masks: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """Resize masks (H, W) bool to float32 (M, h, w), the size of logits, on their device.

    The nearest pixel is taken, as in the published supervised training.
    """
    size, resized = logits.shape[-2:], {}
    for mask in masks:
        if id(mask) not in resized:  # rows about one region share its mask
            pixels = to_device(mask[None, None], logits.device).to(torch.uint8)
            resized[id(mask)] = F.interpolate(pixels, size=size, mode="nearest")[0, 0].float()
    return torch.stack([resized[id(mask)] for mask in masks])


def resized_mask_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `mask_loss` (M,) of masks at the logits' size: target (M, h, w) float32, 0 or 1."""
    bce = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")  # (M, h, w)
    probability, target = logits.float().sigmoid().flatten(1), target.flatten(1)  # (M, h*w)
    overlap = 2 * (probability * target).sum(1) + 1  # + 1: defined without a pixel
    dice = 1 - overlap / (probability.sum(1) + target.sum(1) + 1)
    return BCE_WEIGHT * bce.flatten(1).mean(1) + DICE_WEIGHT * dice
