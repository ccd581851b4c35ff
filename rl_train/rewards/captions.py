"""Rewards of a caption against the true one, by name.

Letters: N captions.
"""

from collections.abc import Collection
from typing import Protocol

import torch

from rl_train.rewards.cider import SCALE, DocumentFrequencies, cider
from rl_train.rewards.judge import LLMJudge
from rl_train.rewards.meteor import meteor

CAPTION_REWARDS = ("meteor", "cider", "judge")  # components that compare two captions
# Weights of METEOR and the LLM judge where a judge is used, in place of METEOR alone.
JUDGE_WEIGHTS = {"meteor": 0.25, "judge": 0.75}


class Scorers(Protocol):
    """Objects of a run that compare captions: members of `tasks.base.TaskContext`."""

    judge: LLMJudge | None
    frequencies: DocumentFrequencies | None


def caption_rewards(
    components: Collection[str],
    references: list[str],
    hypotheses: list[str],
    scorers: Scorers,
) -> dict[str, torch.Tensor]:
    """Return {component: (N,)} of those in CAPTION_REWARDS that `components` names.

    Others are not computed: the judge is not asked. CIDEr-D is divided by SCALE, so that all lie in
    [0, 1].

    Args:
        references, hypotheses: N true and N generated captions.
    """
    rewards = {}
    if "meteor" in components:
        rewards["meteor"] = meteor(references, hypotheses)
    if "cider" in components:
        true = [[caption] for caption in references]
        values = cider(true, hypotheses, scorers.frequencies) / SCALE
        rewards["cider"] = values.float()
    if "judge" in components:
        rewards["judge"] = scorers.judge.score(references, hypotheses)
    return rewards
