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
from tools.benchmarks.lengths import Lengths, Request

WORDS = "a red cup and an old hat on top of the big box by the sea".split()  # one token each


class ForcedPoints(QwenVLPolicy):
    """Qwen2.5-VL whose prompts have L tokens, and whose answers end only at their length.

    The end is looked for as ever, and found only there. `requests` keeps its calls.
    """

    def __init__(self, *parts: Any, prompt_length: int, lengths: Lengths):
        super().__init__(*parts)
        self.prompt_length, self.lengths, self.requests = prompt_length, lengths, []
        lengths.set_end(self.stop)
        # Box and points lie on a grid of eighths of the image.
        s = self.preprocessing.side // 8
        positive, negative = ((2 * s, 2 * s), (3 * s, 3 * s)), ((6 * s, 2 * s),)
        answer = PointPrompt(((s, s, 5 * s, 5 * s),), positive, negative)
        self.forced_text = AnswerFormat("segzero", "optional").format(answer)

    def point_questions(
        self, features: QwenImageFeatures, image_index: list[int], questions: list[str]
    ) -> Prompts:
        """Return prompts of L tokens: the questions are replaced by as many words as that takes."""
        shortest = super().point_questions(features, image_index, [""] * len(image_index))
        num_missing = [self.prompt_length - len(ids) for ids in shortest.ids]
        if min(num_missing) < 0:
            least = self.prompt_length - min(num_missing)
            raise ValueError(f"--prompt_length {self.prompt_length}: must be at least {least}")
        words = ["".join(f" {WORDS[i % len(WORDS)]}" for i in range(n)) for n in num_missing]
        prompts = super().point_questions(features, image_index, words)
        lengths = set(map(len, prompts.ids))
        assert lengths == {self.prompt_length}, f"prompts of {lengths}: a word of several tokens"
        return prompts

    def complete(
        self,
        features: QwenImageFeatures,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
    ):
        num_rows = len(prompts) * num_generations
        uniforms = self.lengths.forced_uniforms(num_rows, max_new_tokens, uniforms)
        completions, texts = super().complete(
            features, prompts, num_generations, max_new_tokens, uniforms
        )
        self.requests.append(Request(prompts, completions.valid))
        return completions, texts

    def completion_text(self, ids: list[int]) -> str:
        """Decode, which takes its time, and return an answer that can be read."""
        super().completion_text(ids)
        return self.forced_text


def make_batch(
    policy: ForcedPoints, max_new_tokens: int, num: int, size: tuple[int, int], rank: int
) -> Batch:
    """Make a batch of one noise image (H, W), `num` times; the region is its first quarter."""
    pixels = np.random.default_rng(rank).integers(256, size=(*size, 3), dtype=np.uint8)
    mask = np.zeros(size, dtype=bool)
    mask[: size[0] // 2, : size[1] // 2] = True
    sample = dict(image=Image.fromarray(pixels), mask=mask, image_id="image", caption="a red cup")
    batch = Batches([sample] * num, policy.preprocessor(max_new_tokens))[list(range(num))]
    batch.index = [rank * num + i for i in range(num)]
    return batch
