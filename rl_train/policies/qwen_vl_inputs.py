"""Qwen-VL's and SAM2's inputs, made in the loader's workers.

Letters: B images, n patches of an image, H', W' its resized sides in pixels, S pixels of SAM2's
side.
"""

from dataclasses import dataclass

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from rl_train.data.loader import pack
from rl_train.data.text import phrase
from rl_train.policies.base import check_aspect, check_caption
from sa2va_hf.processing_sa2va import planes, to_rgb
from sa2va_hf.qwen_images import ImagePreprocessing

MAX_ASPECT = 200  # of an image's longer side to its shorter one
# Text tokens of a prompt beside the phrase: the chat template and the question.
QUESTION_TOKENS = 512


@dataclass
class PointInputs:
    """Inputs of B samples."""

    pixels: list[torch.Tensor]  # (3, H', W') uint8 of each
    sam_pixels: torch.Tensor  # (B, 3, S, S) uint8


@dataclass
class QwenPreprocessor:
    """Preprocessing for Qwen-VL and SAM2, the loader's `Preprocessor`; holds no weights.

    Args:
        max_prompt_length: text tokens of a phrase; None: all that fit the context.
    """

    preprocessing: ImagePreprocessing
    sam_size: int  # S
    tokenizer: PreTrainedTokenizerBase
    context: int  # tokens that the language model takes
    max_new_tokens: int  # of an answer
    max_prompt_length: int | None = None

    @property
    def max_phrase_tokens(self) -> int:
        """Largest number of text tokens of a phrase."""
        # By the largest image, so that a sample is judged by its phrase alone.
        fits = self.context - self.preprocessing.max_tokens - QUESTION_TOKENS - self.max_new_tokens
        return min(fits, self.max_prompt_length or fits)

    def check(self, sample: dict):
        """Raise DamagedSample if the image is too narrow: see `check_caption` for the phrase."""
        check_aspect(sample, MAX_ASPECT)
        text = phrase(sample["caption"])
        num_tokens = len(self.tokenizer.encode(text, add_special_tokens=False))
        check_caption(sample, self.tokenizer, num_tokens, self.max_phrase_tokens, texts=[text])

    def prepare(self, sample: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pixels (3, H', W') for Qwen-VL and (3, S, S) for SAM2, uint8, of one sample.

        An image that was stored square is resized once where a square is asked for: SAM2 always
        takes one. So both see it as if it had never been another shape.
        """
        image = to_rgb(sample["image"])
        height, width = self.preprocessing.resized(image.height, image.width)
        square = to_rgb(sample.get("stored_image", image))
        source = square if self.preprocessing.side else image
        resized = source.resize((width, height), self.preprocessing.resampling)
        sam_image = square.resize((self.sam_size, self.sam_size), Image.Resampling.BILINEAR)
        return planes(resized), planes(sam_image)

    def collate(self, prepared: list[tuple[torch.Tensor, torch.Tensor]]) -> PointInputs:
        pixels, sam_pixels = zip(*prepared)
        return PointInputs(pack(pixels), torch.stack(sam_pixels))
