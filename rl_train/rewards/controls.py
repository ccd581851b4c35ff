"""Rewards that cannot teach what a task's own do, in their place (--control).

What the task measures stays measured and logged; the control is one component more, and the only
one that counts. Letters: B samples, G generations, N = B*G rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import interpolate

from rl_train.rewards.components import combine
from rl_train.rewards.custom import BadReward
from rl_train.rewards.meteor import meteor, tokenize
from rl_train.types import Batch, Outcome, Rollout

CONTROLS = ("none", "shuffled", "constant", "length", "fixed", "other")
COMPONENT = "control"


class Control:
    """One of CONTROLS, which decides what of a task's outcome counts.

    Args:
        seed: of the run; caption: the one that "fixed" wants, whatever the image.
    """

    def __init__(self, kind: str = "none", seed: int = 0, caption: str = ""):
        self.kind, self.seed, self.caption = kind, seed, caption

    def __call__(
        self, task, rollout: Rollout, outcome: Outcome, turn: tuple[int, int]
    ) -> tuple[Outcome, dict[str, float]]:
        """(the outcome, with the control's component; the weights of the components that count).

        A row that the task did not score is not scored either. "fixed" and "other" ask the task
        to judge the same answers once more, as if they were to another caption and region; but
        where it is the answer that describes, "fixed" is METEOR, since no caption is judged there.

        Args:
            outcome: `task.judge(rollout)`.
            turn: (step, number of the task); with the seed and a sample's index all that the order
                of "shuffled" follows from.

        Raises:
            BadReward: a function of the user's own has the control's name.
        """
        if self.kind == "none":
            return outcome, task.weights
        if COMPONENT in outcome.rewards:
            raise BadReward(f"--reward: {COMPONENT} is --control's component, rename the function")
        reward = combine(outcome.rewards, task.weights)  # (N,)
        if self.kind == "shuffled":  # unscored rows (NaN) move too
            order = (self.seed, *turn)
            made = shuffled(reward, rollout.num_generations, order, rollout.batch.index)
        else:
            made = torch.where(reward.isnan(), torch.nan, self.made(task, rollout, outcome))
        rewards = outcome.rewards | {COMPONENT: made}
        return replace(outcome, rewards=rewards), {COMPONENT: 1.0}

    def made(self, task, rollout: Rollout, outcome: Outcome) -> torch.Tensor:
        """(N,) of the control, also of rows that the task did not score."""
        if self.kind == "constant":
            return torch.ones(len(rollout))
        if self.kind == "length":
            return length(rollout, outcome)
        if self.kind == "fixed" and not outcome.replies:
            return meteor([self.caption] * len(rollout), rollout.texts)
        if self.kind == "fixed":
            batch = replace(rollout.batch, captions=[self.caption] * len(rollout.batch))
        else:
            batch = of_the_next(rollout.batch)
        judged = task.judge(replace(rollout, batch=batch))
        return combine(judged.rewards, task.weights)


def shuffled(
    rewards: torch.Tensor, num_generations: int, seed: tuple, indices: list[int]
) -> torch.Tensor:
    """(N,) rewards in another order inside each group.

    Args:
        seed, indices: the order of group i follows from seed and indices[i], its sample, alone.
    """
    orders = [
        group[np.random.default_rng([*seed, index]).permutation(num_generations)]
        for group, index in zip(rewards.split(num_generations), indices)
    ]
    return torch.cat(orders)


def length(rollout: Rollout, outcome: Outcome) -> torch.Tensor:
    """(N,) how near the size of each answer is to the mean size of the batch's true ones.

    -|words - n| / n, n of the true captions; where the teacher replies the mask is the answer, and
    its size the share of the image, n of the true regions.
    """
    if outcome.replies:
        sizes, true = areas(outcome.masks), areas(rollout.batch.masks)
    else:
        sizes, true = words(rollout.texts), words(rollout.batch.captions)
    n = true.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return -(sizes - n).abs() / n


def words(texts: Sequence[str]) -> torch.Tensor:
    return torch.tensor([len(tokenize(text)) for text in texts], dtype=torch.float32)


def areas(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([mask.float().mean().item() for mask in masks])


def of_the_next(batch: Batch) -> Batch:
    """The batch with region and caption of each sample's right neighbour, the last's of the first.

    Regions are resized to the image, by nearest pixel. Neighbours are new in each epoch, whose
    order is random (`data.loader.StepSampler`), so that nothing else need be drawn.

    Raises:
        ValueError: it holds one sample.
    """
    if len(batch) < 2:
        raise ValueError("--control other: a batch of one sample has no other, see --batch_size")
    masks, captions = ([*values[1:], values[0]] for values in (batch.masks, batch.captions))
    regions = [resized(mask, size) for mask, size in zip(masks, batch.sizes)]
    return replace(batch, masks=regions, captions=captions)


def resized(mask: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The mask (h, w) bool as (H, W) of `size`, each pixel from its nearest one."""
    if tuple(mask.shape) == size:
        return mask
    return interpolate(mask[None, None].float(), size, mode="nearest-exact")[0, 0] > 0
