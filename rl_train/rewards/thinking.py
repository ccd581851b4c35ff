"""Reward of the form of an answer that thinks first: <think>..</think>, then the answer with [SEG].

Answers with boxes and points have the same tags; see `points.parser.AnswerFormat.is_well_formed`
for theirs, whose answer stands in tags too.
"""

import re
from collections.abc import Sequence

import torch

from rl_train.points.parser import THINK

SEG = "[SEG]"
# The thoughts hold no further tag of their own.
THOUGHTS = re.compile(rf"\s*{THINK[0]}((?:(?!</?think>).)*){THINK[1]}(.*)", re.DOTALL)


def split_thoughts(text: str) -> tuple[str, str] | None:
    """Return (thoughts, answer) of a text, None if it does not begin with thoughts in their tags.

    Neither may hold another tag of thoughts, and both say something.
    """
    parts = THOUGHTS.fullmatch(text)
    if not parts or not all(part.strip() for part in parts.groups()):
        return None
    thoughts, answer = parts.groups()
    return None if any(tag in answer for tag in THINK) else (thoughts, answer)


def thinking_rewards(texts: Sequence[str]) -> torch.Tensor:
    """Return the reward (N,) of the form of answers, 1/2 for each of two parts.

    They are thoughts in their tags before an answer, and with them that [SEG] stands in the answer
    alone: a [SEG] among the thoughts is decoded to a mask as any other is.
    """
    parts = [split_thoughts(text) for text in texts]
    return torch.tensor([0.5 * bool(p) + 0.5 * bool(p and SEG not in p[0]) for p in parts])
