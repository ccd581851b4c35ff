"""Sa2VA's inputs, made in the loader's workers: image tiles, SAM2's image and region grids."""

from dataclasses import dataclass

import torch

from rl_train.data.errors import DamagedSample
from rl_train.data.text import phrase
from sa2va_hf import Sa2VAProcessor
from sa2va_hf.prompts import PromptBuilder


@dataclass
class PreparedSample:
    """One sample; t tiles of S x S pixels, g x g cells."""

    tiles: torch.Tensor  # (t, 3, S, S) float32
    sam_image: torch.Tensor  # (3, 1024, 1024) uint8
    grid: torch.Tensor  # (g, g) bool region cells


@dataclass
class BatchInputs:
    """B samples."""

    pixel_values: list[torch.Tensor]  # (t, 3, S, S) float32 tiles of each
    sam_pixels: torch.Tensor  # (B, 3, 1024, 1024) uint8
    grids: torch.Tensor  # (B, g, g) bool region cells


@dataclass
class Sa2VAInputs:
    """The loader's `Inputs` of Sa2VA; holds no weights, so that a worker's copy is cheap."""

    processor: Sa2VAProcessor
    prompts: PromptBuilder
    context: int  # tokens that the language model takes
    max_new_tokens: int  # of an answer

    def check(self, sample: dict):
        """Raise DamagedSample if the caption leaves no room for an answer in the context.

        A caption fits if its segmentation prompt, about an image of the most tiles, leaves room:
        of all prompts only this one holds a whole caption. What fits does not depend on the image.
        """
        tiles = self.processor.max_tiles
        length = len(self.prompts.segment(phrase(sample["caption"]), tiles + (tiles > 1)))
        if length + self.max_new_tokens > self.context:
            raise DamagedSample(
                sample["image_id"],
                f"caption of {len(sample['caption'])} characters: its prompt of {length} tokens "
                f"(--max_tiles {tiles}) and --max_completion_length {self.max_new_tokens} exceed "
                f"the context of {self.context}",
            )

    def prepare(self, sample: dict) -> PreparedSample:
        return PreparedSample(
            self.processor.tiles(sample["image"]),
            self.processor.sam_image(sample["image"]),
            self.processor.region_grid(sample["mask"]),
        )

    def collate(self, prepared: list[PreparedSample]) -> BatchInputs:
        tiles = torch.cat([sample.tiles for sample in prepared])  # one storage, see `loader.pack`
        return BatchInputs(
            list(tiles.split([len(sample.tiles) for sample in prepared])),
            torch.stack([sample.sam_image for sample in prepared]),
            torch.stack([sample.grid for sample in prepared]),
        )
