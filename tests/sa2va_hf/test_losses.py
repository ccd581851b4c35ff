"""The supervised mask loss of Sa2VA by hand."""

import pytest
import torch

from sa2va_hf.losses import mask_loss


def test_mask_loss_by_hand():
    # logits 0 everywhere: p = 1/2, BCE ln 2; 4 pixels, 2 in the target:
    # Dice 1 - (2 * 1 + 1) / (2 + 2 + 1) = 2/5
    target = torch.tensor([[True, False], [True, False]])
    loss = mask_loss(torch.zeros(1, 2, 2), [target])
    assert loss.tolist() == pytest.approx([2.0 * 0.6931472 + 0.5 * 0.4])
    perfect = mask_loss(torch.where(target, 50.0, -50.0)[None], [target])
    assert perfect.item() == pytest.approx(0, abs=1e-6)


def test_mask_loss_resizes_its_targets():
    """Nearest pixels of images of other sizes: the 4 x 4 mask's left half is the 2 x 2 one's."""
    large = torch.zeros(4, 4, dtype=torch.bool)
    large[:, :2] = True
    small = torch.tensor([[True, False], [True, False]])
    logits = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0))[:1].expand(2, -1, -1)
    one, other = mask_loss(logits, [large, small]).tolist()
    assert one == other
