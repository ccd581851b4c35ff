"""COCO run-length masks, decoded in numpy: a corrupt string is an error here, not a crash in C.

Runs alternate background, foreground, background, .. down the columns (Fortran order) of an (H, W) mask.
The compressed form is that of pycocotools' `rleFrString`: 6 bits a character (code - 48), 5 of them data, bit 0x20 =
"continues", sign bit 0x10 in the last; from the fourth run on the difference to the run two before.

Letters: n strings, of C characters and R runs in all.
"""

import numpy as np

from rl_train.data.images import MAX_PIXELS

MAX_CHARS = 7  # of one run: 35 bits hold any difference of two 32-bit runs
BLOCK = 100_000  # characters decoded at once: their arrays stay in the processor's cache


def rle_runs(rle: dict) -> tuple[np.ndarray, int, int]:
    """(runs (R,) int64, H, W) of {"counts": str, bytes or list of int, "size": [H, W]}.

    Raises:
        ValueError: the size is not two positive integers of at most MAX_PIXELS pixels, or the runs do not decode to
            non-negative numbers that sum to H*W.
    """
    counts, size = rle["counts"], rle["size"]
    if (
        size is None
        or len(size) != 2
        or not all(is_int(n) and n >= 1 for n in size)
        or size[0] * size[1] > MAX_PIXELS
    ):
        raise ValueError(f"size {size} is not [H, W] of at most {MAX_PIXELS} pixels")
    if counts is None:
        raise ValueError("counts are null")
    if isinstance(counts, (str, bytes)):
        code = _codes(
            np.frombuffer(
                counts.encode("utf-8") if isinstance(counts, str) else counts, dtype=np.uint8
            )
        )
        offsets = np.array([0, len(code)])
        if not _well_formed(code, offsets)[0]:
            raise ValueError("counts are empty, cut off or hold what no run-length string has")
        runs = _decompress(code, offsets)[0]
    elif not all(is_int(run) and 0 <= run <= MAX_PIXELS for run in counts):
        raise ValueError("a run is not a whole number of pixels")
    else:
        runs = np.array(counts, dtype=np.int64)
    height, width = (int(n) for n in size)
    if (runs < 0).any() or runs.sum() != height * width:
        raise ValueError(f"runs sum to {runs.sum()}, not to {height}*{width}, or one is negative")
    return runs, height, width


def foregrounds(chars: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """(n,) int64 pixels that n compressed masks set; -1 where `rle_runs` would raise.

    Args:
        chars: (C,) uint8, the strings one after the other; offsets: (n + 1,) int64, where each begins in it.
        sizes: (n, 2) [H, W].
    """
    found, start = np.empty(len(sizes), dtype=np.int64), 0
    np.empty(
        1 << 20
    )  # glibc keeps freed memory up to the largest block freed so far: 3 times as fast below
    while start < len(found):
        end = max(start + 1, np.searchsorted(offsets, offsets[start] + BLOCK, side="right") - 1)
        found[start:end] = _foregrounds(
            chars[offsets[start] : offsets[end]],
            offsets[start : end + 1] - offsets[start],
            sizes[start:end],
        )
        start = end
    return found


def foreground(runs: np.ndarray) -> int:
    """Pixels that the runs (R,) set."""
    return int(runs[1::2].sum())


def decode_runs(runs: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W) bool of runs that `rle_runs` has checked."""
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)  # (H*W,) down the columns
    return flat.reshape(width, height).T  # (H, W)


def compress_runs(runs: list[int]) -> str:
    """The compressed form of runs, as pycocotools writes it."""
    text = []
    for i, run in enumerate(runs):
        value, more = run - (runs[i - 2] if i > 2 else 0), True
        while more:
            five, value = value & 0x1F, value >> 5
            more = value != (-1 if five & 0x10 else 0)
            text.append(chr(48 + five + 0x20 * more))
    return "".join(text)


def resize_nearest(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """`mask` at (height, width), each pixel taken from the nearest one of `mask` (pixel centres, as in PIL)."""
    rows = ((np.arange(height) + 0.5) * mask.shape[0] / height).astype(np.int64)
    cols = ((np.arange(width) + 0.5) * mask.shape[1] / width).astype(np.int64)
    return mask[rows[:, None], cols]


def is_int(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _foregrounds(chars: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`foregrounds` of one block."""
    code = _codes(chars)
    in_range = ((sizes >= 1) & (sizes <= MAX_PIXELS)).all(1) & (sizes.prod(1) <= MAX_PIXELS)
    good = _well_formed(code, offsets) & in_range  # (n,)
    found = np.full(len(good), -1, dtype=np.int64)
    if good.any():
        lengths = np.diff(offsets)
        if not good.all():
            code, offsets = (
                code[np.repeat(good, lengths)],
                np.concatenate([[0], np.cumsum(lengths[good])]),
            )
        runs, first, odd = _decompress(code, offsets)
        exact = (np.add.reduceat(runs, first) == sizes[good].prod(1)) & (
            np.minimum.reduceat(runs, first) >= 0
        )
        found[good] = np.where(exact, np.add.reduceat(runs * odd, first), -1)
    return found


def _codes(chars: np.ndarray) -> np.ndarray:
    return chars - np.uint8(48)  # (C,), wraps to 208 and more below "0"


def _well_formed(code: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """(n,) bool: not empty, no character outside of the 64, no run of more than MAX_CHARS, not cut off."""
    good = np.diff(offsets) > 0
    good[good] = code[offsets[1:][good] - 1] & 0x20 == 0

    def string_of(positions):
        return np.searchsorted(offsets, positions, side="right") - 1

    if code.max(initial=0) > 63:
        good[string_of(np.flatnonzero(code > 63))] = False
    last, length = _run_ends(code)
    long = np.flatnonzero(length > MAX_CHARS)
    strings = string_of(last[long])
    begins = np.maximum(
        last[long] - length[long] + 1, offsets[strings]
    )  # a string that is cut off ends at its end
    good[strings[last[long] - begins >= MAX_CHARS]] = False
    return good


def _decompress(code: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(runs (R,) int64 of any sign, first (n,): where each string's runs begin, odd (R,) bool: sets pixels) of n well-formed strings."""
    last, length = _run_ends(code)
    value = (
        (code[last] & 0x1F).astype(np.int64) ^ 0x10
    ) - 0x10  # the last character holds the sign
    more = np.flatnonzero(length > 1)
    for place in range(1, MAX_CHARS):
        value[more] = value[more] << 5 | code[last[more] - place] & 0x1F
        more = more[length[more] > place + 1]
    first = np.searchsorted(last, offsets[:-1])
    num_runs = np.diff(first, append=len(value))
    odd = np.zeros(len(value) + 1, dtype=bool)
    odd[1::2] = True  # of the number over all strings; now in its string:
    odd = odd[:-1] ^ np.repeat(first % 2 == 1, num_runs)
    sums = np.empty_like(value)  # of every second value from the start of all strings
    sums[0::2], sums[1::2] = np.cumsum(value[0::2]), np.cumsum(value[1::2])
    even_start = sums[first]  # differences begin behind run 0,
    odd_start = np.where(first > 0, sums[first - 1], 0)  # and before run 1
    runs = sums - np.where(odd, np.repeat(odd_start, num_runs), np.repeat(even_start, num_runs))
    runs[first] = value[first]
    return runs, first, odd


def _run_ends(code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((R,) index of the last character of each run, (R,) its number of characters)."""
    last = np.flatnonzero(code & 0x20 == 0)
    length = last.copy()
    length[1:] -= last[:-1]
    length[:1] += 1
    return last, length
