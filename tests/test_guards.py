"""Signs of a gamed reward, by hand, and as shares of a rollout's rows."""

from types import SimpleNamespace

import pytest
import torch

from rl_train.rewards.guards import has_digit, is_whole, repeats
from rl_train.tb import rollout_sums, scalars


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


def test_shares_of_a_rollout():
    """8 rows: 3 repeat themselves, 1 has a digit, 2 masks are the whole image."""
    texts = ["no no no no", "a a a a", "b b b b b", "at 3", "", "a dog", "a cat", "two"]
    rollout = SimpleNamespace(
        num_generations=4,
        valid=torch.ones(8, 3, dtype=torch.bool),
        stopped=torch.ones(8, dtype=torch.bool),
        texts=texts,
        replies=[],
        has_mask=False,
        masks=[mask(filled) for filled in (100, 91, 90, 50, 0, 0, 1, 2)],
    )
    reward = torch.linspace(0, 1, 8)
    sums = rollout_sums(rollout, {"iou": reward}, reward)
    curves = scalars(
        dict.fromkeys(("loss", "policy_loss", "tokens", "kl", "clipped", "entropy"), 0.0) | sums
    )
    assert (
        curves["repeats_frac"],
        curves["digits_frac"],
        curves["whole_mask_frac"],
        curves["empty_frac"],
    ) == (3 / 8, 1 / 8, 2 / 8, 1 / 8)
    rollout.replies = ["no no no no", *["at 3"] * 7]  # in loop 2 it is the teacher who describes
    assert rollout_sums(rollout, {"iou": reward}, reward)["digits"] == 7
