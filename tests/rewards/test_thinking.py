"""The form of answers that think first."""

import pytest

from rl_train.points.parser import AnswerFormat
from rl_train.rewards.thinking import split_thoughts, thinking_rewards

CASES = {
    "<think>It is left.</think> Sure, [SEG].": 1,
    "\n<think>a\nb</think>\n[SEG]": 1,
    "<think>a < b</think>There is none.": 1,
    "<think>a [SEG] b</think> Sure, [SEG].": 0.5,
    "Sure, [SEG].": 0,
    "Well <think>a</think> [SEG]": 0,
    "<think>a [SEG]": 0,  # which never ends
    "<think>a</think>": 0,  # without an answer
    "<think> </think> [SEG]": 0,  # without a thought
    "<think>a<think>b</think> [SEG]": 0,
    "<think>a</think> [SEG] </think>": 0,
    "<think>a</think> [SEG] <think>b</think> [SEG]": 0,
    "<THINK>a</THINK> [SEG]": 0,
    "": 0,
}


def test_each_form_has_its_reward():
    assert thinking_rewards(list(CASES)).tolist() == list(CASES.values())
    assert split_thoughts("<think>a</think> b") == ("a", " b")


@pytest.mark.parametrize("style", ["segzero", "visionreasoner", "segzero_plus"])
def test_the_tags_are_those_of_points(style):
    """A well-formed answer with points is one for this reward too: one form for both families."""
    text = '<think>so</think><answer>{"bbox": []}</answer>'
    assert AnswerFormat(style).is_well_formed(text) and thinking_rewards([text]).tolist() == [1]
