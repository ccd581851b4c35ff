"""COCO run-length masks, decoded in numpy: a corrupt string is an error here, where pycocotools'
C code would read or write beyond its memory.

Runs alternate background, foreground, background, .. down the columns (Fortran order) of an (H, W)
mask. The compressed form is that of pycocotools' `rleFrString`: 6 bits a character (code - 48), 5
of them data, bit 0x20 = "continues", sign bit 0x10 in the last; from the fourth run on the
difference to the run two before.

Letters: C characters, R runs.
"""

import numpy as np
from pycocotools import mask as coco

from rl_train.data.images import MAX_PIXELS

NO_MASK, BAD_MASK, EMPTY_MASK = "no mask", "bad mask RLE", "empty mask"
LOST_MASK = "mask empty at the image's size"
MAX_CHARS = 7  # of one run: 35 bits hold any difference of two 32-bit runs
# Of a sample's mask: those of N rows are held on the GPU at once. Twice SAM2's own side.
MASK_PIXELS = 2048 * 2048


def mask_size(height: int, width: int) -> tuple[int, int]:
    """(H, W) of the mask of an image (H, W): its own up to MASK_PIXELS, above it reduced to them.

    By the same factor on both sides, but to no less than a pixel.
    """
    scale = (MASK_PIXELS / (height * width)) ** 0.5
    return (height, width) if scale >= 1 else tuple(max(1, int(n * scale)) for n in (height, width))


def check_mask(rle, image_size: tuple[int, int]) -> tuple[str | None, bool]:
    """(why a mask cannot be used or None, whether its size is not that of its image (H, W))."""
    if not isinstance(rle, dict) or rle.get("counts") is None:
        return NO_MASK, False
    try:
        runs, height, width = rle_runs(rle)
    except ValueError:
        return BAD_MASK, False
    if not runs[1::2].any():
        return EMPTY_MASK, False
    resized = (height, width) != image_size
    size = mask_size(*image_size)
    smaller = size[0] < height or size[1] < width  # else no pixel can get lost
    if smaller and not resize_nearest(decode_runs(runs, height, width), *size).any():
        return LOST_MASK, True
    return None, resized


def encode_mask(mask: np.ndarray) -> dict:
    """{"counts": bytes, "size": [H, W]} of a mask (H, W) bool, compressed."""
    return coco.encode(np.asfortranarray(mask, dtype=np.uint8))


def decode_mask(rle: dict) -> np.ndarray:
    """(H, W) bool. Raises ValueError, see `rle_runs`."""
    return decode_runs(*rle_runs(rle))


def rle_runs(rle: dict) -> tuple[np.ndarray, int, int]:
    """(runs (R,) int64, H, W) of {"counts": str, bytes or list of int, "size": [H, W]}.

    Raises:
        ValueError: the size is not two positive integers of at most MAX_PIXELS pixels, or the runs
            do not decode to non-negative numbers that sum to H*W.
    """
    counts, size = rle.get("counts"), rle.get("size")
    if not isinstance(size, list) or [type(n) for n in size] != [int, int] or min(size) < 1:
        raise ValueError(f"size {size} is not [H, W]")
    height, width = size
    if height * width > MAX_PIXELS:
        raise ValueError(f"size {size} is above {MAX_PIXELS} pixels")
    if isinstance(counts, (str, bytes)):
        runs = decompress(counts.encode() if isinstance(counts, str) else counts)
    elif isinstance(counts, list) and all(type(n) is int and 0 <= n <= MAX_PIXELS for n in counts):
        runs = np.array(counts, dtype=np.int64)
    else:
        raise ValueError("counts are neither a string nor whole numbers of pixels")
    if (runs < 0).any() or runs.sum() != height * width:
        raise ValueError(f"runs sum to {runs.sum()}, not to {height}*{width}, or one is negative")
    return runs, height, width


def decompress(counts: bytes) -> np.ndarray:
    """(R,) int64 runs, of any sign, of a compressed string. Raises ValueError if it is damaged."""
    code = np.frombuffer(counts, dtype=np.uint8) - np.uint8(48)  # (C,) wraps below "0"
    if len(code) == 0 or code.max() > 63 or code[-1] & 0x20:
        raise ValueError("counts are empty, cut off or hold what no run-length string has")
    last = np.flatnonzero(code < 0x20)  # (R,) last character of each run
    first = np.concatenate([[0], last[:-1] + 1])
    length = last - first + 1
    if length.max() > MAX_CHARS:
        raise ValueError(f"a run has more than {MAX_CHARS} characters")
    place = np.arange(len(code)) - np.repeat(first, length)  # (C,) of a character in its run
    runs = np.add.reduceat((code & 0x1F).astype(np.int64) << 5 * place, first)
    runs -= (code[last] & 0x10).astype(np.int64) << 5 * length - 4  # the sign
    runs[1::2], runs[2::2] = np.cumsum(runs[1::2]), np.cumsum(runs[2::2])
    return runs


def decode_runs(runs: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W) bool of runs that `rle_runs` has checked."""
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)  # (H*W,) down the columns
    return flat.reshape(width, height).T  # (H, W)


def resize_nearest(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mask at (height, width), each pixel from its nearest one (by centres, as in PIL)."""
    rows = ((np.arange(height) + 0.5) * mask.shape[0] / height).astype(np.int64)
    cols = ((np.arange(width) + 0.5) * mask.shape[1] / width).astype(np.int64)
    return mask[rows[:, None], cols]
