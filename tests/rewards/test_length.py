"""What an answer's tokens cost, by hand."""

import pytest

from rl_train.rewards.length import length_terms

TOKENS = [0, 8, 9, 10, 12]


def given(**flags):
    """{name: (weight, values at TOKENS)} of the terms of an answer of at most 12 tokens."""
    return {
        term.name: (term.weight, term(["a"] * 5, num_tokens=TOKENS, captions=["b"] * 5).tolist())
        for term in length_terms(12, **flags)
    }


def test_none_is_asked_for_by_default():
    assert given() == {}


def test_the_soft_punishment_of_long_answers():
    """DAPO's: of the last 4 tokens each costs a quarter; an answer that was cut costs 1."""
    weight, values = given(overlong_buffer=4)["overlong"]
    assert weight == 1 and values == [0, 0, -0.25, -0.5, -1]
    assert given(overlong_buffer=12)["overlong"][1][1] == pytest.approx(-8 / 12)


def test_every_token_costs_or_those_beside_a_target():
    weight, values = given(length_weight=0.3)["length"]
    assert weight == 0.3 and values == pytest.approx([0, -8 / 12, -9 / 12, -10 / 12, -1])
    both = given(length_weight=2.0, target_length=9, overlong_buffer=2)
    assert both["length"] == (2.0, pytest.approx([-9 / 12, -1 / 12, 0, -1 / 12, -3 / 12]))
    assert both["overlong"] == (1.0, [0, 0, 0, 0, -1])
