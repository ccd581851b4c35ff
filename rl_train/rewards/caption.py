"""The caption reward: METEOR, or METEOR and an LLM judge."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_train.rewards.meteor import meteor

METEOR_WEIGHT, JUDGE_WEIGHT = 0.25, 0.75


def caption_reward(
    references: Sequence[str],
    hypotheses: Sequence[str],
    judge=None,
    meteor_weight: float = METEOR_WEIGHT,
    judge_weight: float = JUDGE_WEIGHT,
) -> Tensor:
    """Return the reward of every caption pair, as (N,) float32; NaN where the judge's score is.

    Args:
        references: N ground-truth captions.
        hypotheses: N generated captions, paired by index, scored as they are.
        judge: None for METEOR alone, whatever the weights, or an object with score(references,
            hypotheses) -> (N,), such as `LLMJudge`, for meteor_weight * METEOR + judge_weight *
            score.
    """
    scores = meteor(references, hypotheses)
    if judge is None:
        return scores
    return meteor_weight * scores + judge_weight * judge.score(references, hypotheses)


def without_rows(
    rewards: dict[str, Tensor], names: Sequence[str], rows: Tensor
) -> dict[str, Tensor]:
    """Return `rewards` with the components `names` NaN at `rows` (N,) bool.

    `components.combine` leaves NaN components out of a row's sum; with all weighted components NaN
    the row itself is not scored.
    """
    return rewards | {name: torch.where(rows, torch.nan, rewards[name]) for name in names}
