"""Which cells of a data set are usable, found without decoding an image or a mask: the same rules for every reader."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl_train.data.arrow import byte_strings, field, is_list, lists, valid
from rl_train.data.images import check_image, check_image_path, image_key
from rl_train.data.masks import decode_runs, foreground, foregrounds, resize_nearest, rle_runs

IMAGE = {"bytes": "bytes", "path": "text"}
RLE = {"counts": ("text", "bytes", ["int"]), "size": ["int"]}
NO_MASK, BAD_MASK, EMPTY_MASK, LOST_MASK = (
    "no mask",
    "bad mask RLE",
    "empty mask",
    "mask empty at the image's size",
)


def check_rles(rles: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """((n,) object: None, or why the mask cannot be used; (n, 2) int64 [H, W]) of a column of run-length masks."""
    counts, sizes = (
        field(rles, "counts", pa.string()),
        _sizes(field(rles, "size", pa.list_(pa.int64()))),
    )
    if is_list(counts.type):
        pixels = np.array(
            [_foreground(*rle) for rle in zip(counts.to_pylist(), sizes.tolist())], dtype=np.int64
        )
    else:
        pixels = foregrounds(*byte_strings(counts), sizes)
    reasons = np.full(len(pixels), None, dtype=object)
    reasons[pixels == 0] = EMPTY_MASK
    reasons[pixels < 0] = BAD_MASK
    reasons[~valid(counts)] = NO_MASK
    return reasons, sizes


def check_images(images: pa.Array, folder: Path):
    """Yields per cell of struct<bytes, path> what `check_image` says of it and its `image_key`; paths are relative to `folder`."""
    data, paths = field(images, "bytes", pa.binary()), field(images, "path", pa.string())
    content, offsets = byte_strings(data)
    content, offsets = memoryview(content), offsets.tolist()
    for row, present in enumerate(valid(data).tolist()):
        if present:
            image = content[offsets[row] : offsets[row + 1]]
            yield check_image(image), image_key(image)
        else:
            yield check_image_path(paths[row].as_py(), folder)


def number_images(keys: np.ndarray) -> np.ndarray:
    """(n,) int64 number of each sample's image, by first appearance, from the samples' image keys (n,)."""
    _, first, image = np.unique(keys, return_index=True, return_inverse=True)
    return first.argsort().argsort()[image]


def lost_at(image_size: tuple[int, int], mask_size: tuple[int, int], rle) -> bool:
    """Whether a non-empty mask of (H, W) has no pixel left at the (H, W) of its image; `rle()` gives the mask."""
    if image_size[0] >= mask_size[0] and image_size[1] >= mask_size[1]:
        return False  # every pixel is the nearest one of some pixel
    return not resize_nearest(decode_runs(*rle_runs(rle())), *image_size).any()


def _sizes(array: pa.Array) -> np.ndarray:
    """(n, 2) int64, zeros where a list does not hold two numbers."""
    lengths, values = lists(array)
    values = pc.fill_null(values.cast(pa.int64(), safe=False), 0).to_numpy(zero_copy_only=False)
    starts, pairs = np.cumsum(lengths) - lengths, lengths == 2
    sizes = np.zeros((len(lengths), 2), dtype=np.int64)
    sizes[pairs] = values[starts[pairs, None] + [0, 1]]
    return sizes


def _foreground(counts: list | None, size: list) -> int:
    """Pixels of uncompressed counts, -1 if `rle_runs` raises."""
    try:
        return foreground(rle_runs({"counts": counts, "size": size})[0])
    except ValueError:
        return -1
