"""Loop 1, mask -> caption -> mask': the policy describes a region, the teacher segments the description, reward IoU."""
import torch

from rl_train.policy import Images, Policy, Prompts
from rl_train.prompts import phrase
from rl_train.rewards import mask_iou
from rl_train.roles import Roles
from rl_train.rollout import Rollout, segment


class MaskCaptionMask:
    name = "loop1"
    mask_sigma = None
    weights = {"iou": 1.0}

    def __init__(self, policy: Policy, roles: Roles, args):
        self.policy, self.roles = policy, roles
        self.loss_weight = args.mask_to_caption_weight
        self.max_new_tokens = args.max_completion_length

    def prompts(self, batch, images: Images) -> Prompts:
        return self.policy.describe_prompts(images, list(range(len(batch))), list(batch.grids))

    def rewards(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """{"iou": (N,)}: IoU at the image's own size of the region and what the teacher finds by the caption.

        An empty caption scores 0 without asking the teacher. Fills rollout.masks with the teacher's masks.
        """
        targets = [rollout.batch.masks[i].to(self.policy.device) for i in rollout.sample_of_row]
        rollout.masks = [torch.zeros_like(target) for target in targets]
        asked = [row for row, text in enumerate(rollout.texts) if phrase(text)]
        with self.roles.use("teacher"):
            found = segment(self.policy, rollout.images, [rollout.prompts.image[row] for row in asked],
                            [rollout.texts[row] for row in asked])
        for row, mask in zip(asked, found):
            rollout.masks[row] = mask
        return {"iou": mask_iou(rollout.masks, targets).cpu()}
