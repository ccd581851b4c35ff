"""Loop 2, caption -> mask -> caption': the policy answers a caption with a sampled mask, the teacher describes it.

The answer's text is nearly constant and the mask a deterministic function of it, so the sampled prompt embedding behind
[SEG] is the action that gives a group its variance (FACTS 7).
"""
import torch

from rl_train.policy import Images, Policy, Prompts
from rl_train.rewards import mask_iou, meteor
from rl_train.roles import Roles
from rl_train.rollout import Rollout, describe


class CaptionMaskCaption:
    name = "loop2"
    weights = {"meteor": 1.0}

    def __init__(self, policy: Policy, roles: Roles, args):
        self.policy, self.roles = policy, roles
        self.loss_weight = args.caption_to_mask_weight
        self.mask_sigma = args.mask_sigma
        self.max_new_tokens = args.max_completion_length

    def prompts(self, batch, images: Images) -> Prompts:
        return self.policy.segment_prompts(images, list(range(len(batch))), batch.captions)

    def rewards(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """{"meteor": (N,), "iou": (N,)}: METEOR of the teacher's caption of each mask against the prompt's caption.

        An empty mask scores 0 without asking the teacher. The IoU with the region is a measurement that the reward does
        not see. Fills rollout.replies with the teacher's captions.
        """
        with self.roles.use("teacher"):
            rollout.replies = describe(self.policy, rollout.batch, rollout.images, rollout.prompts.image, rollout.masks,
                                       self.max_new_tokens)
        references = [rollout.batch.captions[i] for i in rollout.sample_of_row]
        targets = [rollout.batch.masks[i].to(self.policy.device) for i in rollout.sample_of_row]
        return {"meteor": meteor(references, rollout.replies), "iou": mask_iou(rollout.masks, targets).cpu()}
