"""The batch of a measured step of Sa2VA: images, regions and captions of the sizes asked for.

Letters: L prompt length, g cells a side of a region, H, W of an image.
"""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from rl_train.data.loader import Batches
from rl_train.rollout import Batch
from sa2va_hf.qwen_vl import QwenVLModel
from tools.benchmarks.lengths import log_normal
from tools.benchmarks.workload_points import WORDS

if TYPE_CHECKING:
    from rl_train import cli
    from tools.benchmarks.workload import ForcedPolicy, Options


def make_batch(
    policy: "ForcedPolicy", cells: torch.Tensor, config: "cli.Config", options: "Options", rank: int
) -> Batch:
    """Make a batch of noise images, each with the region `cells` and a caption of its length.

    Args:
        config: `cli.Config`; options: `work.Options`.
    """
    rng, size = np.random.default_rng(rank), config.rollout.batch_size
    pixels = rng.integers(256, size=(options.height, options.width, 3), dtype=np.uint8)
    mask = mask_of(cells, options.height, options.width).numpy()
    sample = dict(image=Image.fromarray(pixels), mask=mask, image_id="image")
    # Tokens of a question without its words.
    num_tiles = num_pieces(policy, options)
    bare = len(policy.prompts.segment(WORDS[0], num_tiles)) - 1
    words = [options.prompt_length - bare] * size
    if options.prompt_length <= bare:
        raise ValueError(f"--prompt_length {options.prompt_length}: must be at least {bare + 1}")
    if options.caption_lengths:
        text = bare - num_tiles * policy.prompts.tokens_per_tile
        most = config.data.max_prompt_length - text
        words = log_normal(size, *options.caption_lengths, most, rank)
    samples = [sample | dict(caption=caption_of(n)) for n in words]
    batch = Batches(samples, policy.preprocessor(policy.answer_tokens))[list(range(size))]
    for caption, n in zip(batch.captions, words):
        length = len(policy.prompts.segment(caption, num_tiles))
        assert length == bare + n, "a word of several tokens"
    if options.num_tiles > 1:  # whatever the image's aspect ratio
        tile = (options.num_tiles, *batch.inputs.tiles[0].shape[1:])
        batch.inputs.tiles = [torch.from_numpy(rng.integers(256, size=tile, dtype=np.uint8))] * size
    return replace(batch, index=[rank * size + i for i in range(size)])


def num_pieces(policy: "ForcedPolicy", options: "Options") -> int:
    """Return how many tiles an image of the options' size has; of a Qwen-VL, how many tokens."""
    if not isinstance(policy.model, QwenVLModel):
        return options.num_tiles
    settings = policy.processor.preprocessing
    height, width = settings.resized(options.height, options.width)
    return height * width // settings.factor**2


def region_cells(policy: "ForcedPolicy", length: int, num_tiles: int = 1) -> torch.Tensor:
    """Return (g, g) bool region with which a prompt for its caption has `length` tokens.

    Where regions are drawn on the image, they take no tokens: there it is the image's upper half.
    """
    grid = policy.processor.grid_size
    if policy.region_prompt != "tokens":
        return (torch.arange(grid * grid) < grid * grid // 2).view(grid, grid)
    shortest = len(policy.prompts.describe(num_tiles, 1))
    if not shortest <= length < shortest + grid * grid - 1:
        raise ValueError(f"--prompt_length {length}: must be {shortest} to that + {grid**2 - 2}")
    return (torch.arange(grid * grid) <= length - shortest).view(grid, grid)


def mask_of(cells: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the mask (H, W) bool of cells (g, g), each from its first whole pixel on."""
    rows, columns = (
        torch.arange(1, side + 1).mul(len(cells)).sub(1).div(side, rounding_mode="floor")
        for side in (height, width)
    )
    return cells[rows[:, None], columns]


def caption_of(num_words: int) -> str:
    """Return a caption of so many words, one token each."""
    return " ".join(itertools.islice(itertools.cycle(WORDS), num_words))
