"""The other regions of a sample's image, which tell whether a mask lies on the right object."""

import numpy as np
from torch.utils.data import Subset

from rl_train.data.errors import DamagedSample

OTHER_PIXELS = 2**26  # of a sample's other masks together, a byte each; 64 masks of 1024 x 1024


def whole(dataset) -> tuple[object, np.ndarray]:
    """(the data set behind a `Subset` of it, or of one, or itself; the place there of each)."""
    index = np.arange(len(dataset))
    while isinstance(dataset, Subset):
        index, dataset = np.asarray(dataset.indices)[index], dataset.dataset
    return dataset, index


def image_keys(dataset) -> np.ndarray:
    """(n,) key of each sample's image."""
    dataset, index = whole(dataset)
    return dataset.image_keys[index]


class OtherRegions:
    """The masks of the other regions of a sample's image, in the whole of its data set.

    Of a `Subset` that is the data set behind it: a region that is not trained on or not measured
    is in the picture all the same.

    Args:
        dataset: a region data set, with `image_keys` and `mask`, or a Subset of one.
    """

    def __init__(self, dataset):
        self.dataset, self.index = whole(dataset)
        self.keys = self.dataset.image_keys
        self.order = self.keys.argsort(kind="stable")
        self.sorted_keys = self.keys[self.order]

    def __call__(self, i: int, mask: np.ndarray) -> np.ndarray:
        """(K, H, W) bool masks of the K other regions of sample i's image, at its `mask`'s size.

        Each once, also where it has several captions. A damaged one is left out, and of more than
        OTHER_PIXELS the last ones are.
        """
        place = self.index[i]
        first, last = (
            np.searchsorted(self.sorted_keys, self.keys[place], side) for side in ("left", "right")
        )
        seen, others = {mask.tobytes()}, []
        for other in self.order[first:last].tolist():
            if (len(others) + 1) * mask.size > OTHER_PIXELS:
                break
            try:
                found = np.ascontiguousarray(self.dataset.mask(other, mask.shape))
            except DamagedSample:  # it was good when the data set was opened
                continue
            if found.tobytes() not in seen:
                seen.add(found.tobytes())
                others.append(found)
        return np.stack(others) if others else np.zeros((0, *mask.shape), dtype=bool)
