"""Segmentations as JSON files hold them: polygons, or run-length masks in COCO's form."""

import math
from collections.abc import Sequence

from pycocotools import mask as coco

from rl_train.data.images import MAX_PIXELS
from rl_train.data.rle import DAMAGED_RLE, RLE, compress

# Pixels that a polygon may lie off the origin: pycocotools' memory grows with its edges' length.
MAX_SIDE = 100_000
Segmentation = list | dict  # polygons, one run-length mask or a list of them


def encoded_or_damaged(segmentation: Segmentation | None, size: tuple[int, int]) -> RLE | None:
    """Return the mask of `encode_segmentation` at `size` (H, W).

    It is None if there is no segmentation, and DAMAGED_RLE if it cannot be encoded.
    """
    if not segmentation:
        return None
    try:
        return encode_segmentation(segmentation, *size)
    except ValueError:
        return DAMAGED_RLE


def union(masks: Sequence[RLE | None], size: tuple[int, int]) -> RLE | None:
    """Return the union of masks, empty of none; or the first of them that cannot be read.

    Args:
        size: (H, W) of the union of none.
    """
    for mask in masks:
        if mask is None or mask is DAMAGED_RLE:
            return mask
    if len({tuple(mask["size"]) for mask in masks}) > 1:
        return DAMAGED_RLE
    return coco.merge(list(masks)) if masks else dict(counts=[math.prod(size)], size=list(size))


def encode_segmentation(segmentation: Segmentation, height: int, width: int) -> RLE:
    """Encode the union of polygons [x, y, x, y, ..] or run-length masks in pycocotools' form.

    Args:
        segmentation: a list of polygons, one {"counts", "size"} or a list of them.
        height, width: of the image that polygons lie in; run-length masks state their own.

    Raises:
        ValueError: neither; see `is_polygon` and `rle_runs`.
    """
    shapes = segmentation if isinstance(segmentation, list) else [segmentation]
    if shapes and all(
        isinstance(shape, dict) and {"counts", "size"} <= shape.keys() for shape in shapes
    ):
        return coco.merge([compress(shape) for shape in shapes])
    sides = all(type(n) is int and 0 < n <= MAX_SIDE for n in (height, width))
    if not shapes or not sides or height * width > MAX_PIXELS or not all(map(is_polygon, shapes)):
        raise ValueError(f"no polygons of an image of {height} x {width}")
    return coco.merge(coco.frPyObjects(shapes, height, width))


def is_polygon(polygon: list[float]) -> bool:
    """Return whether `polygon` is [x, y, x, y, ..] of 3 points or more near the origin."""
    return (
        isinstance(polygon, list)
        and len(polygon) >= 6
        and len(polygon) % 2 == 0
        and all(type(n) in (int, float) and abs(n) <= MAX_SIDE for n in polygon)
    )
