"""CIDEr-D by hand."""

import pytest

from tools.evaluate import cider


def test_cider_by_hand():
    pytest.importorskip("pycocoevalcap")  # of the extra `eval`, 104 MB
    # Document frequency 1 of 2 everywhere: equal captions of one word have cosine 1 for n = 1 of
    # 4, times 10.
    assert cider(["cup", "dog"], ["Cup!", "cat"]).tolist() == pytest.approx([10 / 4, 0])
    scores = cider(
        ["a red cup on the table", "a large dog"], ["a red cup on the table", "a red cup"]
    )
    assert (
        scores[0].item() == pytest.approx(10) and scores[1].item() == 0
    )  # "a" is in both references: no weight
    assert cider(["a cup"], ["a cup"]).tolist() == [0]  # one sample has no document frequencies
