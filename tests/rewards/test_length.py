"""What an answer's last tokens cost, by hand."""

import pytest

from rl_train.rewards.length import OverlongPenalty

TOKENS = [0, 8, 9, 10, 12]


def test_the_soft_punishment_of_long_answers():
    """DAPO's: of the last 4 tokens each costs a quarter; an answer that was cut costs 1."""
    penalty = OverlongPenalty(longest=12, buffer=4)
    values = penalty(["a"] * 5, num_tokens=TOKENS, captions=["b"] * 5)
    assert penalty.weight == 1 and values.tolist() == [0, 0, -0.25, -0.5, -1]
    longer = OverlongPenalty(longest=12, buffer=12)
    assert longer(["a"] * 5, num_tokens=TOKENS)[1].item() == pytest.approx(-8 / 12)
