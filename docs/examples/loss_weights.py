r"""Both loops with loss weights by reward variance: one whose rewards hardly differ counts less.

    PYTHONPATH=docs/examples python -m rl_train.train \
        --tasks loss_weights:Loop1 loss_weights:Loop2 ..

In the advantages the spread is divided out, so that a group whose rewards differ by rounding or by
chance pulls as hard as any. Here the weight of a loop's loss is its own times std / (std + HALF),
std the mean of its groups' over all ranks: of this batch alone, so that a resumed run is the same.
With --gradient_accumulation_steps it is that of the step's last batch.
"""

from dataclasses import replace

import torch

from rl_train.distributed.process_group import all_sum
from rl_train.grpo import group_std
from rl_train.rewards.combine import combine
from rl_train.rollout import RewardOutput
from rl_train.tasks import CaptionMaskCaption, MaskCaptionMask

HALF = 0.05  # the std at which half of the weight is left


class BySpread:
    def rewards(self, rollout) -> RewardOutput:
        outcome = super().rewards(rollout)
        std = group_std(
            combine(outcome.rewards, self.reward_weights), rollout.num_generations
        )  # (B,)
        spread = all_sum(dict(std=std.sum().item(), groups=len(std)))
        std = spread["std"] / spread["groups"]
        self.loss_weight = self.base_weight * std / (std + HALF)
        logged = outcome.rewards | {"loss_weight": torch.full((len(rollout),), self.loss_weight)}
        return replace(outcome, rewards=logged)


class Loop1(BySpread, MaskCaptionMask):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.base_weight = options.weight


class Loop2(BySpread, CaptionMaskCaption):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.base_weight = options.weight
