"""Qwen2.5-VL's and SAM2's inputs, made in the loader's workers; where an image's tokens stand.

Letters: B images, P prompts, L their longest length, n patches of an image, H', W' its resized
sides in pixels, S pixels of SAM2's side.
"""

import math
from dataclasses import dataclass

import torch
from PIL import Image

from rl_train.data.errors import DamagedSample
from rl_train.data.text import phrase
from sa2va_hf.processing_sa2va import planes, to_rgb

MAX_ASPECT = 200  # of an image's longer side to its shorter one
QUESTION = 512  # text tokens of a prompt beside the phrase: the chat template and the question


@dataclass(frozen=True)
class ImageSizes:
    """How large the model sees an image: what decides its number of tokens."""

    patch: int  # pixels of a patch's side
    merge: int  # patches of a token's side
    min_pixels: int
    max_pixels: int
    side: int  # every image is first resized to side x side, whatever its shape; 0: it keeps that

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def max_tokens(self) -> int:
        """The most tokens that an image may have."""
        return (self.side**2 or self.max_pixels) // self.factor**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(H', W') of an image, as Qwen2-VL's `smart_resize` has them.

        Multiples of `factor`, in the image's own shape as far as that goes, of as many pixels as
        are allowed. Python rounds halves to even, as there.
        """
        if self.side:
            return self.side, self.side
        unit = self.factor
        sides = [round(n / unit) * unit for n in (height, width)]
        pixels, area = height * width, sides[0] * sides[1]
        if area > self.max_pixels:
            scale = math.sqrt(pixels / self.max_pixels)
            sides = [max(unit, math.floor(n / scale / unit) * unit) for n in (height, width)]
        elif area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / pixels)
            sides = [math.ceil(n * scale / unit) * unit for n in (height, width)]
        return tuple(sides)


@dataclass
class PointInputs:
    """B samples."""

    pixels: list[torch.Tensor]  # (3, H', W') uint8 of each
    sam_pixels: torch.Tensor  # (B, 3, S, S) uint8


@dataclass
class QwenInputs:
    """The loader's `Inputs` of Qwen2.5-VL and SAM2; holds no weights.

    Args:
        max_caption_length: text tokens of a phrase; None: whatever fits the context.
    """

    sizes: ImageSizes
    sam_size: int  # S
    tokenizer: object
    context: int  # tokens that the language model takes
    max_new_tokens: int  # of an answer
    max_caption_length: int | None = None

    @property
    def longest_phrase(self) -> int:
        """Text tokens that a phrase may have."""
        fits = self.context - self.sizes.max_tokens - QUESTION - self.max_new_tokens
        return min(fits, self.max_caption_length or fits)

    def check(self, sample: dict):
        """Raise DamagedSample if the image is too narrow, or the phrase too long or no plain text.

        A special token in it could end the question, or stand for an image.
        """
        width, height = sample["image"].size
        if max(width, height) > MAX_ASPECT * min(width, height):
            fault = f"image of {width}x{height} pixels, narrower than 1 to {MAX_ASPECT}"
            raise DamagedSample(sample["image_id"], fault)
        caption = sample["caption"]
        ids = self.tokenizer.encode(phrase(caption), add_special_tokens=False)
        if len(ids) > self.longest_phrase:
            fault = (
                f"caption of {len(caption)} characters: its {len(ids)} text tokens exceed the "
                f"{self.longest_phrase} of --max_caption_length and the model's context"
            )
            raise DamagedSample(sample["image_id"], fault)
        added = {i: token for token, i in self.tokenizer.get_added_vocab().items()}
        if odd := [added[i] for i in ids if i in added]:
            raise DamagedSample(sample["image_id"], f"caption with the special token {odd[0]}")

    def prepare(self, sample: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """(what Qwen2.5-VL sees, what SAM2 sees) of one sample; see `PointInputs`."""
        image = to_rgb(sample["image"])
        height, width = self.sizes.resized(image.height, image.width)
        seen = image.resize((width, height), Image.Resampling.BICUBIC)
        of_sam = image.resize((self.sam_size, self.sam_size), Image.Resampling.BILINEAR)
        return planes(seen), planes(of_sam)

    def collate(self, prepared: list[tuple[torch.Tensor, torch.Tensor]]) -> PointInputs:
        pixels, sam_pixels = zip(*prepared)
        sizes = [one.shape for one in pixels]  # one storage: see `loader.pack`
        flat = torch.cat([one.flatten() for one in pixels])
        parts = flat.split([one.numel() for one in pixels])
        pixels = [part.view(size) for part, size in zip(parts, sizes)]
        return PointInputs(pixels, torch.stack(sam_pixels))


def patches(pixels: torch.Tensor, sizes: ImageSizes, mean, std, frames: int = 2) -> torch.Tensor:
    """(n, 3 * frames * patch^2) float32 patches of an image (3, H', W') uint8, normalised.

    In the order of Qwen2-VL's image processor: those of one token behind each other, and each
    image as `frames` equal frames.

    Args:
        mean, std: of the three colours, in [0, 1].
    """
    mean, std = (torch.tensor(v, device=pixels.device).view(3, 1, 1) for v in (mean, std))
    values = (pixels.float() * (1 / 255) - mean) / std
    p, m = sizes.patch, sizes.merge
    rows, columns = (side // sizes.factor for side in pixels.shape[1:])
    values = values.view(3, rows, m, p, columns, m, p)
    values = values.permute(1, 4, 2, 5, 0, 3, 6)  # (rows, columns, m, m, 3, p, p)
    values = values[..., None, :, :].expand(*values.shape[:5], frames, p, p)
    return values.reshape(rows * columns * m * m, -1)


def image_positions(start: int, rows: int, columns: int) -> torch.Tensor:
    """(3, rows * columns) positions in time, height and width of an image's tokens.

    Args:
        start: position of the first, the number of tokens before it.
    """
    height = torch.arange(rows).repeat_interleave(columns)
    width = torch.arange(columns).repeat(rows)
    return start + torch.stack([torch.zeros_like(height), height, width])


def prompt_positions(
    ids: list[list[int]], grids: list[tuple[int, int]], image_token: int
) -> torch.Tensor:
    """(3, P, L) positions of prompts that are padded on the left, 0 at the padding.

    Text counts up by one on all axes; behind an image it goes on after the highest number there.

    Args:
        ids: of each prompt, with one image in it; grids: (rows, columns) of its tokens.
    """
    length = max(map(len, ids))
    placed = torch.zeros(3, len(ids), length, dtype=torch.long)
    for prompt, (row, (rows, columns)) in enumerate(zip(ids, grids, strict=True)):
        start, count = row.index(image_token), rows * columns
        behind = start + max(rows, columns)
        rest = torch.arange(behind, behind + len(row) - start - count)
        parts = [torch.arange(start).expand(3, -1), image_positions(start, rows, columns)]
        placed[:, prompt, length - len(row) :] = torch.cat([*parts, rest.expand(3, -1)], 1)
    return placed
