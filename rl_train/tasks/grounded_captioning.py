"""Grounded captions (GCG): the policy describes the image, with a mask for each phrase."""

from dataclasses import dataclass

from rl_train.config.flags import WEIGHT, flag
from rl_train.evaluation import gcg_metrics
from rl_train.evaluation.gcg_metrics import caption_of, grounded_prompts
from rl_train.rewards import mask_iou, meteor
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks.base import TaskContext
from rl_train.tasks.mask_answers import MaskAnswers, MaskOptions
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import GROUNDED_CAPTION


class GroundedCaptioning(MaskAnswers):
    """Image -> caption with masks, rewarded by the true masks one by one and the true caption."""

    name = "gcg"
    reward_components = ("matched", "meteor", "iou")
    measure = staticmethod(gcg_metrics.measure)

    @dataclass(frozen=True)
    class Options(MaskOptions):
        weight: float = flag(1.0, "weight of gcg's loss", name="gcg_weight", type=WEIGHT)

    def __init__(self, options: Options, context: TaskContext):
        super().__init__(options, context)
        if options.think:
            raise ValueError("--think: is of segmentation, not of --tasks grounded_captioning")
        self.set_reward_weights({"matched": 1.0, "meteor": 1.0})

    def prompts(self, batch: Batch, features: ImageFeatures) -> Prompts:
        return grounded_prompts(self.context.policy, features)

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return {"matched", "meteor", "iou", "missing", "surplus": (N,)} of the answers.

        "matched" is the IoU of the sampled masks with the true ones, see `matched_rewards`, which
        counts "missing" and "surplus" ones too; "meteor" is of the caption without its tags, "iou"
        of the unions of the masks.
        """
        latents, targets = rollout.latents, self.true_masks(rollout)
        captions = [caption_of(text) for text in rollout.texts]
        rewards = dict(
            meteor=meteor(rollout.repeat_for_rows(rollout.batch.captions), captions),
            iou=mask_iou(latents.masks, targets),
        )
        return RewardOutput(
            self.add_form_rewards(rollout, rewards),
            latents.masks,
            targets,
            [GROUNDED_CAPTION] * len(rollout),
            mask_confidence=latents.confidence,
        )
