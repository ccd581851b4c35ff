"""Referring segmentation: the policy answers a phrase with a mask, rewarded by the true mask.

The direct task beside loop 2: the same question and action, and no teacher.
"""

from dataclasses import dataclass

from rl_train.config.flags import WEIGHT, flag
from rl_train.rewards import mask_iou
from rl_train.rewards.boxes import centre_closeness, mask_box_iou
from rl_train.rollout import RewardOutput, Rollout
from rl_train.tasks.base import TaskContext
from rl_train.tasks.mask_answers import FORM_REWARDS, MaskAnswers, MaskOptions


class Referring(MaskAnswers):
    """Phrase -> mask, with the IoU of the sampled mask with the true one as its reward."""

    name, takes_no_target = "referring", True
    reward_components = ("iou", "box_iou", "centre", *FORM_REWARDS)

    @dataclass(frozen=True)
    class Options(MaskOptions):
        weight: float = flag(
            1.0, "weight of referring's loss", name="referring_weight", type=WEIGHT
        )

    def __init__(self, options: Options, context: TaskContext):
        super().__init__(options, context)
        self.set_reward_weights({"iou": 1.0})

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return {"iou", "box_iou", "centre": (N,)} of the sampled masks with the true ones.

        The last two are computed if --reward_weights gives them a weight: the IoU of the masks'
        boxes and the closeness of their centres. See `add_form_rewards` for further ones and for
        phrases that name nothing.
        """
        latents, targets = rollout.latents, self.true_masks(rollout)
        rewards = {"iou": mask_iou(latents.masks, targets)}
        if "box_iou" in self.weighted_components:
            rewards["box_iou"] = mask_box_iou(latents.masks, targets)
        if "centre" in self.weighted_components:
            rewards["centre"] = centre_closeness(latents.masks, targets)
        return RewardOutput(
            self.add_form_rewards(rollout, rewards),
            latents.masks,
            targets,
            self.questions(rollout),
            mask_confidence=latents.confidence,
        )
