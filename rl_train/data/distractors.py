"""The other regions of a sample's image, to check that a mask lies on the right object."""

import numpy as np
from torch.utils.data import Subset

from rl_train.data.base import RegionDataset
from rl_train.data.errors import DamagedSample

# Bytes (one a pixel) that the masks of a sample may take: 64 masks of 1024 x 1024.
MAX_DISTRACTOR_PIXELS = 2**26


def unwrap_subset(dataset: RegionDataset | Subset) -> tuple[RegionDataset, np.ndarray]:
    """Return (the data set behind nested `Subset`s, (n,) the index there of each sample)."""
    index = np.arange(len(dataset))
    while isinstance(dataset, Subset):
        index, dataset = np.asarray(dataset.indices)[index], dataset.dataset
    return dataset, index


class DistractorMasks:
    """The masks of the other regions of a sample's image, in the whole of its data set.

    For a `Subset`, use the full data set: a region outside of the subset is in the picture too.
    """

    def __init__(self, dataset: RegionDataset | Subset):
        self.dataset, self.index = unwrap_subset(dataset)

    def __call__(self, i: int, mask: np.ndarray) -> np.ndarray:
        """Return (K, H, W) bool masks of the K other regions of sample i's image.

        They have the size of its `mask`. A mask with several captions is there once. Damaged masks
        are left out, and so are the last ones beyond MAX_DISTRACTOR_PIXELS.
        """
        keys = self.dataset.image_keys  # (n,)
        masks = {mask.tobytes(): mask}  # by content: without two alike
        for other in np.flatnonzero(keys == keys[self.index[i]]).tolist():
            if len(masks) * mask.size > MAX_DISTRACTOR_PIXELS:
                break
            try:
                region = np.ascontiguousarray(self.dataset.mask(other, mask.shape))
            except DamagedSample:  # it was good when the data set was opened
                continue
            if region.any():  # empty where a caption names nothing
                masks.setdefault(region.tobytes(), region)
        return np.stack(list(masks.values()))[1:]
