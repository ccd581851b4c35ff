"""The worst that the flags of Qwen2.5-VL allow: longest prompts and answers, many masks."""

from math import isqrt

import numpy as np
from PIL import Image

from rl_train.data.loader import Batches
from rl_train.data.masks import MASK_PIXELS
from rl_train.points.answers import Answer
from rl_train.policies.qwen_inputs import QwenInputs
from rl_train.policies.qwen_points import QwenPointsPolicy
from rl_train.policies.worst_case import longest_caption
from rl_train.types import Batch

MANY = 8  # boxes of an answer, and points of each kind


class LongestPoints(QwenPointsPolicy):
    """The model of another policy, whose answers have all tokens that they may."""

    def __init__(self, policy: QwenPointsPolicy):
        vars(self).update(vars(policy))
        self.stop = None

    def complete(self, images, prompts, num_generations, max_new_tokens, uniforms=None):
        """As the policy's; and the masks of as many answers with many boxes, which nobody sees.

        What is sampled here is no answer that a task could read.
        """
        spots = tuple((float(n), float(n)) for n in range(2 * MANY))
        boxes = tuple((x, y, x + 8.0, y + 8.0) for x, y in spots[:MANY])
        answer, rows = Answer(boxes, spots[:MANY], spots[MANY:]), prompts.repeat(num_generations)
        self.point_masks(images, rows.image, [answer] * len(rows), passes=2)
        return super().complete(images, prompts, num_generations, max_new_tokens, uniforms)


def worst_batch(policy: QwenPointsPolicy, inputs: QwenInputs, batch_size: int) -> Batch:
    """A batch of images of all tokens, and the longest captions that `check` passes."""
    side = isqrt(MASK_PIXELS)
    image, mask = Image.new("RGB", (side, side)), np.ones((side, side), dtype=bool)
    sample = dict(image=image, mask=mask, category="", image_id="worst")
    caption = longest_caption(inputs, sample, policy.context)
    return Batches([sample | dict(caption=caption)] * batch_size, inputs)[list(range(batch_size))]
