"""Sa2VA's inputs, made in the loader's workers: image tiles, SAM2's image and region grids.

A Qwen-VL has no tiles: its image stands in their place.
"""

from dataclasses import dataclass

import torch

from rl_train.data.errors import DamagedSample
from rl_train.data.loader import pack
from rl_train.data.text import phrase
from rl_train.policies.base import check_aspect, check_caption
from sa2va_hf import Sa2VAProcessor
from sa2va_hf.prompts import PromptBuilder


@dataclass
class BatchInputs:
    """Inputs of B samples. Letters: t tiles of S x S pixels, g x g cells."""

    # (t, 3, S, S) uint8 of each, a quarter of float32; of a Qwen-VL (3, H', W')
    tiles: list[torch.Tensor]
    sam_pixels: torch.Tensor  # (B, 3, 1024, 1024) uint8
    prompt_masks: torch.Tensor  # (B, g, g) bool cells of each region


@dataclass
class Sa2VAPreprocessor:
    """Preprocessing for Sa2VA, the loader's `Preprocessor`; holds no weights."""

    processor: Sa2VAProcessor
    prompts: PromptBuilder
    context: int  # tokens that the language model takes
    max_new_tokens: int  # of an answer
    max_prompt_length: int | None = None  # text tokens of a caption's prompt; None: the context

    def check(self, sample: dict):
        """Raise DamagedSample if the caption's prompt is too long or holds a special token.

        Or if the image is too narrow for the model.

        No other prompt holds a whole caption. The prompt is measured with the most tiles, so that
        the result does not depend on the image.
        """
        question, num_tiles = phrase(sample["caption"]), self.processor.max_pieces
        num_tokens = len(self.prompts.segment(question, num_tiles))
        num_image_tokens = num_tiles * self.prompts.tokens_per_tile
        # Text tokens of a question that leave room for the longest answer.
        fits = self.context - num_image_tokens - self.max_new_tokens
        check_caption(
            sample,
            self.prompts.tokenizer,
            num_tokens - num_image_tokens,
            min(fits, self.max_prompt_length or fits),
            texts=(question, sample["caption"]),  # in a question, and as an answer
        )
        if "question" in sample:  # read whether or not a task asks it
            num_tokens = len(self.prompts.ids(sample["question"], num_tiles))
            num_tokens += self.prompts.tokens_per_tile  # at most, of the region's cells
            if num_tokens > self.context - self.max_new_tokens:
                fault = f"question of {num_tokens} tokens, more than the model's context allows"
                raise DamagedSample(sample["image_id"], fault)
        if self.processor.max_aspect:
            check_aspect(sample, self.processor.max_aspect)

    def prepare(self, sample: dict) -> tuple[torch.Tensor, ...]:
        """Return (tiles, SAM2's pixels, region cells) of one sample; see `BatchInputs`."""
        image, grid = sample["image"], self.processor.region_grid(sample["mask"])
        return self.processor.tile_pixels(image), self.processor.sam_image(image), grid

    def collate(self, prepared: list[tuple[torch.Tensor, ...]]) -> BatchInputs:
        tiles, sam_pixels, grids = zip(*prepared)
        return BatchInputs(pack(tiles), torch.stack(sam_pixels), torch.stack(grids))
