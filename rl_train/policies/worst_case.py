"""The worst that Sa2VA's flags allow: the longest prompts and answers, as many masks as may be."""

from bisect import bisect_left
from math import isqrt

import numpy as np
import torch
from PIL import Image

from rl_train.data.errors import DamagedSample
from rl_train.data.loader import Batches
from rl_train.data.masks import MASK_PIXELS
from rl_train.engine.packing import fed
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_inputs import Sa2VAInputs
from rl_train.types import Batch

WORD = " a"  # one token
PIXELS = MASK_PIXELS  # of an image, at whose size masks are compared


class LongestAnswers(Sa2VAPolicy):
    """The model of another policy, whose answers have all tokens and all masks that they may.

    It computes what the other does, and then puts something worse in its place.
    """

    def __init__(self, policy: Sa2VAPolicy):
        vars(self).update(vars(policy))
        self.stop = None

    def complete(self, images, prompts, num_generations, max_new_tokens, uniforms=None):
        done, texts = super().complete(images, prompts, num_generations, max_new_tokens, uniforms)
        return done, [WORD * (4 * max_new_tokens)] * len(texts)  # of junk: see `askable`

    def said_seg(self, ids, valid) -> torch.Tensor:
        """(n, T) bool: the first tokens, whatever they are."""
        return fed(valid) & (torch.arange(ids.shape[1], device=ids.device) < self.max_masks)

    def decode_masks(self, images, image, embeddings) -> torch.Tensor:
        """Without gradient: all of the image but one cell, another one for each row."""
        logits = super().decode_masks(images, image, embeddings)
        if torch.is_grad_enabled():
            return logits
        cells = self.processor.grid_size
        missing = torch.arange(len(logits)) // self.max_masks % cells**2
        grid = torch.ones(len(logits), cells**2).scatter_(1, missing[:, None], -1.0)
        grid = grid.view(-1, cells, cells).to(logits)
        return torch.nn.functional.interpolate(grid[:, None], logits.shape[1:])[:, 0]


def worst_batch(policy: Sa2VAPolicy, inputs: Sa2VAInputs, batch_size: int) -> Batch:
    """A batch of all tiles, regions of all cells, and the longest captions that `check` passes."""
    tiles = policy.processor.max_tiles
    height = isqrt(PIXELS // tiles)
    size = height, tiles * height  # no other grid of tiles has this aspect ratio
    image = Image.new("RGB", size[::-1])
    sample = dict(image=image, mask=np.ones(size, dtype=bool), category="", image_id="worst")

    caption = longest_caption(inputs, sample, policy.model.config.llm.max_position_embeddings)
    return Batches([sample | dict(caption=caption)] * batch_size, inputs)[list(range(batch_size))]


def longest_caption(inputs, sample: dict, most: int) -> str:
    """The longest of fewer than `most` words with which a sample passes `inputs.check`."""

    def too_long(num_words: int) -> bool:
        try:
            inputs.check(sample | dict(caption=WORD * num_words))
        except DamagedSample:
            return True
        return False

    return WORD * bisect_left(range(1, most), True, key=too_long)
