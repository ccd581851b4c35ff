"""Sa2VA's inputs, made in the loader's workers: image tiles, SAM2's image and region grids."""

from dataclasses import dataclass

import torch

from rl_train.data.errors import DamagedSample
from rl_train.data.text import phrase
from sa2va_hf import Sa2VAProcessor
from sa2va_hf.processing_sa2va import normalise_tiles
from sa2va_hf.prompts import PromptBuilder


@dataclass
class BatchInputs:
    """B samples; t tiles of S x S pixels, g x g cells."""

    tiles: list[torch.Tensor]  # (t, 3, S, S) uint8 of each: a quarter of what would else travel
    sam_pixels: torch.Tensor  # (B, 3, 1024, 1024) uint8
    grids: torch.Tensor  # (B, g, g) bool region cells

    @property
    def pixel_values(self) -> list[torch.Tensor]:
        """(t, 3, S, S) float32 tiles of each, normalised."""
        return [normalise_tiles(tiles) for tiles in self.tiles]


@dataclass
class Sa2VAInputs:
    """The loader's `Inputs` of Sa2VA; holds no weights, so that a worker's copy is cheap."""

    processor: Sa2VAProcessor
    prompts: PromptBuilder
    context: int  # tokens that the language model takes
    max_new_tokens: int  # of an answer

    def check(self, sample: dict):
        """Raise DamagedSample if the caption's prompt, with the most tiles, leaves no room.

        Of all prompts only this one holds a whole caption. What fits does not depend on the image.
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

    def prepare(self, sample: dict) -> tuple[torch.Tensor, ...]:
        """(tiles, SAM2's pixels, region cells) of one sample; see `BatchInputs`."""
        image, grid = sample["image"], self.processor.region_grid(sample["mask"])
        return self.processor.tile_pixels(image), self.processor.sam_image(image), grid

    def collate(self, prepared: list[tuple[torch.Tensor, ...]]) -> BatchInputs:
        tiles, sam_pixels, grids = zip(*prepared)
        tiles = torch.cat(tiles).split(list(map(len, tiles)))  # one storage: `loader.pack`
        return BatchInputs(list(tiles), torch.stack(sam_pixels), torch.stack(grids))
