"""A third loop: a question about a region, answered by the policy and by the teacher.

    PYTHONPATH=docs/examples python -m rl_train.train --tasks region_questions:RegionQuestions ..

The reward is how far both agree (METEOR). It needs no true answer, and so cannot tell a right one:
what the teacher says more often wins. `truth`, the words of the true caption among the answer's, is
logged beside it and does not count.
"""

from dataclasses import dataclass

import torch

from rl_train.config.flags import WEIGHT, flag
from rl_train.rewards import meteor
from rl_train.rollout import RewardOutput
from rl_train.tasks.base import Task
from sa2va_hf.batches import Prompts

QUESTIONS = (
    "What is the color of the given image region?",
    "What is the shape of the given image region?",
    "Where in the image is the given image region?",
)


class RegionQuestions(Task):
    name = "questions"
    family, asks_teacher = "sa2va", True

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "of the questions' loss", name="questions_weight", type=WEIGHT)
        trainable_modules = ("lora", "mlp1")

    def __init__(self, options, context):
        self.context, self.loss_weight = context, options.weight
        self.reward_weights = {"agreement": 1.0} | context.user_weights

    def questions(self, batch) -> list[str]:
        """One for each sample, by its index: the same on all ranks and after a resume."""
        return [QUESTIONS[index % len(QUESTIONS)] for index in batch.index]

    def prompts(self, batch, features) -> Prompts:
        questions, regions = self.questions(batch), features.prompt_masks
        policy, images = self.context.policy, range(len(batch))
        return policy.question_prompts(features, images, questions, regions)

    def own_rewards(self, rollout) -> RewardOutput:
        context, batch, features = self.context, rollout.batch, rollout.features
        with context.roles.use("teacher"):
            prompts = self.prompts(batch, features)
            _, replies = context.policy.complete(features, prompts, 1, context.max_reply_tokens)
        replies = rollout.repeat_for_rows(replies)
        captions = rollout.repeat_for_rows(batch.captions)
        rewards = {
            "agreement": meteor(replies, rollout.texts),
            "truth": torch.tensor(list(map(truth, captions, rollout.texts))),
        }
        targets = rollout.repeat_for_rows(batch.masks)
        questions = rollout.repeat_for_rows(self.questions(batch))
        return RewardOutput(rewards, targets, targets, questions, replies=replies)


def truth(caption: str, answer: str) -> float:
    """Fraction of an answer's words that the true caption has; 0 of no words."""
    words, true = answer.lower().split(), set(caption.lower().split())
    return sum(word in true for word in words) / max(len(words), 1)
