"""Signs that a reward is being gamed, counted in training and on held-out samples."""

import re

import torch

WHOLE = 0.9  # share of the image above which a mask counts as all of it


def repeats(text: str) -> bool:
    """Whether three words or punctuation marks in a row occur twice in `text`."""
    words = re.findall(r"[^\W_]+|[^\w\s]", text.lower())
    triples = list(zip(words, words[1:], words[2:]))
    return len(set(triples)) < len(triples)


def has_digit(text: str) -> bool:
    """Whether `text` has a digit, as coordinates have."""
    return any(letter.isdigit() for letter in text)


def is_whole(mask: torch.Tensor) -> bool:
    """Whether a mask (H, W) bool covers nearly all of its image."""
    return mask.float().mean().item() > WHOLE
