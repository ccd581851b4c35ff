"""What every reader does alike: make a sample, count what it read, number the images."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rl_train.data.errors import DamagedSample
from rl_train.data.images import DAMAGED, decode_image
from rl_train.data.masks import BAD_MASK, LOST_MASK, decode_mask, mask_size, resize_nearest
from rl_train.data.text import clean_caption


@dataclass
class Counts:
    """What opening a data set read."""

    rows: int = 0
    skipped: Counter = field(default_factory=Counter)  # {reason: regions, or rows without any}
    resized_masks: int = 0  # of the kept regions, of another size than their image

    def report(self, num_kept: int) -> dict:
        """The counts by name, and the number of regions "kept"."""
        return {"kept": num_kept, **vars(self), "skipped": dict(self.skipped)}


def read_sample(read, rle: dict | None, caption: str, category: str, image_id: str) -> dict:
    """dict(image PIL RGB, mask (H, W) bool of its `mask_size`, caption, category, image_id: str).

    The caption is cleaned of special tokens; a mask of another size is resized to it by nearest
    pixel. Images are never rotated (EXIF): masks belong to the stored pixels.

    Args:
        read: function that returns the encoded image; rle: None = the whole image is the region.

    Raises:
        DamagedSample: the image or the mask does not decode, or no pixel is left of the mask.
    """
    try:
        image = decode_image(read())
    except DAMAGED as error:
        raise DamagedSample(image_id, "damaged image") from error
    mask = read_mask(rle, mask_size(image.height, image.width), image_id)
    text = clean_caption(caption)
    return dict(image=image, mask=mask, caption=text, category=category, image_id=image_id)


def read_mask(rle: dict | None, size: tuple[int, int], image_id: str) -> np.ndarray:
    """The mask at `size` (H, W), bool, without its image. Raises DamagedSample: `read_sample`."""
    try:
        mask = np.ones(size, dtype=bool) if rle is None else decode_mask(rle)
    except ValueError as error:  # it was good when the data set was opened
        raise DamagedSample(image_id, BAD_MASK) from error
    if mask.shape != size:
        mask = resize_nearest(mask, *size)
    if not mask.any():
        raise DamagedSample(image_id, LOST_MASK)
    return mask


def number_images(keys: np.ndarray) -> np.ndarray:
    """(n,) int64 number of each sample's image, by first appearance, from the image keys (n,)."""
    _, first, image = np.unique(keys, return_index=True, return_inverse=True)
    return first.argsort().argsort()[image]
