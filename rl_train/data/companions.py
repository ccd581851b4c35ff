"""Other regions of a sample's image, with their captions, as further questions about it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Subset

from rl_train.data.base import RegionDataset
from rl_train.data.distractors import unwrap_subset
from rl_train.data.errors import DamagedSample


@dataclass
class Companions:
    """Captions and masks (K, H, W) bool of K other regions of an image."""

    captions: list[str]
    masks: np.ndarray


class CompanionRegions:
    """Up to `count` other regions of a sample's image, of the samples that are trained on.

    They follow the sample in the data set, behind its last one from the first on. So each region of
    an image is as often a companion as any other.

    Args:
        check: of a sample, raises DamagedSample if its caption does not fit the model.
    """

    def __init__(self, dataset: RegionDataset | Subset, count: int, check: Callable[[dict], None]):
        self.count, self.check = count, check
        self.dataset, self.index = unwrap_subset(dataset)
        self.keys = self.dataset.image_keys[self.index]  # (n,)

    def __call__(self, i: int, sample: dict) -> Companions:
        """Return the companions of sample i, each with another caption and another mask.

        Masks have the size of the sample's. Damaged regions and captions that name nothing are left
        out.
        """
        mask = sample["mask"]
        captions, masks = [sample["caption"]], {mask.tobytes(): mask}
        same_image = np.flatnonzero(self.keys == self.keys[i])
        following = np.roll(same_image, -int(np.searchsorted(same_image, i)))[1:]
        for other in self.index[following].tolist():
            if len(captions) > self.count:
                break
            caption = self.dataset.caption(other)
            try:
                region = np.ascontiguousarray(self.dataset.mask(other, mask.shape))
                self.check(sample | dict(caption=caption, mask=region))
            except DamagedSample:
                continue
            if caption in captions or region.tobytes() in masks or not region.any():
                continue
            captions.append(caption)
            masks[region.tobytes()] = region
        return Companions(captions[1:], np.stack(list(masks.values()))[1:])
