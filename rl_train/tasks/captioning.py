"""Region captioning: the policy describes a region, rewarded by the true caption.

The direct task beside loop 1: the same question, and no teacher.
"""

from dataclasses import dataclass

from rl_train.config.flags import WEIGHT, flag
from rl_train.rewards.captions import CAPTION_REWARDS, JUDGE_WEIGHTS, caption_rewards
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks.base import Task, TaskContext
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import DESCRIBE


class Captioning(Task):
    """Region -> caption, with METEOR of the sampled caption and the true one as its reward."""

    name = "captioning"
    family = "sa2va"
    reward_components = CAPTION_REWARDS

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(
            1.0, "weight of captioning's loss", name="captioning_weight", type=WEIGHT
        )
        trainable_modules = ("lora", "mlp1")

    def __init__(self, options: Options, context: TaskContext):
        self.options, self.context, self.loss_weight = options, context, options.weight
        self.set_reward_weights(JUDGE_WEIGHTS if context.judges_by_default else {"meteor": 1.0})

    def prompts(self, batch: Batch, features: ImageFeatures) -> Prompts:
        """Return the question for a caption of each sample's region."""
        policy = self.context.policy
        return policy.describe_prompts(
            features, list(range(len(batch))), list(features.prompt_masks)
        )

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return {component: (N,)} of `caption_rewards` against the true captions.

        No mask is answered: pictures and the user's rewards have the regions themselves.
        """
        captions = rollout.repeat_for_rows(rollout.batch.captions)
        rewards = caption_rewards(self.weighted_components, captions, rollout.texts, self.context)
        regions = rollout.repeat_for_rows(rollout.batch.masks)
        return RewardOutput(rewards, regions, regions, [DESCRIBE] * len(rollout))
