"""The tasks of a run. A task is one object with a prompt and its rewards:

    name           prefix of its TensorBoard curves
    mask_sigma     None if the action is text; else the spread of the sampled prompt embedding
    loss_weight    its weight in the total loss
    weights        {reward component: weight}; components without a weight are logged only
    prompts(batch, images) -> Prompts, one per sample
    rewards(rollout) -> {component: (N,)}, NaN where a row could not be scored

It is built as TASKS[name](policy, roles, args, judge, user_rewards). A new task is one file and one line below.
"""

from .caption_mask_caption import CaptionMaskCaption
from .mask_caption_mask import MaskCaptionMask

TASKS = {"mask_caption_mask": MaskCaptionMask, "caption_mask_caption": CaptionMaskCaption}
