"""Replies of a judge that are understood, and their meaning."""

import json

import pytest

from rl_train.rewards.judge_text import (
    MODES,
    parse_attributes,
    parse_choice,
    parse_score,
)
from tests.judge_server import attributes


@pytest.mark.parametrize(
    "reply, score",
    [
        ("8", 0.8),
        ("7.5", 0.75),
        ("8/10", 0.8),
        ("Rating: 8", 0.8),
        ("0", 0),
        ("10", 1),
        ("10/10", 1),
        (" 8\n", 0.8),
        ("8.", 0.8),
        ("**8**", 0.8),
        ("Score: 8/10", 0.8),
        ("rating is 8", 0.8),
        ("8 out of 10", 0.8),
        ("8\n\nThe candidate names the same dog.", 0.8),
    ],
)
def test_ratings(reply, score):
    assert parse_score(reply) == pytest.approx(score)


@pytest.mark.parametrize(
    "reply",
    [
        "Score: 85",
        "-5",
        "11",
        "eight",
        "",
        " ",
        "10.1",
        "8/5",
        "8/100",
        "8 or 9",
        "8-9",
        "8\n9",
        "7,5",
        "1e1",
        "+8",
        "nan",
        "inf",
        "٨",
        "I cannot rate this.",
        "The candidate has 2 of 10 details",
        "Rating: -5",
        "Rating",
        "8 10",
        '{"rating": 8}',
        "1" * 400,
    ],
)
def test_unclear_ratings_are_none(reply):
    assert parse_score(reply) is None


@pytest.mark.parametrize(
    "reply, value",
    [
        ("B", 0.75),
        ("b.", 0.75),
        ("(C)", 0.5),
        ("D)", 0.2),
        ("The answer is D", 0.2),
        ("Answer: B", 0.75),
        ("ANSWER: B", 0.75),
        ("Option C", 0.5),
        ("A", 1),
        ("e", 0),
        ("**B**", 0.75),
        ("B. The same object, minor details missing.", 0.75),
        ("B. A dog", 0.75),
        (" A\n", 1),
        ("The correct answer is: (B)", 0.75),
        ("B\nBecause a detail is missing.", 0.75),
    ],
)
def test_verdicts(reply, value):
    assert MODES["mcq"][1](reply) == value


@pytest.mark.parametrize(
    "reply",
    [
        "Bad",
        "",
        " ",
        "A dog",
        "a good match",
        "F",
        "AB",
        "A or B",
        "A/B",
        "(A) or (B)",
        "A. B.",
        "B\nNo, the answer is C",
        "answer",
        "answerB",
        "Excellent",
        "Definitely",
        "Can't say",
        "The answer is unclear",
        "8",
        "Options",
    ],
)
def test_unclear_verdicts_are_none(reply):
    assert MODES["mcq"][1](reply) is None


def test_letters_beyond_the_options_are_none():
    assert parse_choice("B", {"A": 1.0, "B": 0.0}) == 0.0
    assert parse_choice("C", {"A": 1.0, "B": 0.0}) is None


GOOD = json.loads(attributes("a red dog"))


def test_attributes_are_strict_json():
    assert (
        parse_attributes(json.dumps(GOOD)) == GOOD
        and parse_attributes(f"```json\n{json.dumps(GOOD, indent=1)}\n```") == GOOD
    )
    bad = [
        "",
        "dog",
        "[]",
        f"Here it is: {json.dumps(GOOD)}",
        "[" * 100_000,
        json.dumps({k: GOOD[k] for k in GOOD if k != "absent"}),
    ]
    for changes in (
        dict(object=None),
        dict(more=1),
        dict(absent=["a", "b", "c", "d"]),
        dict(absent=None),
        dict(absent=[" "]),
        dict(absent=[3]),
        dict(colour="red"),
        dict(colour={"answer": "red"}),
        dict(colour={"answer": "red", "wrong": []}),
        dict(colour={"answer": "red", "wrong": ["Red "]}),
        dict(colour={"answer": "", "wrong": ["blue"]}),
        dict(colour={"answer": "red", "wrong": "blue"}),
        dict(colour={"answer": "red", "wrong": list("abcde")}),
    ):
        bad.append(json.dumps(GOOD | changes))
    assert [parse_attributes(text) for text in bad] == [None] * len(bad)
