"""Means, intervals and paired differences by hand and on known cases."""

import math

import numpy as np
import pytest
import torch

from rl_train.evaluation import bootstrap as statistics
from rl_train.evaluation.bootstrap import bootstrap, paired_difference


def test_bootstrap_of_a_known_case():
    values = torch.from_numpy(np.random.default_rng(1).normal(3, 2, 400))
    low, high = bootstrap(values)
    half = 1.96 * values.std().item() / 400**0.5
    assert low == pytest.approx(values.mean().item() - half, abs=0.03) and high == pytest.approx(
        values.mean().item() + half, abs=0.03
    )
    assert bootstrap(values) == (low, high) != bootstrap(values, seed=1)
    assert bootstrap(torch.full((5,), 0.25)) == (0.25, 0.25)
    low, high = bootstrap(
        torch.tensor([0.0] * 50 + [1.0] * 50), num_resamples=5000
    )  # binomial: standard deviation .05
    assert low == pytest.approx(0.40, abs=0.011) and high == pytest.approx(0.60, abs=0.011)


def test_one_row_has_no_interval():
    assert bootstrap(torch.tensor([0.25])) == (0.25, 0.25)
    assert bootstrap(torch.tensor([[1.0, 4.0]])) == (0.25, 0.25)
    assert paired_difference(torch.tensor([0.25]), torch.tensor([1.0])) == (0.75, 0.75, 0.75)


def test_bootstrap_of_ciou_resamples_samples():
    equal = torch.tensor([[1.0, 2.0]] * 10)
    assert bootstrap(equal) == (0.5, 0.5)
    low, high = bootstrap(torch.tensor([[0.0, 1.0], [90.0, 100.0]]))
    assert (low, high) == (0.0, 0.9)  # both draws are one sample in a quarter of the cases each
    assert statistics.statistic(torch.tensor([[0.0, 1.0], [90.0, 100.0]])) == pytest.approx(
        90 / 101
    )


def test_a_ratio_of_which_a_resample_may_have_nothing():
    """One of two rows counts: a quarter of the resamples have none, the others say 1."""
    assert bootstrap(torch.tensor([[1.0, 1.0], [0.0, 0.0]])) == (1, 1)
    assert math.isnan(statistics.statistic(torch.zeros(3, 2)))
    said = dict(color_known=torch.ones(2), color_said=torch.zeros(2), color_right=torch.zeros(2))
    assert set(statistics.means(said)) == {"color_accuracy", "color_stated"}


def test_paired_difference_is_narrower_than_its_parts():
    before = torch.from_numpy(np.random.default_rng(0).random(200))
    after = before + 0.01
    assert paired_difference(before, after) == pytest.approx((0.01, 0.01, 0.01))
    low, high = bootstrap(before)
    assert high - low > 0.05
    change, low, high = paired_difference(
        torch.tensor([[10.0, 20.0]] * 4), torch.tensor([[15.0, 20.0]] * 4)
    )
    assert (change, low, high) == (0.25, 0.25, 0.25)
