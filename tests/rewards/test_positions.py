"""Parts of an image by the words of a phrase."""

import pytest
import torch

from rl_train.rewards.positions import fraction_in_named_part, named_part


@pytest.mark.parametrize(
    "text, rows, columns",
    [
        ("the owl in the top left", slice(0, 2), slice(0, 2)),
        ("Lower owl", slice(2, 5), slice(0, 5)),
        ("the RIGHT owl.", slice(0, 5), slice(2, 5)),
    ],
)
def test_a_named_part(text, rows, columns):
    expected = torch.zeros(5, 5, dtype=torch.bool)
    expected[rows, columns] = True
    assert torch.equal(named_part(text, (5, 5)), expected)


def test_what_names_no_part():
    for text in ("", "an owl", "left of the right owl", "bright copyright"):
        assert named_part(text, (4, 4)) is None
        assert fraction_in_named_part(torch.ones(4, 4, dtype=torch.bool), text) == 0
    assert fraction_in_named_part(torch.zeros(4, 4, dtype=torch.bool), "left") == 0
