"""Masks of one connected piece: by hand, by a slow flood, and in a model's masks."""

from collections import deque

import pytest
import torch

from sa2va_hf import processing_sa2va
from sa2va_hf.processing_sa2va import one_piece


def flooded(logits: torch.Tensor) -> torch.Tensor:
    """Return `one_piece` of logits (h, w), one pixel after another."""
    height, width = logits.shape
    start = divmod(int(logits.argmax()), width)
    piece, waiting = set(), deque([start] if logits[start] > 0 else [])
    while waiting:
        y, x = waiting.popleft()
        if (y, x) in piece or not (0 <= y < height and 0 <= x < width) or logits[y, x] <= 0:
            continue
        piece.add((y, x))
        waiting.extend((y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1))
    result = logits.clone()
    for y in range(height):
        for x in range(width):
            if logits[y, x] > 0 and (y, x) not in piece:
                result[y, x] = -logits[y, x]
    return result


def test_the_piece_with_the_highest_logit_stays():
    logits = torch.tensor([[[2.0, -1, 3, -1], [-2, 5, -1, -1], [-1, -1, -1, 4]]])
    # 2, 5 and 3 touch by corners; 4 lies apart from them.
    expected = logits.clone()
    expected[0, 2, 3] = -4
    assert torch.equal(one_piece(logits), expected)
    none = -logits.abs()
    assert torch.equal(one_piece(none), none)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("growths", [1, 16])
def test_pieces_are_those_of_a_slow_flood(dtype, growths, monkeypatch):
    monkeypatch.setattr(processing_sa2va, "GROWTHS_AT_ONCE", growths)
    generator = torch.Generator().manual_seed(0)
    # About .4 of the pixels are inside, so that pieces are long and wind.
    logits = torch.randn(12, 23, 31, generator=generator).sub(0.25).to(dtype)
    # A spiral is longer than the image is wide.
    spiral = -torch.ones(23, 31, dtype=dtype)
    spiral[1, 1:30] = spiral[1:22, 29] = spiral[21, 1:30] = spiral[5:22, 1] = 1
    spiral[5, 1:26] = spiral[5:18, 25] = 1
    spiral[17, 25] = 2
    logits = torch.cat([logits, spiral[None]])
    cut = one_piece(logits)
    assert all(torch.equal(a, flooded(b)) for a, b in zip(cut, logits))
    assert torch.equal(cut[-1], spiral) and not torch.equal(cut, logits)


def test_a_model_whose_configuration_says_so_draws_one_piece(model, images, monkeypatch):
    """Not where a gradient is asked for; and nothing changes without the key."""
    image, width = [0, 1, 2, 3] * 8, model.model.config.sam2.mask_decoder_config.hidden_size
    prompts = 5 * torch.randn(32, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model.decode_masks(images, image, prompts)
        monkeypatch.setitem(model.model.config.raw, "one_piece_masks", True)
        assert torch.equal(model.decode_masks(images, image, prompts), one_piece(whole))
        assert not torch.equal(one_piece(whole), whole)
    assert torch.equal(model.decode_masks(images, image, prompts).detach(), whole)
