"""Loop 2, caption -> mask -> caption': the policy answers a caption with a sampled mask, the teacher describes it.

The answer's text is nearly constant and the mask a deterministic function of it, so the sampled prompt embedding behind
[SEG] is the action that gives a group its variance (FACTS 7).
"""

import torch

from rl_train.policies.sa2va import Images, Policy, Prompts
from rl_train.policies.sa2va_prompts import SEGMENT, phrase
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.caption import JUDGE_WEIGHT, METEOR_WEIGHT, without_rows
from rl_train.roles import Roles
from rl_train.rollout import Rollout, caption_likelihood, describe


class CaptionMaskCaption:
    name = "loop2"

    def __init__(self, policy: Policy, roles: Roles, args, judge=None, user_rewards=()):
        if args.use_llm_judge_loop2 and judge is None:
            raise ValueError("--use_llm_judge_loop2: loop 2 was given no judge")
        self.policy, self.roles = policy, roles
        self.judge = judge if args.use_llm_judge_loop2 else None
        self.user_rewards = user_rewards
        share = args.likelihood_share
        caption = (
            {"meteor": METEOR_WEIGHT, "judge": JUDGE_WEIGHT} if self.judge else {"meteor": 1.0}
        )
        self.weights = {name: (1 - share) * weight for name, weight in caption.items() if share < 1}
        self.weights |= ({"likelihood": share} if share else {}) | {
            reward.name: reward.weight for reward in user_rewards
        }
        self.loss_weight = args.caption_to_mask_weight
        self.mask_sigma = args.mask_sigma
        self.max_new_tokens = args.max_completion_length

    def prompts(self, batch, images: Images) -> Prompts:
        return self.policy.segment_prompts(images, list(range(len(batch))), batch.captions)

    def rewards(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """{"meteor", "iou" and, unless its share is 0, "likelihood": (N,)} of the sampled masks.

        METEOR of the teacher's caption of each mask against the prompt's caption, and the likelihood that the teacher gives the
        prompt's caption as a description of it; an empty mask scores 0 without asking the teacher. The IoU with the region is a
        measurement that the reward does not see. Fills rollout.replies with the teacher's captions.

        The reward is (1 - share) "meteor" + share "likelihood", share = --likelihood_share. With --use_llm_judge_loop2 0.25 "meteor" +
        0.75 "judge", the judge's score of the same pair, stands for METEOR. Where the judge gives NaN the row is not scored at all.
        The user's own rewards follow, each by its name; they are called with lists of N prompts, captions (the prompts' ones),
        image_ids, replies (the teacher's captions), masks (sampled) and targets (the regions), masks being (H, W) bool.
        """
        references = [rollout.batch.captions[i] for i in rollout.sample_of_row]
        with self.roles.use("teacher"):
            rollout.replies = describe(
                self.policy,
                rollout.batch,
                rollout.images,
                rollout.prompts.image,
                rollout.masks,
                self.max_new_tokens,
            )
            if "likelihood" in self.weights:
                likelihood = caption_likelihood(
                    self.policy,
                    rollout.images,
                    rollout.prompts.image,
                    rollout.masks,
                    references,
                    self.max_new_tokens,
                )
        targets = [rollout.batch.masks[i].to(self.policy.device) for i in rollout.sample_of_row]
        rewards = {
            "meteor": meteor(references, rollout.replies),
            "iou": mask_iou(rollout.masks, targets).cpu(),
        }
        if "likelihood" in self.weights:
            rewards["likelihood"] = likelihood
        for reward in self.user_rewards:
            rewards[reward.name] = reward(
                rollout.texts,
                prompts=[SEGMENT.replace("{x}", phrase(text)) for text in references],
                captions=references,
                replies=rollout.replies,
                masks=rollout.masks,
                targets=targets,
                image_ids=[rollout.batch.image_ids[i] for i in rollout.sample_of_row],
            )
        if self.judge:
            rewards["judge"] = self.judge.score(references, rollout.replies)
            rewards = without_rows(rewards, self.weights, rewards["judge"].isnan())
        return rewards
