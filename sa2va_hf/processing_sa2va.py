"""Image, tile and region preprocessing of Sa2VA, with pillow and torch.

Sources: `dynamic_preprocess` of InternVL; `predict_forward` and `DirectResize` of the original
Sa2VA code.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from .configuration_sa2va import Sa2VAConfig
from .to_device import to_device

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

MAX_PIXELS = 300_000_000
GROWTHS_AT_ONCE = 16  # growth steps of one pixel between two checks whether the piece is complete


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB by pillow; alpha is dropped, as in the original.

    Raises:
        ValueError: it has more than MAX_PIXELS.
    """
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"image of {image.width}x{image.height} pixels is larger than {MAX_PIXELS} pixels"
        )
    return image if image.mode == "RGB" else image.convert("RGB")


def planes(image: Image.Image) -> torch.Tensor:
    """Return an RGB image as (3, H, W) uint8; by bands it takes half the time of a permutation."""
    return torch.from_numpy(np.stack(image.split()))


def tile_grid(
    width: int, height: int, max_tiles: int, image_size: int = 448, min_tiles: int = 1
) -> tuple[int, int]:
    """Return (columns, rows) of InternVL's dynamic tiling.

    Of grids of at most `max_tiles` cells it is the one closest in aspect ratio.

    On a tie the later candidate (by area) wins if the image has more than half its pixels.
    Candidates of equal area keep the iteration order of a Python set, as in the original: published
    models were trained with it.
    """
    candidates = set(
        (i, j)
        for n in range(min_tiles, max_tiles + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if min_tiles <= i * j <= max_tiles
    )
    best, best_difference = (1, 1), float("inf")
    for columns, rows in sorted(candidates, key=lambda c: c[0] * c[1]):
        difference = abs(width / height - columns / rows)
        if difference < best_difference:
            best, best_difference = (columns, rows), difference
        elif (
            difference == best_difference
            and width * height > 0.5 * image_size * image_size * columns * rows
        ):
            best = (columns, rows)
    return best


def region_grid(masks: torch.Tensor, grid_size: int, image_size: int, rule: str) -> torch.Tensor:
    """Return the cells (n, grid_size, grid_size) bool of the last tile that each region covers.

    A region that has pixels but covers no cell by the rule gets the cell it covers most, so that
    its caption is not blind; an empty mask gives an empty grid.

    Args:
        masks: (n, H, W) bool.
        grid_size: cells per side (16); image_size: pixels per side of a tile (448).
        rule: "area" = nearest resize to the tile, then more than half of a cell's pixels (the
            describe-anything training, one tile); "nearest" = the top-left pixel of each cell
            (`predict_forward`, Osprey training).

    Source: `describe_anything_referring_dataset.py` and `modeling_sa2va_chat.py` of the original.
    """
    if masks.dtype != torch.bool or masks.ndim != 3:
        raise ValueError(
            f"region masks must be bool (n, H, W), got {masks.dtype} {tuple(masks.shape)}"
        )
    # In float, and with `any` of every mask, native size takes 4 times as long.
    pixels = masks[:, None].view(torch.uint8)
    # Fraction (n, g, g) of each cell's pixels that lie in the region.
    cells = F.adaptive_avg_pool2d(
        F.interpolate(pixels, size=(image_size, image_size), mode="nearest").float(), grid_size
    )[:, 0]
    if rule == "area":
        grid = cells > 0.5
    elif rule == "nearest":
        grid = F.interpolate(pixels, size=(grid_size, grid_size), mode="nearest")[:, 0] > 0.5
    else:
        raise ValueError(f"region rule {rule!r} is unknown; known: area, nearest")
    lost = ~grid.flatten(1).any(1)  # (n,)
    # Regions without a pixel keep an empty grid.
    if lost.any():
        lost &= masks.flatten(1).any(1)
    if lost.any():
        # Native coverage, since a region of one pixel can vanish even from the resized tile.
        coverage = F.adaptive_avg_pool2d(pixels[lost].float(), grid_size)[:, 0].flatten(1)
        grid[lost] = (
            F.one_hot(coverage.argmax(1), grid_size * grid_size)
            .bool()
            .view(-1, grid_size, grid_size)
        )
    return grid


def upsample_masks(logits: torch.Tensor, sam_size: int, size: tuple[int, int]) -> torch.Tensor:
    """Resize mask logits (n, h, w) to `size` = (H, W), by way of SAM2's own input size.

    The original's `predict_forward` does the same. Resizing (256, 256) to (H, W) directly would
    flip about 0.4 % of the pixels.
    """
    logits = F.interpolate(
        logits[:, None].float(), size=(sam_size, sam_size), mode="bilinear", align_corners=False
    )
    return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)[:, 0]


def one_piece(logits: torch.Tensor) -> torch.Tensor:
    """Return mask logits (n, h, w) whose masks are one connected piece each.

    The piece, of pixels above 0 that touch by a side or a corner, is the one with the highest
    logit. Logits above 0 elsewhere change their sign.
    """
    inside = logits > 0
    piece = (logits == logits.amax((-2, -1), keepdim=True)) & inside
    while True:  # grow the piece until it stays the same
        grown = piece
        for _ in range(GROWTHS_AT_ONCE):
            grown = (F.max_pool2d(grown.to(logits.dtype), 3, 1, padding=1) > 0) & inside
        if torch.equal(grown, piece):
            return torch.where(inside & ~piece, -logits, logits)
        piece = grown


def normalise_sam_pixels(pixels: torch.Tensor, rounded: bool = False) -> torch.Tensor:
    """Return uint8 pixels as (.., 3, 1024, 1024) float32, ImageNet-normalised for SAM2.

    Args:
        rounded: mean and std rounded to bfloat16, as the original's inference code
            (`preprocess_image`) has them; its supervised training has them exact, which is the
            default here. Pixels differ by up to 0.0081.
    """
    mean, std = _imagenet(pixels.device)
    if rounded:
        mean, std = mean.bfloat16().float(), std.bfloat16().float()
    return (pixels.float() / 255 - mean) / std


def normalise_tiles(pixels: torch.Tensor) -> torch.Tensor:
    """Return uint8 pixels as (.., 3, S, S) float32, ImageNet-normalised."""
    mean, std = _imagenet(pixels.device)
    return pixels.float().div_(255).sub_(mean).div_(std)


def _imagenet(device):
    """Return mean and std (3, 1, 1) of ImageNet's colours."""
    both = torch.tensor([IMAGENET_MEAN, IMAGENET_STD]).view(2, 3, 1, 1)
    return to_device(both, device).unbind()


class Sa2VAProcessor:
    """Turns PIL images and masks into the tensors that `Sa2VAModel` takes.

    `Sa2VAProcessor(config)` returns the class of the configuration's family. Args: `config`; others
    are the family's own.
    """

    def __new__(
        cls, config: Sa2VAConfig | None = None, *args: Any, **others: Any
    ) -> "Sa2VAProcessor":
        if cls is Sa2VAProcessor:
            from .families import family_of  # the table names subclasses of this class

            cls = family_of(config.raw).processor
        return super().__new__(cls)

    resize_twice = False  # images of a Qwen-VL, as the original's inference and not its training

    def __init__(self, config: Sa2VAConfig):
        self.config, self.sam_size = config, config.sam2.image_size

    def sam_image(self, image: Image.Image) -> torch.Tensor:
        """Return the image resized (bicubic) to (3, 1024, 1024) uint8, whatever its shape."""
        return planes(to_rgb(image).resize((self.sam_size, self.sam_size)))
