"""Loop 1, mask -> caption -> mask': the policy describes a region, the teacher finds it."""

from dataclasses import dataclass

import torch

from rl_train.data.text import phrase
from rl_train.flags import WEIGHT, flag
from rl_train.policies.segment_describe import askable, segment, segment_sampled
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.caption import JUDGE_WEIGHT, METEOR_WEIGHT, without_rows
from rl_train.rewards.custom import user_components, with_components
from rl_train.rewards.iou import hits
from rl_train.tasks.protocol import Context
from rl_train.types import Batch, Outcome, Rollout
from sa2va_hf.batches import Images, Prompts
from sa2va_hf.prompts import DESCRIBE
from sa2va_hf.transfer import send


class MaskCaptionMask:
    name = "loop1"
    family, asks_teacher, measure = "sa2va", True, None
    action = None

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "of loop 1's loss", name="mask_to_caption_weight", type=WEIGHT)
        teacher_answer: str = flag(
            "forced",
            'forced = "Sure, [SEG]" is put into the teacher\'s mouth, one forward; sampled = it '
            "answers greedily for itself, and without [SEG] finds nothing",
            choices=["forced", "sampled"],
        )
        trains = ("lora", "mlp1")

    def __init__(self, options: Options, context: Context):
        self.options, self.context, self.weight = options, context, options.weight
        self.weights = {"iou": 1.0} | ({"caption_reward": 1.0} if context.judge else {})
        self.weights |= {reward.name: reward.weight for reward in context.user_rewards}

    def prompts(self, batch: Batch, images: Images) -> Prompts:
        """The question for a caption of each sample's region."""
        policy = self.context.policy
        return policy.describe_prompts(images, list(range(len(batch))), list(images.grids))

    def judge(self, rollout: Rollout) -> Outcome:
        """{"iou": (N,)} of the region and what the teacher finds, at the image's own size.

        An empty caption scores 0 without asking the teacher, an answer without [SEG] does too. With
        --use_llm_judge "caption_reward", the caption reward of the sampled caption against the
        true one, counts beside it; its parts "meteor" and "judge" are measurements. Where the judge
        gives NaN the row is not scored, by IoU neither. The user's own rewards see the teacher's
        masks: see `user_components`. With --other_regions "hit" is a measurement:
        see `hits`.
        """
        context, policy = self.context, self.context.policy
        captions, prompts = rollout.of_rows(rollout.batch.captions), [DESCRIBE] * len(rollout)
        regions = [send(mask, policy.device) for mask in rollout.batch.masks]
        targets = rollout.of_rows(regions)
        masks = [torch.zeros_like(target) for target in targets]
        asked = [row for row, text in enumerate(rollout.texts) if phrase(text)]
        image = [rollout.prompts.image[row] for row in asked]
        texts = askable(policy, [rollout.texts[row] for row in asked], context.max_new_tokens)
        question, found = (policy, rollout.features, image, texts), []
        with context.roles.use("teacher"):
            if self.options.teacher_answer == "forced":
                answers = segment(*question, found)
            else:
                answers = segment_sampled(*question, context.max_new_tokens, found)
        confidence = [0.0] * len(masks)
        for row, mask, sure in zip(asked, answers, found, strict=True):
            masks[row], confidence[row] = mask, sure
        rewards, batch = {"iou": mask_iou(masks, targets).cpu()}, rollout.batch
        if batch.others is not None:
            rewards["hit"] = hits(masks, batch.masks, batch.others)
        if context.judge:
            rewards["meteor"] = meteor(captions, rollout.texts)
            rewards["judge"] = judged = context.judge.score(captions, rollout.texts)
            rewards["caption_reward"] = METEOR_WEIGHT * rewards["meteor"] + JUDGE_WEIGHT * judged
        common = (context.user_rewards, rollout, prompts, masks, targets)
        users = user_components(*common, mask_confidence=confidence)
        rewards = with_components(rewards, users)
        if context.judge:
            rewards = without_rows(rewards, self.weights, judged.isnan())
        return Outcome(rewards, masks)
