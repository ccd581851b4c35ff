"""The cleaner of captions that earlier evaluations used."""

import pytest

from rl_train.rewards import meteor
from tools.evaluate import legacy_clean


@pytest.mark.parametrize(
    "text",
    [
        "this is an island",
        "region10: a dog",
        "a dog\nin the region1 is red",
        "The regional train",
        "region1's edge",
        "The region of the sky is blue",
        "It shows a dog",
        "thesis",
        "a dog is this",
        "island",
        "region",
    ],
)
def test_legacy_cleaner_leaves_words_alone(text):
    assert legacy_clean(text) == text


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("The region is a dog.<|end|>", "a dog."),
        ("region1: a dog", "a dog"),
        ("Region1 is a dog", "a dog"),
        ("region1 a dog", "a dog"),
        ("The region shows a dog", "a dog"),
        ("This region is a dog", "a dog"),
        ("The marked region contains a dog", "a dog"),
        ("a dog<|end|> and a cat<|end|>", "a dog"),
        ("<|end|>a dog", ""),
        ("", ""),
        ("The region is this is an island", "this is an island"),
    ],
)
def test_legacy_cleaner_cuts_the_start_and_the_stop_text(text, cleaned):
    assert legacy_clean(text) == cleaned


def test_legacy_cleaner_is_an_option():
    text = ["The region is a dog.<|end|>"]
    assert meteor(["a dog"], [legacy_clean(text[0])]).item() == pytest.approx(0.9375)
    assert meteor(["a dog"], text).item() < 0.8
