"""The share of bad samples: at the limit it passes, above it the run is told why."""

import pytest

from rl_train.data import check_bad_fraction

REPORT = {
    "rows": 90,
    "kept": 98,
    "skipped": {"no image": 1, "bad mask RLE": 1},
    "resized_masks": 50,
}


def test_at_the_limit_is_not_above():
    check_bad_fraction(REPORT, 0, 0.02)  # 2 of 100
    check_bad_fraction(REPORT, 3, 0.05)
    check_bad_fraction(REPORT | {"skipped": {}}, 0, 0.0)


def test_above_the_limit_names_flag_and_counts():
    with pytest.raises(
        ValueError,
        match=r"^2 of 100 regions \(2.0%\) are bad, more than --max_bad_fraction 0.01: "
        r"no image: 1, bad mask RLE: 1; mend them, or raise the flag to skip them$",
    ):
        check_bad_fraction(REPORT, 0, 0.01)
    with pytest.raises(
        ValueError,
        match=r"^5 of 100 .* 0.04: damaged when decoded: 3, no image: 1, bad mask RLE: 1; mend",
    ):
        check_bad_fraction(REPORT, 3, 0.04)
