"""Loop 1, mask -> caption -> mask': the policy describes a region, the teacher segments the description, reward IoU."""

import torch

from rl_train.policies.sa2va import Images, Policy, Prompts
from rl_train.policies.sa2va_prompts import DESCRIBE, phrase
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.caption import JUDGE_WEIGHT, METEOR_WEIGHT, without_rows
from rl_train.roles import Roles
from rl_train.rollout import Rollout, segment, segment_sampled


class MaskCaptionMask:
    name = "loop1"
    mask_sigma = None

    def __init__(self, policy: Policy, roles: Roles, args, judge=None, user_rewards=()):
        if args.use_llm_judge and judge is None:
            raise ValueError("--use_llm_judge: loop 1 was given no judge")
        self.policy, self.roles = policy, roles
        self.judge = judge if args.use_llm_judge else None
        self.user_rewards = user_rewards
        self.weights = (
            {"iou": 1.0}
            | ({"caption_reward": 1.0} if self.judge else {})
            | {reward.name: reward.weight for reward in user_rewards}
        )
        self.loss_weight = args.mask_to_caption_weight
        self.max_new_tokens, self.teacher_answer = args.max_completion_length, args.teacher_answer

    def prompts(self, batch, images: Images) -> Prompts:
        return self.policy.describe_prompts(
            images, list(range(len(batch))), list(batch.inputs.grids)
        )

    def rewards(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """{"iou": (N,)}: IoU at the image's own size of the region and what the teacher finds by the caption.

        An empty caption scores 0 without asking the teacher; a teacher that answers without [SEG] (--teacher_answer sampled) gives 0.
        Fills rollout.masks with the teacher's masks.

        With --use_llm_judge "caption_reward", the caption reward of the sampled caption against the true one, counts beside it;
        its parts "meteor" and "judge" are measurements. Where the judge gives NaN the row is not scored, by IoU neither. The user's
        own rewards follow, each by its name; they are called with lists of N prompts, captions (the true ones), image_ids, masks
        (the teacher's) and targets (the regions), masks being (H, W) bool.
        """
        targets = [rollout.batch.masks[i].to(self.policy.device) for i in rollout.sample_of_row]
        rollout.masks = [torch.zeros_like(target) for target in targets]
        asked = [row for row, text in enumerate(rollout.texts) if phrase(text)]
        image, texts = (
            [rollout.prompts.image[row] for row in asked],
            [rollout.texts[row] for row in asked],
        )
        with self.roles.use("teacher"):
            found = (
                segment(self.policy, rollout.images, image, texts)
                if self.teacher_answer == "forced"
                else segment_sampled(
                    self.policy, rollout.batch, rollout.images, image, texts, self.max_new_tokens
                )
            )
        for row, mask in zip(asked, found):
            rollout.masks[row] = mask
        rewards = {"iou": mask_iou(rollout.masks, targets).cpu()}
        captions = [rollout.batch.captions[i] for i in rollout.sample_of_row]
        for reward in self.user_rewards:
            rewards[reward.name] = reward(
                rollout.texts,
                prompts=[DESCRIBE] * len(rollout),
                captions=captions,
                masks=rollout.masks,
                targets=targets,
                image_ids=[rollout.batch.image_ids[i] for i in rollout.sample_of_row],
            )
        if self.judge:
            parts = {
                "meteor": meteor(captions, rollout.texts),
                "judge": self.judge.score(captions, rollout.texts),
            }
            rewards |= parts | {
                "caption_reward": METEOR_WEIGHT * parts["meteor"] + JUDGE_WEIGHT * parts["judge"]
            }
            rewards = without_rows(rewards, self.weights, parts["judge"].isnan())
        return rewards
