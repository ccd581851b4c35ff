"""Loop 2, caption -> mask -> caption': the policy samples a mask, the teacher describes it."""

from dataclasses import dataclass

from rl_train.config.flags import WEIGHT, flag
from rl_train.policies.sa2va_queries import caption_likelihood, describe, region_grids
from rl_train.rewards import mask_iou
from rl_train.rewards.captions import CAPTION_REWARDS, caption_rewards
from rl_train.rollout import RewardOutput, Rollout
from rl_train.tasks.base import TaskContext
from rl_train.tasks.mask_answers import FORM_REWARDS, MaskAnswers, MaskOptions
from sa2va_hf.to_device import to_device


class CaptionMaskCaption(MaskAnswers):
    """Loop 2, with the agreement of the teacher's caption of a mask with the prompt's as reward."""

    name = "loop2"
    asks_teacher = takes_no_target = True
    reward_components = (*CAPTION_REWARDS, "likelihood", "iou", *FORM_REWARDS)

    @dataclass(frozen=True)
    class Options(MaskOptions):
        weight: float = flag(
            1.0,
            "weight of loop 2's loss; 0 leaves the loop out",
            name="loop2_weight",
            aliases=("caption_to_mask_weight",),
            type=WEIGHT,
        )

    def __init__(self, options: Options, context: TaskContext):
        super().__init__(options, context)
        self.weigh({"meteor": 1.0})

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return {"meteor", "iou", "likelihood", ..: (N,)} of the sampled masks.

        `caption_rewards` compare the teacher's caption of each mask with the prompt's caption; the
        likelihood is the teacher's, of the prompt's caption as a description of the mask. What has
        no weight is not computed, and the teacher is asked for what is. Only the IoU with the
        region is always measured; the reward sees it with a weight of --reward_weights. A row that
        the judge gives NaN is not scored at all. See `complete` for further ones and for captions
        that name nothing.
        """
        context, policy = self.context, self.context.policy
        captions, masks = rollout.of_rows(rollout.batch.captions), rollout.latents.masks
        features, image, tokens = (
            rollout.features,
            rollout.prompts.image_index,
            context.max_reply_tokens,
        )
        has_replies = bool(set(self.components) & set(CAPTION_REWARDS) or context.user_rewards)
        has_likelihood, rewards, replies = "likelihood" in self.components, {}, []
        if has_replies or has_likelihood:
            # Computed once, for captions and likelihoods.
            grids = region_grids(policy, masks)
            with context.roles.use("teacher"):
                if has_replies:
                    replies = describe(policy, features, image, masks, tokens, grids)
                if has_likelihood:  # a GPU still computes it during METEOR
                    rewards["likelihood"] = caption_likelihood(
                        policy, features, image, masks, captions, tokens, grids
                    )
        targets = rollout.of_rows([to_device(mask, policy.device) for mask in rollout.batch.masks])
        if has_replies:
            rewards |= caption_rewards(self.components, captions, replies, context)
        rewards["iou"] = mask_iou(masks, targets)
        return RewardOutput(
            self.complete(rollout, rewards),
            masks,
            targets,
            self.questions(rollout),
            replies=replies,
            mask_confidence=rollout.latents.confidence,
        )
