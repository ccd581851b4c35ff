"""Loop 1, mask -> caption -> mask': the policy describes a region, the teacher finds it."""

from dataclasses import dataclass

import torch

from rl_train.config.flags import WEIGHT, flag
from rl_train.data.text import phrase
from rl_train.policies.sa2va_queries import RowMasks, segment, segment_generated, truncate_captions
from rl_train.rewards import mask_iou
from rl_train.rewards.captions import CAPTION_REWARDS, JUDGE_SHARES, caption_rewards
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks.base import Task, TaskContext
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import DESCRIBE
from sa2va_hf.to_device import to_device


class MaskCaptionMask(Task):
    """Loop 1, with the IoU of the mask that the teacher finds by a caption as its reward."""

    name = "loop1"
    family, asks_teacher = "sa2va", True
    reward_components = ("iou", *CAPTION_REWARDS)

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
        self.weigh({"iou": 1.0} | (JUDGE_SHARES if context.judges_by_default else {}))

    def prompts(self, batch: Batch, images: ImageFeatures) -> Prompts:
        """Return the question for a caption of each sample's region."""
        policy = self.context.policy
        return policy.describe_prompts(images, list(range(len(batch))), list(images.prompt_masks))

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return {"iou": (N,)} of region and mask by the teacher, at the image's own size.

        An empty caption scores 0 without asking the teacher; so does a reply without [SEG]. With
        --use_llm_judge or --reward_weights, `caption_rewards` count beside the IoU: they compare
        the sampled caption with the true one. A row that the judge gives NaN is not scored at all.
        If the IoU has no weight and the user no reward, the teacher is not asked, and pictures have
        the regions.
        """
        device = self.context.policy.device
        captions = rollout.of_rows(rollout.batch.captions)
        targets = rollout.of_rows([to_device(mask, device) for mask in rollout.batch.masks])
        found, rewards = RowMasks(targets, []), {}
        if "iou" in self.components or self.context.user_rewards:
            found = self.teacher_masks(rollout, targets)
            rewards["iou"] = mask_iou(found.masks, targets)
        rewards |= caption_rewards(self.components, captions, rollout.texts, self.context)
        return RewardOutput(
            rewards,
            found.masks,
            targets,
            [DESCRIBE] * len(rollout),
            mask_confidence=found.confidence or [0.0] * len(rollout),
        )

    def teacher_masks(self, rollout: Rollout, targets: list[torch.Tensor]) -> RowMasks:
        """Return the mask that the teacher finds by each of N captions, empty without a caption.

        Args:
            targets: N masks (H, W) of the masks' sizes.
        """
        context, policy = self.context, self.context.policy
        masks, confidence = [torch.zeros_like(target) for target in targets], [0.0] * len(targets)
        described = [row for row, text in enumerate(rollout.texts) if phrase(text)]
        image = [rollout.prompts.image_index[row] for row in described]
        # A sampled text may grow when it is encoded again, beyond the model's context.
        texts = truncate_captions(
            policy, [rollout.texts[row] for row in described], context.max_reply_tokens
        )
        features, tokens = rollout.features, context.max_reply_tokens
        with context.roles.use("teacher"):
            if self.options.teacher_answer == "forced":
                segmented = segment(policy, features, image, texts)
            else:
                segmented = segment_generated(policy, features, image, texts, tokens)
        for k, row in enumerate(described):
            masks[row], confidence[row] = segmented.masks[k], segmented.confidence[k]
        return RowMasks(masks, confidence)
