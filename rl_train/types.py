"""The records that pass between data, policy and tasks."""

from dataclasses import dataclass

import torch


@dataclass
class Batch:
    """B samples of a region dataset, and what the policy's model needs of them."""

    index: list[int]  # position of each sample in the dataset (of the stand-in, for a damaged one)
    masks: list[torch.Tensor]  # (H, W) bool, at the image's own size
    captions: list[str]
    image_ids: list[str]
    damaged: list[str]  # "image_id: reason" of each sample that another one stands in for
    inputs: object  # made by the policy's `inputs.collate`; nobody but the policy looks inside

    def __len__(self):
        return len(self.index)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(H, W) of each image."""
        return [tuple(mask.shape) for mask in self.masks]
