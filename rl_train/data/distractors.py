"""The other regions of a sample's image, which tell whether a mask lies on the right object."""

import numpy as np
from torch.utils.data import Subset

from rl_train.data.base import RegionDataset
from rl_train.data.errors import DamagedSample

OTHER_PIXELS = 2**26  # of a sample's other masks together, a byte each; 64 masks of 1024 x 1024


def whole(dataset: RegionDataset | Subset) -> tuple[RegionDataset, np.ndarray]:
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
        self.dataset, self.index = whole(dataset)

    def __call__(self, i: int, mask: np.ndarray) -> np.ndarray:
        """Return (K, H, W) bool masks of the K other regions of sample i's image.

        They have the size of its `mask`. Each is there once, also where it has several captions. A
        damaged one is left out, and so are the last ones beyond OTHER_PIXELS.
        """
        keys = self.dataset.image_keys  # (n,)
        others = {mask.tobytes(): mask}  # without two alike
        for other in np.flatnonzero(keys == keys[self.index[i]]).tolist():
            if len(others) * mask.size > OTHER_PIXELS:
                break
            try:
                region = np.ascontiguousarray(self.dataset.mask(other, mask.shape))
            except DamagedSample:  # it was good when the data set was opened
                continue
            others.setdefault(region.tobytes(), region)
        return np.stack(list(others.values()))[1:]
