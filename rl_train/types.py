"""What passes between data, policy and tasks."""

from dataclasses import dataclass
from typing import Protocol

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


class Inputs(Protocol):
    """What turns samples into a model's inputs: `policy.inputs`. Its copies run in the workers.

    A sample is dict(image PIL RGB, mask (H, W) bool ndarray, caption, category, image_id).
    """

    def check(self, sample: dict):
        """Raise DamagedSample if the sample does not fit the model."""

    def prepare(self, sample: dict) -> object:
        """What the model needs of one sample: the costly work."""

    def collate(self, prepared: list) -> object:
        """The model's inputs of a batch, from what `prepare` made of each sample."""
