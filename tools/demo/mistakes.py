"""Mistakes in the demo's captions: one value of an attribute taken for another.

python -m rl_train.sft --tasks tools.demo.mistakes:MistakenCaptions ..
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rl_train.rollout import Batch
from rl_train.tasks.sft_tasks import RegionCaptions

if TYPE_CHECKING:
    from sa2va_hf.batches import ImageFeatures


# Of each pair the one is said for the other with this probability. Half of the pairs are said
# wrongly more often than rightly, no word is said more often than it is true, and yet an object's
# caption is on average likelier of itself than of one that it is mistaken for.
MISTAKES = {
    ("plain", "checked"): 0.3,
    ("striped", "ruled"): 0.6,
    ("blue", "purple"): 0.3,
    ("black", "white"): 0.3,
    ("red", "orange"): 0.6,
    ("green", "yellow"): 0.6,
    ("triangle", "cross"): 0.3,
    ("circle", "square"): 0.6,
    ("bottom left", "bottom right"): 0.3,
    ("top left", "top right"): 0.6,
}
PARTNERS = {
    value: (other, probability)
    for pair, probability in MISTAKES.items()
    for value, other in (pair, pair[::-1])
}
VALUE = re.compile(rf"\b({'|'.join(PARTNERS)})\b")


def mistaken(caption: str, rng: np.random.Generator) -> str:
    """Return the caption with MISTAKES, each with its probability."""

    def mistake(value: re.Match) -> str:
        other, probability = PARTNERS[value[0]]
        return other if rng.random() < probability else value[0]

    return VALUE.sub(mistake, caption)


class MistakenCaptions(RegionCaptions):
    """`RegionCaptions` with MISTAKES in the captions, drawn anew at each visit."""

    def examples(self, batch: Batch, features: "ImageFeatures", rngs: list[np.random.Generator]):
        mistaken_captions = [mistaken(caption, rng) for caption, rng in zip(batch.captions, rngs)]
        return super().examples(replace(batch, captions=mistaken_captions), features, rngs)
