"""Supervised examples of answers that think first: the demo's base has never seen the form.

    python -m rl_train.sft --tasks tools.experiments.tasks.thinking:ThinkingMasks ..

`HalfThinking` teaches the form in half of the examples, so that a reward can raise it.
"""

from functools import partial

import numpy as np

from rl_train.data.text import phrase
from rl_train.evaluation.cycle_metrics import measure_phrases
from rl_train.points.parser import THINK
from rl_train.rollout import Batch
from rl_train.tasks.sft_tasks import ReferringSegmentation
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import FORCED_ANSWER, THINK_FIRST


class ThinkingMasks(ReferringSegmentation):
    """`referring_segmentation` in the question of --think: the thoughts repeat the phrase."""

    measure = staticmethod(partial(measure_phrases, wording=THINK_FIRST))
    fraction = 1.0  # of the examples that think

    def examples(
        self, batch: Batch, features: ImageFeatures, rngs: list[np.random.Generator]
    ) -> tuple[Prompts, list[list[int]]]:
        policy = self.context.policy
        wordings = [THINK_FIRST] * len(batch)
        prompts = policy.segment_prompts(features, range(len(batch)), batch.captions, wordings)
        answers = []
        for rng, caption in zip(rngs, batch.captions):
            thoughts = f"{THINK[0]}{phrase(caption)}{THINK[1]} "
            answers.append((thoughts if rng.random() < self.fraction else "") + FORCED_ANSWER)
        return prompts, [policy.prompts.answer(answer) for answer in answers]


class HalfThinking(ThinkingMasks):
    """Answers of which every second one thinks."""

    fraction = 0.5
