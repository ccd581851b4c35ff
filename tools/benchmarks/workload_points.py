"""The policy and the batch of a step of Qwen2.5-VL: random weights, forced lengths and answers.

Random weights never stop, and say nothing that can be read. So that they do the work of trained
ones, each answer goes on to its full length and is read as one box, two positive points and a
negative one, of which SAM2 draws a mask with and without that.

Letters: B prompts, L prompt length.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image

from rl_train.data.loader import Batches
from rl_train.points.parser import AnswerFormat, PointPrompt
from rl_train.policies.qwen_vl import QwenImageFeatures, QwenVLPolicy
from rl_train.rollout import Batch
from sa2va_hf.batches import Prompts
from tools.benchmarks.lengths import Asked, Lengths

WORDS = "a red cup and an old hat on top of the big box by the sea".split()  # one token each


class ForcedPoints(QwenVLPolicy):
    """Qwen2.5-VL whose prompts have L tokens, and whose answers end only at their length.

    The end is looked for as ever, and found only there. `asked` keeps what was asked of it.
    """

    def __init__(self, *parts: Any, prompt_length: int, lengths: Lengths):
        super().__init__(*parts)
        self.prompt_length, self.lengths, self.asked = prompt_length, lengths, []
        lengths.set_end(self.stop)
        s = self.preprocessing.side // 8
        positive, negative = ((2 * s, 2 * s), (3 * s, 3 * s)), ((6 * s, 2 * s),)
        answer = PointPrompt(((s, s, 5 * s, 5 * s),), positive, negative)
        self.said = AnswerFormat("segzero", "optional").format(answer)

    def point_questions(
        self, images: QwenImageFeatures, image: list[int], questions: list[str]
    ) -> Prompts:
        """As Qwen2.5-VL's, with questions of as many words as make L tokens."""
        shortest = super().point_questions(images, image, [""] * len(image))
        more = [self.prompt_length - len(ids) for ids in shortest.ids]
        if min(more) < 0:
            least = self.prompt_length - min(more)
            raise ValueError(f"--prompt_length {self.prompt_length}: must be at least {least}")
        words = ["".join(f" {WORDS[i % len(WORDS)]}" for i in range(n)) for n in more]
        prompts = super().point_questions(images, image, words)
        lengths = set(map(len, prompts.ids))
        assert lengths == {self.prompt_length}, f"prompts of {lengths}: a word of several tokens"
        return prompts

    def complete(
        self,
        images: QwenImageFeatures,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
    ):
        num_rows = len(prompts) * num_generations
        uniforms = self.lengths.numbers(num_rows, max_new_tokens, uniforms)
        done, texts = super().complete(images, prompts, num_generations, max_new_tokens, uniforms)
        self.asked.append(Asked(prompts, done.valid))
        return done, texts

    def completion_text(self, ids: list[int]) -> str:
        """Decoded as ever, and then what can be read."""
        super().completion_text(ids)
        return self.said


def make_batch(
    policy: ForcedPoints, max_new_tokens: int, num: int, size: tuple[int, int], rank: int
) -> Batch:
    """One image of noise of `size` (H, W), `num` times, of which a quarter is meant."""
    pixels = np.random.default_rng(rank).integers(256, size=(*size, 3), dtype=np.uint8)
    mask = np.zeros(size, dtype=bool)
    mask[: size[0] // 2, : size[1] // 2] = True
    sample = dict(image=Image.fromarray(pixels), mask=mask, image_id="image", caption="a red cup")
    batch = Batches([sample] * num, policy.preprocessor(max_new_tokens))[list(range(num))]
    batch.index = [rank * num + i for i in range(num)]
    return batch
