"""COCO run-length masks, decoded in numpy: a corrupt string is an error here, not a crash in C.

Runs alternate background, foreground, background, .. down the columns (Fortran order) of an (H, W) mask.
The compressed form is that of pycocotools' `rleFrString`: 6 bits a character (code - 48), 5 of them data, bit 0x20 =
"continues", sign bit 0x10 in the last; from the fourth run on the difference to the run two before.
"""
import numpy as np

MAX_CHARS = 7  # of one run: 35 bits hold any difference of two 32-bit runs


def rle_runs(rle: dict) -> tuple[np.ndarray, int, int]:
    """(runs (R,) int64, H, W) of {"counts": str, bytes or list of int, "size": [H, W]}.

    Raises:
        ValueError: the size is not two positive integers, or the runs do not decode to non-negative numbers that sum to H*W.
    """
    counts, size = rle["counts"], rle["size"]
    if size is None or len(size) != 2 or any(n is None or n < 1 for n in size):
        raise ValueError(f"size {size} is not [H, W]")
    if counts is None:
        raise ValueError("counts are null")
    if isinstance(counts, (str, bytes)):
        runs = _decompress(counts.encode("utf-8") if isinstance(counts, str) else counts)
    elif None in counts:
        raise ValueError("a run is null")
    else:
        runs = np.asarray(counts, dtype=np.int64)
    height, width = (int(n) for n in size)
    if (runs < 0).any() or runs.sum() != height * width:
        raise ValueError(f"runs sum to {runs.sum()}, not to {height}*{width}, or one is negative")
    return runs, height, width


def foreground(runs: np.ndarray) -> int:
    """Pixels that the runs (R,) set."""
    return int(runs[1::2].sum())


def decode_runs(runs: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W) bool of runs that `rle_runs` has checked."""
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)   # (H*W,) down the columns
    return flat.reshape(width, height).T                    # (H, W)


def resize_nearest(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """`mask` at (height, width), each pixel taken from the nearest one of `mask` (pixel centres, as in PIL)."""
    rows = ((np.arange(height) + 0.5) * mask.shape[0] / height).astype(np.int64)
    cols = ((np.arange(width) + 0.5) * mask.shape[1] / width).astype(np.int64)
    return mask[rows[:, None], cols]


def _decompress(counts: bytes) -> np.ndarray:
    """Runs (R,) int64, of any sign; raises ValueError if the characters are not such a string."""
    code = np.frombuffer(counts, dtype=np.uint8).astype(np.int64) - 48      # (characters,)
    if len(code) == 0 or code.min() < 0 or code.max() > 63 or code[-1] & 0x20:
        raise ValueError("counts are empty, cut off or hold a character that no run-length string has")
    last = np.nonzero((code & 0x20) == 0)[0]                                # (R,) index of the last character of each run
    first = np.concatenate([[0], last[:-1] + 1])
    length = last - first + 1
    if length.max() > MAX_CHARS:
        raise ValueError("counts hold a run of more than 35 bits")
    place = np.arange(len(code)) - np.repeat(first, length)                 # place of a character in its run
    value = np.add.reduceat((code & 0x1f) << (5 * place), first)
    value -= np.where(code[last] & 0x10, 1 << (5 * length), 0)              # two's complement
    value[1::2] = np.cumsum(value[1::2])                                    # differences from the fourth run (index 3) on
    value[2::2] = np.cumsum(value[2::2])
    return value
