"""Signs that a reward is being gamed, counted in training and on the evaluation split."""

import re

import torch

WHOLE = 0.9  # fraction of the image above which a mask counts as all of it


def repeats(text: str) -> bool:
    """Return True if three words or punctuation marks in a row occur twice in `text`."""
    words = re.findall(r"[^\W_]+|[^\w\s]", text.lower())
    triples = list(zip(words, words[1:], words[2:]))
    return len(set(triples)) < len(triples)


def has_digit(text: str) -> bool:
    """Return True if `text` has a digit, as coordinates have."""
    return any(letter.isdigit() for letter in text)


def is_whole(mask: torch.Tensor) -> bool:
    """Return True if a mask (H, W) bool covers more than WHOLE of its image."""
    return mask.float().mean().item() > WHOLE
