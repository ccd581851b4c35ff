"""The records that data, policies and tasks hand to each other.

Letters: B samples, G generations, N = B*G rows (row i*G+j answers sample i), T tokens, C LLM width.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from rl_train.points.answers import Answer


@dataclass
class Batch:
    """B samples of a region dataset, and what the policy's model needs of them."""

    index: list[int]  # position of each sample in the dataset (of the stand-in, for a damaged one)
    masks: list[torch.Tensor]  # (H, W) bool, at the image's own size
    captions: list[str]
    image_ids: list[str]
    damaged: list[str]  # "image_id: reason" of each sample that another one stands in for
    inputs: object  # made by the policy's `inputs.collate`; nobody but the policy looks inside
    # (K, H, W) bool masks of the K other regions of each image, with --other_regions
    others: list[torch.Tensor] | None = None
    regions_per_image: int = 1  # samples that may follow each other about one image

    def __len__(self):
        return len(self.index)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(H, W) of each image."""
        return [tuple(mask.shape) for mask in self.masks]


class Inputs(Protocol):
    """What turns samples into a model's inputs: `policy.inputs(..)`. Its copies run in workers.

    A sample is dict(image PIL RGB, mask (H, W) bool ndarray, caption, category, image_id).
    """

    def check(self, sample: dict):
        """Raise DamagedSample if the sample does not fit the model."""

    def prepare(self, sample: dict) -> object:
        """What the model needs of one sample: the costly work."""

    def collate(self, prepared: list) -> object:
        """The model's inputs of a batch, from what `prepare` made of each sample."""


@dataclass
class Rollout:
    """N answers of a policy to the prompts of a batch, as they were sampled.

    ids, valid and stopped are on the CPU: what is laid out by them is so without asking the GPU.
    """

    batch: Batch
    features: object  # what the policy made of the batch's images, shared by all rows and roles
    prompts: object  # N prompts, the policy's own
    texts: list[str]  # N answers, cut at the stop text
    num_generations: int
    ids: torch.Tensor  # (N, T)
    logp: torch.Tensor  # (N, T) under the weights that sampled
    valid: torch.Tensor  # (N, T) bool, up to and including the token that ends the answer
    stopped: torch.Tensor  # (N,) bool, False = cut at the length limit
    # (N, T, C) last hidden state at each token as input; any numbers from a row's last token on
    hidden: torch.Tensor
    action: object | None = None  # what the task's action drew beside the text

    def __len__(self):
        return len(self.texts)

    def of_rows(self, values: list) -> list:
        """The entry of each row's sample, of one list entry a sample."""
        return [values[row // self.num_generations] for row in range(len(self))]


@dataclass(frozen=True)
class Outcome:
    """What a task says of a rollout."""

    rewards: dict[str, torch.Tensor]  # {component: (N,)} on the CPU, NaN = could not be obtained
    masks: list[torch.Tensor]  # N (H, W) bool: what was judged, for pictures and guards
    replies: list[str] = field(default_factory=list)  # N texts of the teacher, if it was asked
    # Where answers must have a form: {reason: (N,) bool} of those that could not be read for it
    refused: dict[str, torch.Tensor] = field(default_factory=dict)
    # What a mask was drawn from (None of a refused answer), and without its negative points
    answers: list[Answer | None] = field(default_factory=list)
    masks_without: list[torch.Tensor] = field(default_factory=list)
