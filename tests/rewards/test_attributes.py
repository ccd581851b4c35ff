"""Attributes that captions state, by hand, and vocabularies of another form."""

import json

import pytest

from rl_train.evaluation.evaluate import EvalResult, summary
from rl_train.rewards.attributes import attribute_values, load_attributes, parse_attributes

VOCABULARY = {
    "size": {"small": ["small", "little"], "large": ["large"]},
    "color": {"red": ["red"], "blue": ["blue"], "light blue": ["light blue"]},
    "position": {"left": ["left", "left side"], "top left": ["top left", "upper-left corner"]},
    "side": {"both": ["side", "both sides"]},
}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a small red circle in the top left", {"size": "small", "color": "red", "position": "TL"}),
        ("A Little one, RED: at the left.", {"size": "small", "color": "red", "position": "left"}),
        ("in the upper left corner", {"position": "TL"}),
        ("top left, top left", {"position": "TL"}),  # side by side, none is only "left"
        ("top left of the left one", {"position": ("left", "TL")}),
        ("light blue or blue", {"color": ("light blue", "blue")}),
        ("at the left side", {"position": "left"}),  # no "side" of another attribute
        ("the left, side", {"position": "left"}),  # punctuation is no word
        ("side left", {"side": "both", "position": "left"}),
        ("smaller reddish leftover", {}),
        ("", {}),
    ],
)
def test_what_a_text_states(text, expected):
    found = parse_attributes(text, VOCABULARY)
    assert set(found) == set(VOCABULARY)
    for name, values in found.items():
        want = expected.get(name, ())
        want = {want} if isinstance(want, str) else set(want)
        assert values == {value.replace("TL", "top left") for value in want}, name


def test_accuracy_and_precision_by_hand():
    """Four of five captions are of a known colour: two say it, one also another, one none."""
    references = ["red", "red", "blue", "blue", "a circle"]
    captions = ["a red one", "red and blue", "blue", "something", "red"]
    colors = {"color": VOCABULARY["color"]}
    values = attribute_values(references, captions, colors)
    assert {name: column.tolist() for name, column in values.items()} == {
        "color_known": [1, 1, 1, 1, 0],
        "color_said": [1, 1, 1, 0, 0],
        "color_right": [1, 0, 1, 0, 0],
    }
    found = summary(EvalResult(values, [], references, captions, 0))
    assert found["means"] == pytest.approx(
        {"color_accuracy": 2 / 4, "color_precision": 2 / 3, "color_stated": 3 / 4}
    )
    for name, (low, high) in found["intervals"].items():
        assert 0 <= low < found["means"][name] < high <= 1
    nothing = attribute_values(["a circle"] * 2, ["red"] * 2, colors)
    assert summary(EvalResult(nothing, [], [], [], 0))["means"] == {}  # no share of nothing
    silent = attribute_values(["red"] * 2, ["a circle"] * 2, colors)
    assert summary(EvalResult(silent, [], [], [], 0))["means"] == dict(
        color_accuracy=0, color_stated=0
    )
    assert attribute_values(["two: red, blue"], ["red"], colors)["color_known"].tolist() == [0]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        {"color": ["red"]},
        {"color": {}},
        {"color": {"red": []}},
        {"color": {"red": "red"}},
        {"color": {"red": [1]}},
        {"Fill colour": {"red": ["red"]}},
        {"color": {"red": ["..."]}},
        {"color": {"red": ["Light-red"]}, "tone": {"x": ["light red"]}},
    ],
)
def test_a_vocabulary_of_another_form_is_named(tmp_path, content):
    file = tmp_path / "attributes.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"^--attributes {file} does not hold") as raised:
        load_attributes(file)
    assert "\n" not in str(raised.value)


def test_a_vocabulary_is_read(tmp_path):
    file = tmp_path / "attributes.json"
    with pytest.raises(ValueError, match=f"--attributes {file} does not hold"):
        load_attributes(file)
    file.write_text(json.dumps(VOCABULARY))
    assert load_attributes(file) == VOCABULARY
