import math

import pytest
import torch

from rl_train.rewards import meteor
from rl_train.rewards.caption import without_rows
from rl_train.rewards.combine import combine
from tools.evaluate import legacy_clean


def test_rows_without_a_judge_are_not_scored_by_the_rest():
    judge = torch.tensor([0.5, math.nan])
    rewards = {
        "meteor": torch.tensor([0.4, 0.4]),
        "judge": judge,
        "mine": torch.ones(2),
        "iou": torch.ones(2),
    }
    weights = {"meteor": 0.25, "judge": 0.75, "mine": 1.0}
    assert not combine(rewards, weights).isnan().any()  # left alone, the row would be METEOR's
    marked = without_rows(rewards, weights, judge.isnan())
    assert (
        combine(marked, weights)[0] == pytest.approx(0.1 + 0.375 + 1)
        and combine(marked, weights)[1].isnan()
    )
    assert marked["iou"].tolist() == [1, 1] and rewards["meteor"].tolist() == pytest.approx(
        [0.4, 0.4]
    )


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
