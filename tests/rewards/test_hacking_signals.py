"""Signs of a gamed reward, by hand."""

import pytest
import torch

from rl_train.rewards.hacking_signals import has_digit, is_whole, repeats


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a b c a b d", False),
        ("A b c. a B c.", True),
        ("!!!", False),
        ("!!!!", True),
        ("", False),
        ("a dog on the left of the dog", False),
        ("no no no no", True),
    ],
)
def test_repeated_triples(text, expected):
    assert repeats(text) is expected


@pytest.mark.parametrize(
    "text, expected", [("", False), ("a dog", False), ("at 1", True), ("x2y", True), ("two", False)]
)
def test_digits(text, expected):
    assert has_digit(text) is expected


def mask(filled) -> torch.Tensor:
    """(10, 10) bool with `filled` pixels set."""
    return torch.arange(100).view(10, 10) < filled


def test_a_whole_mask_covers_more_than_nine_tenths():
    assert [is_whole(mask(filled)) for filled in (0, 90, 91, 100)] == [False, False, True, True]
