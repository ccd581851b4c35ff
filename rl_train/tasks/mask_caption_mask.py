"""Loop 1, mask -> caption -> mask': the policy describes a region, the teacher finds it."""

from dataclasses import dataclass

import torch

from rl_train.config.flags import WEIGHT, flag
from rl_train.policies.sa2va_queries import RowMasks, segment_model_captions
from rl_train.rewards import mask_iou
from rl_train.rewards.captions import CAPTION_REWARDS, JUDGE_WEIGHTS, caption_rewards
from rl_train.rewards.iou import ON_TARGET
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks.base import Task, TaskContext
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import DESCRIBE


class MaskCaptionMask(Task):
    """Loop 1, with the IoU of the mask that the teacher finds by a caption as its reward."""

    name = "loop1"
    family, asks_teacher = "sa2va", True
    mask_components = ("iou", ON_TARGET)  # those that need the teacher's mask
    reward_components = (*mask_components, *CAPTION_REWARDS)

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(
            1.0,
            "weight of loop 1's loss; 0 leaves the loop out",
            name="loop1_weight",
            aliases=("mask_to_caption_weight",),
            type=WEIGHT,
        )
        teacher_answer: str = flag(
            "forced",
            'how the teacher finds a caption\'s region. forced: its answer is "Sure, [SEG]", one '
            "forward pass; sampled: it answers greedily, and without [SEG] finds nothing",
            choices=["forced", "sampled"],
        )
        trainable_modules = ("lora", "mlp1")

    def __init__(self, options: Options, context: TaskContext):
        self.options, self.context, self.loss_weight = options, context, options.weight
        self.set_reward_weights({"iou": 1.0} | (JUDGE_WEIGHTS if context.judges_by_default else {}))

    def prompts(self, batch: Batch, features: ImageFeatures) -> Prompts:
        """Return the question for a caption of each sample's region."""
        policy = self.context.policy
        return policy.describe_prompts(
            features, list(range(len(batch))), list(features.prompt_masks)
        )

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return {"iou": (N,)} of region and mask by the teacher, at the image's own size.

        With --use_llm_judge or --reward_weights, `caption_rewards` count beside the IoU: they
        compare the sampled caption with the true one. A row that the judge gives NaN is not scored
        at all.
        """
        return self.compare(rollout, self.teacher_answers(rollout))

    def ask_teacher(self, rollout: Rollout) -> RowMasks | None:
        """Ask the teacher for a mask by each of N captions; None if no reward is measured by one.

        A caption without words has an empty mask and is not asked about; a reply without [SEG]
        gives an empty mask too.
        """
        by_mask = set(self.mask_components) & set(self.weighted_components)
        if not by_mask and not self.context.user_rewards:
            return None
        with self.context.roles.use("teacher"):
            return segment_model_captions(
                self.context.policy,
                rollout.features,
                rollout.prompts.image_index,
                rollout.texts,
                self.context.max_reply_tokens,
                forced=self.options.teacher_answer == "forced",
            )

    def compare(self, rollout: Rollout, teacher_masks: RowMasks | None) -> RewardOutput:
        """Compare the teacher's masks with the regions, and the captions with the true ones."""
        captions, targets = (
            rollout.repeat_for_rows(rollout.batch.captions),
            self.true_masks(rollout),
        )
        rewards = {}
        if teacher_masks is None:  # pictures have the regions
            teacher_masks = RowMasks(targets, torch.zeros(len(targets)))
        else:
            rewards["iou"] = mask_iou(teacher_masks.masks, targets)
        rewards |= caption_rewards(self.weighted_components, captions, rollout.texts, self.context)
        return RewardOutput(
            rewards,
            teacher_masks.masks,
            targets,
            [DESCRIBE] * len(rollout),
            mask_confidence=teacher_masks.confidence,
        )
