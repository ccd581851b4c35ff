"""What every reader does alike: make a sample, count what it read, number the images."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rl_train.data.errors import DamagedSample
from rl_train.data.images import DAMAGED, decode_image
from rl_train.data.masks import decode_mask, resize_nearest
from rl_train.data.text import clean_caption


@dataclass
class Counts:
    """What opening a data set read."""

    rows: int = 0
    skipped: Counter = field(default_factory=Counter)  # {reason: regions, or rows without any}
    resized: int = 0  # masks of the kept regions, of another size than their image

    def report(self, num_kept: int) -> dict:
        """{"rows": read, "kept": regions, "skipped": {reason: number}, "resized_masks": of the
        kept}."""
        return {
            "rows": self.rows,
            "kept": num_kept,
            "skipped": dict(self.skipped),
            "resized_masks": self.resized,
        }


def read_sample(read, rle: dict | None, caption: str, category: str, image_id: str) -> dict:
    """dict(image PIL RGB, mask (H, W) bool of the image's size, caption, category, image_id).

    The caption is cleaned; a mask of another size is resized to its image by nearest pixel.

    Args:
        read: function that returns the encoded image; rle: None = the whole image is the region.

    Raises:
        DamagedSample: the image does not decode.
    """
    try:
        image = decode_image(read())
    except DAMAGED as error:
        raise DamagedSample(image_id, "damaged image") from error
    size = (image.height, image.width)
    mask = np.ones(size, dtype=bool) if rle is None else decode_mask(rle)
    if mask.shape != size:
        mask = resize_nearest(mask, *size)
    return {
        "image": image,
        "mask": mask,
        "caption": clean_caption(caption),
        "category": category,
        "image_id": image_id,
    }


def number_images(keys: np.ndarray) -> np.ndarray:
    """(n,) int64 number of each sample's image, by first appearance, from the image keys (n,)."""
    _, first, image = np.unique(keys, return_index=True, return_inverse=True)
    return first.argsort().argsort()[image]
