"""Batches of prompts about several images: features are computed once an image.

Letters: B images, P prompts (each about one image), L their longest length, C LLM width.
"""

import contextlib
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from .to_device import to_device

if TYPE_CHECKING:
    from .modeling_sa2va import Sa2VAModel


@dataclass
class ImageFeatures:
    """Features of B images before trained modules, shared by rows, roles and inner iterations.

    Images of a Qwen-VL are counted in tokens: there a tile is one token.
    """

    vision: torch.Tensor  # (t, tokens, 4 * ViT width), before mlp1; of a Qwen-VL (t, W)
    tiles: list[int]  # tiles of each image
    sam: list[torch.Tensor]  # SAM2 pyramid, before conv_s0 and conv_s1
    sizes: list[tuple[int, int]]  # (H, W) of each image
    prompt_masks: torch.Tensor  # (B, g, g) bool cells of each region, on the CPU
    # (1, rows, columns) of patches of a Qwen-VL
    grids: list[tuple[int, int, int]] | None = None
    # Where regions are drawn or named: uint8 that the LLM sees, (3, H', W') or a tile (1, 3, S, S)
    pixels: list[torch.Tensor] | None = None
    # (pixels, cells (g, g)) -> pixels with a region drawn; None: regions are not drawn
    draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    # {(image, cells as bytes): features of the image with a region drawn}
    drawn: dict[tuple[int, bytes], torch.Tensor] = field(default_factory=dict)


@dataclass
class Prompts:
    """P prompts, ready for an answer.

    A prompt mask is the original's: the cells of the ViT's grid that a region covers.
    """

    ids: list[list[int]]  # ragged
    image_index: list[int]  # index of each prompt's image
    prompt_masks: list[torch.Tensor] | None  # (1, g, g) bool region of each, on the CPU

    def __len__(self):
        return len(self.ids)

    def repeat(self, n: int) -> "Prompts":
        return self.select([p for p in range(len(self)) for _ in range(n)])

    def select(self, rows: Iterable[int]) -> "Prompts":
        masks = None if self.prompt_masks is None else [self.prompt_masks[r] for r in rows]
        return Prompts([self.ids[r] for r in rows], [self.image_index[r] for r in rows], masks)

    def followed_by(self, answers: list[list[int]]) -> "Prompts":
        """Return the prompts, each followed by the ids of an answer."""
        ids = [ids + answer for ids, answer in zip(self.ids, answers, strict=True)]
        return Prompts(ids, self.image_index, self.prompt_masks)

    def distinct(self) -> tuple["Prompts", list[int]]:
        """Return the prompts without consecutive repeats, and each prompt's index among them."""
        first = [row for row in range(len(self)) if row == 0 or not self._repeats(row)]
        # `first` ascends: a prompt belongs to the last first row at or before it.
        return self.select(first), [bisect(first, row) - 1 for row in range(len(self))]

    def _repeats(self, row: int) -> bool:
        alike = (
            self.ids[row] == self.ids[row - 1]
            and self.image_index[row] == self.image_index[row - 1]
        )
        return alike and (
            self.prompt_masks is None
            or torch.equal(self.prompt_masks[row], self.prompt_masks[row - 1])
        )


def pad_left(rows: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad ragged rows on the left to the longest: return ids and attention mask (P, L)."""
    lengths = torch.tensor([len(row) for row in rows])
    attended = torch.arange(int(lengths.max())) >= lengths.max() - lengths[:, None]  # (P, L)
    ids = torch.full(attended.shape, pad_id)
    # Row-major, so one flat copy fills all rows.
    ids[attended] = torch.from_numpy(np.fromiter(chain.from_iterable(rows), np.int64))
    return ids, attended.long()


def embed(
    model: "Sa2VAModel", features: ImageFeatures, prompts: Prompts, pad_id: int, num_tokens: int = 0
):
    """Return left-padded embeddings of prompts, with image and region features, and positions.

    Args:
        num_tokens: number of tokens that will follow a prompt; checked against the model's context.

    Returns:
        embeds (P, L, C), attention mask (P, L) and positions (3, P, L), the last two on the CPU;
        no positions where tokens are counted.
    """
    ids, mask = pad_left(prompts.ids, pad_id)
    # A prompt longer than the context would be computed at positions never trained.
    _check_length(model, max(prompts.ids, key=len), num_tokens)
    if features.grids is not None:
        vision = _vision_of(model, features, prompts)
        grids = torch.tensor([features.grids[i] for i in prompts.image_index])
        return model.embed(ids, vision), mask, model.positions(ids, mask, grids)
    if features.draw is not None and prompts.prompt_masks is not None:
        # One tile each, with its region drawn: (P, tokens, C).
        vision = model.project(_vision_of(model, features, prompts))
        return model.embed(ids, vision), mask, None
    # Project each image once, then repeat its features for the rows that share it.
    used = sorted(set(prompts.image_index))
    starts = torch.tensor([0, *features.tiles]).cumsum(0).tolist()
    vision = torch.cat([features.vision[starts[i] : starts[i + 1]] for i in used])
    vision = model.project(vision).split([features.tiles[i] for i in used])
    of_image = dict(zip(used, vision))
    flags = None
    if prompts.prompt_masks is not None:  # regions refer to an image's last tile
        tiles = [features.tiles[i] for i in prompts.image_index]
        flags = torch.tensor([t + 1 == n for n in tiles for t in range(n)])
    vision = torch.cat([of_image[i] for i in prompts.image_index])
    return model.embed(ids, vision, prompts.prompt_masks, flags), mask, None


def _vision_of(model, features, prompts) -> torch.Tensor:
    """Return the vision features of all prompts' images, with their regions drawn.

    Of a Qwen-VL (tokens, W), of tiles (P, tokens, W).

    An image with a region is encoded at its first use; without gradient it is kept.
    """
    whole = features.vision.split(features.tiles)
    if prompts.prompt_masks is None:
        return torch.cat([whole[i] for i in prompts.image_index])
    vision, encoded = [], {} if torch.is_grad_enabled() and whole[0].requires_grad else None
    kept = features.drawn if encoded is None else encoded
    for i, cells in zip(prompts.image_index, prompts.prompt_masks):
        key = i, cells.numpy().tobytes()
        if key not in kept:
            train = encoded is not None
            # Without autocast, as whole images are encoded.
            precision = (
                contextlib.nullcontext()
                if train
                else torch.autocast(model.device.type, enabled=False)
            )
            with torch.set_grad_enabled(train), precision:
                pixels = to_device(features.pixels[i], model.device)
                kept[key] = model.encode_images([features.draw(pixels, cells[0])])[0]
        vision.append(kept[key])
    return torch.cat(vision)


def _check_length(model, ids: list[int], num_tokens: int):
    limit = model.config.llm.max_position_embeddings
    if len(ids) + num_tokens > limit:
        num_image_tokens = ids.count(model.img_context_id)
        remedy = "use fewer tiles" if 2 * num_image_tokens > len(ids) else "its caption is too long"
        raise ValueError(
            f"a prompt of {num_image_tokens} tokens of image and region and "
            f"{len(ids) - num_image_tokens} of text, {num_tokens} behind it, does not "
            f"fit the context of {limit}: {remedy}"
        )


def shared_prefix_lengths(
    model: "Sa2VAModel", features: ImageFeatures, prompts: Prompts
) -> list[int]:
    """Return how many leading tokens, up to its image's end, each prompt shares with the last.

    None where regions are drawn on the images.
    """
    lengths = [0] * len(prompts)
    if features.draw is not None and prompts.prompt_masks is not None:
        return lengths
    for p in range(1, len(prompts)):
        ids, image = prompts.ids[p], prompts.image_index[p]
        start = ids.index(model.img_context_id)
        # Behind the image the prompts differ: regions, question.
        end = start + features.tiles[image] * model.config.tokens_per_tile
        if image == prompts.image_index[p - 1] and ids[:end] == prompts.ids[p - 1][:end]:
            lengths[p] = end
    return lengths
