"""Loop 2, caption -> mask -> caption': the policy samples a mask, the teacher describes it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_train.config.flags import WEIGHT, flag
from rl_train.policies.sa2va_queries import caption_likelihood, describe_later, region_grids
from rl_train.rewards import mask_iou
from rl_train.rewards.captions import CAPTION_REWARDS, caption_rewards
from rl_train.rollout import RewardOutput, Rollout
from rl_train.tasks.base import TaskContext
from rl_train.tasks.mask_answers import FORM_REWARDS, MaskAnswers, MaskOptions


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
        self.set_reward_weights({"meteor": 1.0})

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return {"meteor", "iou", "likelihood", ..: (N,)} of the sampled masks.

        `caption_rewards` compare the teacher's caption of each mask with the prompt's caption; the
        likelihood is the teacher's, of the prompt's caption as a description of the mask. What has
        no weight is not computed. Only the IoU with the region is always measured; the reward sees
        it with a weight of --reward_weights. A row that the judge gives NaN is not scored at all.
        See `add_form_rewards` for further ones and for captions that name nothing.
        """
        read_captions, likelihood = self.teacher_answers(rollout)
        return self.compare(rollout, read_captions(), likelihood)

    def ask_teacher(self, rollout: Rollout) -> tuple[Callable[[], list[str]], torch.Tensor | None]:
        """Ask the teacher for captions of the N sampled masks, and the prompts' likelihoods (N,).

        Returns:
            a function that returns the captions, and the likelihoods; [] and None if no reward
            needs them.
        """
        context, policy, masks = self.context, self.context.policy, rollout.latents.masks
        features, image = rollout.features, rollout.prompts.image_index
        tokens, likelihood = context.max_reply_tokens, None
        read_captions: Callable[[], list[str]] = list  # [] if no reward needs them
        compares_captions = set(self.weighted_components) & set(CAPTION_REWARDS)
        needs_replies = bool(compares_captions or context.user_rewards)
        needs_likelihood = "likelihood" in self.weighted_components
        if needs_replies or needs_likelihood:
            grids = region_grids(policy, masks)  # once, for captions and likelihoods
            with context.roles.use("teacher"):
                if needs_replies:
                    read_captions = describe_later(
                        policy, features, image, grids, len(masks), tokens
                    )
                if needs_likelihood:  # a GPU still computes it during METEOR
                    captions = rollout.repeat_for_rows(rollout.batch.captions)
                    likelihood = caption_likelihood(
                        policy, features, image, masks, captions, tokens, grids
                    )
        return read_captions, likelihood

    def compare(
        self, rollout: Rollout, replies: list[str], likelihood: torch.Tensor | None
    ) -> RewardOutput:
        """Compare the teacher's captions with the prompts', and the masks with the regions."""
        captions, targets = (
            rollout.repeat_for_rows(rollout.batch.captions),
            self.true_masks(rollout),
        )
        masks, rewards = rollout.latents.masks, {}
        if likelihood is not None:
            rewards["likelihood"] = likelihood
        if replies:
            rewards |= caption_rewards(self.weighted_components, captions, replies, self.context)
        rewards["iou"] = mask_iou(masks, targets)
        return RewardOutput(
            self.add_form_rewards(rollout, rewards),
            masks,
            targets,
            self.questions(rollout),
            replies=replies,
            mask_confidence=rollout.latents.confidence,
        )
