"""Who answers: the protocol, the families of models that are policies, what all of them share."""

from typing import Protocol

import torch

from rl_train.finite import Watch
from rl_train.types import Batch, Rollout


class Policy(Protocol):
    """What the loop knows of a policy; a task also knows what its own family can be asked."""

    family: str  # its name in `families.FAMILIES`
    model: torch.nn.Module
    trainable: dict[str, torch.nn.Parameter]  # float32, by the model's own names
    device: torch.device
    encoders_train: bool  # whether `encode` has a gradient, if that is on
    watch: Watch  # which of its outputs, in any role, had a NaN or infinity

    def group_of(self, name: str) -> str:
        """The group that a trainable belongs to, by which gradient norms are logged."""

    def inputs(self, max_new_tokens: int, max_caption_length: int | None = None):
        """What prepares and collates samples in the loader's workers, without the model."""

    def encode(self, batch: Batch) -> object:
        """Features of a batch's images, before what trains: shared by rows, tasks and roles."""

    def sample(
        self, batch, features, prompts, num_generations, max_new_tokens, uniforms=None
    ) -> Rollout:
        """G answers to each prompt, by `uniforms` (N, T); without them greedily."""

    def score(self, rollout: Rollout, rows: slice = slice(None), entropy_gradient=False):
        """.logp (n, T) with gradient and .entropy of n rows' sampled tokens, by a full forward.

        The entropy carries gradient if asked.
        """

    def save_merged(self, folder, dtype: torch.dtype | None = None):
        """Write the base with the LoRA merged in, in its published layout; ends its use."""

    def picture(self, batch: Batch, sample: int):
        """The PIL image of one sample, for people to look at."""
