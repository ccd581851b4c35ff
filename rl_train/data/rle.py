"""COCO run-length masks. Their runs are checked in numpy before pycocotools decodes them, since its
C code would read beyond the end of a corrupt string.

Runs alternate background, foreground, background, .. down the columns (Fortran order) of an (H, W)
mask. The compressed form is that of pycocotools' `rleFrString`: 6 bits a character (code - 48), 5
of them data, bit 0x20 = "continues", sign bit 0x10 in the last; from the fourth run on the
difference to the run two before.

Letters: C characters, R runs.
"""

import numpy as np
from pycocotools import mask as coco

from rl_train.data.images import MAX_PIXELS

# {"counts": str, bytes or list of int, "size": [H, W]}
RLE = dict[str, str | bytes | list[int]]
NO_MASK, BAD_MASK, EMPTY_MASK = "no mask", "bad mask RLE", "empty mask"
LOST_MASK = "mask empty at the image's size"
DAMAGED_RLE = {"counts": [], "size": []}  # in place of a mask that cannot be encoded
MAX_CHARS = 7  # of one run: 35 bits hold any difference of two 32-bit runs
# Of a sample's mask: those of N rows are held on the GPU at once. Twice SAM2's own side.
MASK_PIXELS = 2048 * 2048


def mask_size(height: int, width: int) -> tuple[int, int]:
    """Return the size (H, W) at which the mask of an image (H, W) is used.

    It is the image's own up to MASK_PIXELS. Above, both sides are reduced by the same factor, to no
    less than a pixel.
    """
    scale = (MASK_PIXELS / (height * width)) ** 0.5
    return (height, width) if scale >= 1 else tuple(max(1, int(n * scale)) for n in (height, width))


def check_mask(rle: RLE | None, image_size: tuple[int, int]) -> tuple[str | None, bool]:
    """Return (reason why a mask cannot be used or None, whether its image has another size)."""
    if not isinstance(rle, dict) or rle.get("counts") is None:
        return NO_MASK, False
    try:
        runs, height, width = rle_runs(rle)
    except ValueError:
        return BAD_MASK, False
    if not runs[1::2].any():
        return EMPTY_MASK, False
    return None, (height, width) != image_size


def whole_mask(size: tuple[int, int] | str) -> RLE | None:
    """Return the mask of a whole image (W, H); None if `size` is the reason why there is none."""
    if isinstance(size, str):
        return None
    width, height = size
    return dict(counts=[0, width * height], size=[height, width])


def encode_mask(mask: np.ndarray) -> RLE:
    """Encode a mask (H, W) bool to {"counts": bytes, "size": [H, W]}."""
    return coco.encode(np.asfortranarray(mask, dtype=np.uint8))


def decode_mask(rle: RLE) -> np.ndarray:
    """Decode a mask to (H, W) bool. Raises ValueError, see `rle_runs`."""
    return coco.decode(compress(rle)).astype(bool)


def compress(rle: RLE) -> RLE:
    """Convert a mask to pycocotools' compressed form. Raises ValueError, see `rle_runs`."""
    runs, height, width = rle_runs(rle)
    return coco.frPyObjects(dict(counts=runs.tolist(), size=[height, width]), height, width)


def rle_runs(rle: RLE) -> tuple[np.ndarray, int, int]:
    """Return (runs (R,) int64, H, W) of {"counts": str, bytes or list of int, "size": [H, W]}.

    Raises:
        ValueError: the size is not two positive integers of at most MAX_PIXELS pixels, or the runs
            do not decode to non-negative numbers that sum to H*W.
    """
    counts, size = rle.get("counts"), rle.get("size")
    is_size = isinstance(size, list) and [type(n) for n in size] == [int, int] and min(size) > 0
    if not is_size or size[0] * size[1] > MAX_PIXELS:
        raise ValueError(f"size {size} is not [H, W] of at most {MAX_PIXELS} pixels")
    height, width = size
    if isinstance(counts, str):
        counts = counts.encode()
    runs = decompress(counts) if isinstance(counts, bytes) else np.array(counts)
    # Each run is bounded before the sum, which could overflow.
    valid = runs.ndim == 1 and runs.dtype.kind == "i" and ((runs >= 0) & (runs <= MAX_PIXELS)).all()
    if not valid or runs.sum() != height * width:
        raise ValueError(f"counts are no runs of pixels that sum to {height}*{width}")
    return runs, height, width


def decompress(counts: bytes) -> np.ndarray:
    """Return the runs (R,) int64, of any sign, of a compressed string.

    Raises ValueError if it is damaged.
    """
    code = np.frombuffer(counts, dtype=np.uint8) - np.uint8(48)  # (C,) wraps below "0"
    if len(code) == 0 or code.max() > 63 or code[-1] & 0x20:
        raise ValueError("counts are empty, cut off or hold what no run-length string has")
    last = np.flatnonzero(code < 0x20)  # (R,) last character of each run
    length = np.diff(last, prepend=-1)
    first = last - length + 1
    if length.max() > MAX_CHARS:
        raise ValueError(f"a run has more than {MAX_CHARS} characters")
    position = np.arange(len(code)) - np.repeat(first, length)  # (C,) of a character in its run
    # 5 bits a character, the lowest first, added up over the characters of a run.
    runs = np.add.reduceat((code & 0x1F).astype(np.int64) << 5 * position, first)
    runs -= (code[last] & 0x10).astype(np.int64) << 5 * length - 4  # the sign
    # From the fourth on runs are differences to the run two before.
    runs[1::2], runs[2::2] = np.cumsum(runs[1::2]), np.cumsum(runs[2::2])
    return runs


def resize_nearest(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize a mask to (height, width); each pixel is the one nearest to its centre."""
    rows = ((np.arange(height) + 0.5) * mask.shape[0] / height).astype(np.int64)
    cols = ((np.arange(width) + 0.5) * mask.shape[1] / width).astype(np.int64)
    return mask[rows[:, None], cols]
