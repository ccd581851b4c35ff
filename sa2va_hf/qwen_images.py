"""Images of Qwen2.5-VL and Qwen3-VL: sizes, and patches of pixels as their processors make them.

Letters: n patches of an image, H', W' its resized sides in pixels.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

LINE, RED = 1 / 150, (255, 0, 0)  # of a region: width as a fraction of the image's side, colour


@dataclass(frozen=True)
class ImagePreprocessing:
    """Sizes, patches and normalisation of images."""

    patch: int  # pixels of a patch's side
    merge: int  # patches of a token's side
    min_pixels: int
    max_pixels: int
    side: int  # every image is resized to side x side; 0: it keeps its shape
    mean: tuple[float, float, float]  # of the three colours, in [0, 1]
    std: tuple[float, float, float]
    frames: int = 2  # equal frames of which a still image consists
    resampling: Image.Resampling = Image.Resampling.BICUBIC  # as Qwen2.5-VL's own processor

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of an image."""
        return (self.side**2 or self.max_pixels) // self.factor**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (H', W') of an image: multiples of `factor`, within the limits on pixels."""
        if self.side:
            return self.side, self.side
        return smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)


def patches(pixels: torch.Tensor, preprocessing: ImagePreprocessing) -> torch.Tensor:
    """Return normalised patches (n, 3 * frames * patch^2) float32 of an image (3, H', W') uint8.

    They have the order of Qwen2-VL's image processor: the patches of one token are neighbours, and
    an image stands as `frames` equal frames.
    """
    device, p, m = pixels.device, preprocessing.patch, preprocessing.merge
    mean = torch.tensor(preprocessing.mean, device=device).view(3, 1, 1)
    std = torch.tensor(preprocessing.std, device=device).view(3, 1, 1)
    # A product with 1 / 255 rounds as the image processor does, a division would not.
    values = (pixels.float() * (1 / 255) - mean) / std
    rows, columns = (side // preprocessing.factor for side in pixels.shape[1:])
    values = values.view(3, rows, m, p, columns, m, p)
    values = values.permute(1, 4, 2, 5, 0, 3, 6)  # (rows, columns, m, m, 3, p, p)
    values = values[..., None, :, :].expand(*values.shape[:5], preprocessing.frames, p, p)
    return values.reshape(rows * columns * m * m, -1)


def inference_size(height: int, width: int) -> tuple[int, int]:
    """Return (H', W') to which the original's inference resizes an image before its processor does.

    They are multiples of 28, whatever the size of a token is.

    Source: `smart_resize` of qwen_vl_utils, with its defaults.
    """
    unit, min_pixels, max_pixels = 28, 4 * 28**2, 16384 * 28**2
    sides = [max(unit, round(side / unit) * unit) for side in (height, width)]
    if math.prod(sides) > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (height, width)]
    elif math.prod(sides) < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        sides = [math.ceil(side * scale / unit) * unit for side in (height, width)]
    return sides[0], sides[1]


def region_box(cells: torch.Tensor) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of a region's cells (g, g) bool, as fractions."""
    rows, columns = (cells.any(axis).nonzero()[:, 0] for axis in (1, 0))
    side = len(cells)
    left, top = columns[0].item() / side, rows[0].item() / side
    return left, top, (columns[-1].item() + 1) / side, (rows[-1].item() + 1) / side


def draw_region(pixels: torch.Tensor, cells: torch.Tensor, shape: str) -> torch.Tensor:
    """Return an image (3, H', W') or (1, 3, H', W') uint8 with a region drawn on it in red.

    The line lies outside the region, so that it hides none of it; or inside, if that is the whole
    image.

    Args:
        cells: (g, g) bool of the region, or all False, which draws nothing.
        shape: "outline" or "box", its bounding box.
    """
    if not cells.any():
        return pixels
    height, width = pixels.shape[-2:]
    mask = F.interpolate(cells[None, None].to(pixels.device).float(), size=(height, width))
    if shape == "box":
        rows, columns = mask[0, 0].any(1).float(), mask[0, 0].any(0).float()
        top, bottom = rows.argmax(), height - rows.flip(0).argmax()
        left, right = columns.argmax(), width - columns.flip(0).argmax()
        mask = torch.zeros_like(mask)
        mask[..., top:bottom, left:right] = 1
    thickness = max(2, round((height * width) ** 0.5 * LINE))  # pixels
    line = widen(mask, thickness) > mask
    if not line.any():
        outside = F.pad(1 - mask, [thickness] * 4, value=1)
        around = widen(outside, thickness)[..., thickness:-thickness, thickness:-thickness]
        line = mask > 1 - around
    colour = torch.tensor(RED, dtype=torch.uint8, device=pixels.device).view(3, 1, 1)
    return torch.where(line[0], colour, pixels)


def widen(mask: torch.Tensor, by: int) -> torch.Tensor:
    """Return a mask (1, 1, H, W) float of zeros and ones, wider by so many pixels on each side."""
    # Along one axis after the other: the same square at a fraction of the cost.
    down = F.max_pool2d(mask, (2 * by + 1, 1), 1, (by, 0))
    return F.max_pool2d(down, (1, 2 * by + 1), 1, (0, by))
