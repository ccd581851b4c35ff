"""Helpers of the tests of the judge."""

import torch

from rl_train.rewards import LLMJudge
from tests.judge_server import MODEL


def judge(server, mode="score", **changes) -> LLMJudge:
    """The judge of a `JudgeServer`, impatient."""
    return LLMJudge(server.url, MODEL, mode, **dict(timeout=5, max_retries=0) | changes)


def nan_equal(values: torch.Tensor, expected: list[float]):
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float32), equal_nan=True)
