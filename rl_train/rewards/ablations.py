"""Ablation rewards (--ablation_reward): stand-ins that cannot teach what a task's reward does.

The task's own components stay measured and logged. The ablation is one more component, and the only
one that counts. Letters: B samples, G generations, N = B*G rows.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from rl_train.rewards.combine import combine
from rl_train.rewards.meteor import meteor, tokenize
from rl_train.rollout import Batch, RewardOutput, Rollout

ABLATION_REWARDS = ("shuffled", "constant", "length", "fixed", "other")
COMPONENT = "ablation_reward"


class Task(Protocol):
    """Interface of a task: the members of `tasks.base.Task` that an ablation uses."""

    reward_weights: dict[str, float]  # of the reward components that count

    def rewards(self, rollout: Rollout) -> RewardOutput: ...


class AblationReward:
    """Replacement of a task's reward by one of ABLATION_REWARDS.

    Args:
        name: of ABLATION_REWARDS.
        seed: of the run.
        caption: rewarded by "fixed", whatever the image.
    """

    def __init__(self, name: str, seed: int = 0, caption: str = ""):
        self.name, self.seed, self.caption = name, seed, caption

    def __call__(
        self, task: Task, rollout: Rollout, outcome: RewardOutput, step: tuple[int, int]
    ) -> RewardOutput:
        """Return the outcome with COMPONENT, the ablation's reward, among its rewards.

        Rows that the task did not score stay NaN. "fixed" and "other" let the task score the same
        rollout against another caption and region. Without a reply that describes the mask, "fixed"
        is METEOR of the completion itself.

        Args:
            outcome: `task.rewards(rollout)`.
            step: (step, number of the task), which seed the order of "shuffled".
        """
        reward = combine(outcome.rewards, task.reward_weights)  # (N,)
        if self.name == "shuffled":  # unscored rows (NaN) move too
            seed, indices = (self.seed, *step), rollout.batch.index
            values = shuffled(reward, rollout.num_generations, seed, indices)
        else:
            values = torch.where(reward.isnan(), torch.nan, self.values(task, rollout, outcome))
        return replace(outcome, rewards=outcome.rewards | {COMPONENT: values})

    def values(self, task: Task, rollout: Rollout, outcome: RewardOutput) -> torch.Tensor:
        """Return the ablation's reward of all N rows, also of those that the task did not score."""
        if self.name == "constant":
            return torch.ones(len(rollout))
        if self.name == "length":
            return length(rollout, outcome)
        captions = [self.caption] * len(rollout)
        if self.name == "fixed" and not outcome.replies:
            return meteor(captions, rollout.texts)
        if self.name == "fixed":
            batch = replace(rollout.batch, captions=captions[: len(rollout.batch)])
        else:
            batch = shift_by_one(rollout.batch)
        # The same answers, scored against another truth: the teacher is asked again.
        return combine(task.rewards(replace(rollout, batch=batch)).rewards, task.reward_weights)


def shuffled(
    rewards: torch.Tensor, num_generations: int, seed: tuple[int, ...], indices: list[int]
) -> torch.Tensor:
    """Return rewards (N,) in another order inside each group.

    Args:
        seed, indices: the order of group i follows from seed and indices[i], its sample, alone.
    """
    groups = [
        group[np.random.default_rng([*seed, index]).permutation(num_generations)]
        for group, index in zip(rewards.split(num_generations), indices)
    ]
    return torch.cat(groups)


def length(rollout: Rollout, outcome: RewardOutput) -> torch.Tensor:
    """Return -|size - n| / n of each row (N,), n the mean size of the batch's true values.

    The size of a caption is its number of words. Where the teacher replies, it is the fraction of
    the image that the row's mask covers.
    """
    if outcome.replies:
        sizes, true_sizes = (
            torch.tensor([mask.float().mean().item() for mask in masks])
            for masks in (outcome.masks, rollout.batch.masks)
        )
    else:
        sizes, true_sizes = (
            torch.tensor([len(tokenize(text)) for text in texts], dtype=torch.float32)
            for texts in (rollout.texts, rollout.batch.captions)
        )
    # Above 0, so that empty masks give no division by it.
    n = true_sizes.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return -(sizes - n).abs() / n


def shift_by_one(batch: Batch) -> Batch:
    """Return the batch with the mask and caption of each sample's right neighbour.

    The last sample has those of the first. Masks are resized to the image, by nearest pixel.
    Neighbours are new in each epoch, whose order is random (`data.loader.StepSampler`).
    """
    masks, captions = ([*values[1:], values[0]] for values in (batch.masks, batch.captions))
    resized = [
        torch.nn.functional.interpolate(mask[None, None].float(), size, mode="nearest-exact")
        for mask, size in zip(masks, batch.sizes)
    ]  # (1, 1, H, W) each
    return replace(batch, masks=[mask[0, 0] > 0 for mask in resized], captions=captions)
