"""Best of G by cheap scores, and the table of gains and fractions."""

import pytest
import torch

from rl_train.evaluation.best_of_n import pick_best
from tools.experiments.gauntlet.samples import choose_direction
from tools.experiments.gauntlet.table import LoopResult, Rival, markdown, summarise, verdict

MEASURES = {"iou": "cycle IoU", "found": "object found"}


def test_a_score_is_picked_by_in_the_direction_of_the_training_reward():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(50, 8, generator=generator, dtype=torch.float64)
    scores = {
        "largest": rewards * 3 + 1,
        "smallest": -rewards,
        "nearest to the mean": (1 - rewards) * torch.tensor([1.0, -1.0]).repeat(50, 4),
    }
    for direction, values in scores.items():
        pick = choose_direction("score", values, rewards)
        assert pick.direction == direction
        # Applied to other regions it picks by their scores alone.
        other = torch.tensor([[0.1, 0.9, 0.5]], dtype=torch.float64)
        best = pick_best(torch.tensor([[1.0, 2.0, 3.0]]), pick.preference(other - 0.5))
        assert best == [dict(largest=2.0, smallest=1.0).get(direction, 3.0)]


def result(cheap: list[float], greedy=(0.0, 0.2, 0.0, 0.2), best=(0.4, 0.6, 0.4, 0.6)):
    def both(values):
        return dict(iou=list(values), found=[1.0] * 4)

    rivals = [Rival("cheap", {"a": "b"}, "greedy", both(cheap))]
    return LoopResult(both(greedy), both([0.1] * 4), both(best), rivals)


def test_gains_and_fractions_by_hand():
    rows = summarise([result([0.3, 0.5, 0.3, 0.5])])
    assert [row["name"] for row in rows] == ["best of G by the true reward"] * 2 + ["cheap"]
    assert [row["baseline"] for row in rows] == ["greedy", "samples", "greedy"]
    cheap = rows[2]["measures"]["iou"]
    assert cheap["gain"] == pytest.approx(0.3) and cheap["interval"] == pytest.approx([0.3, 0.3])
    assert cheap["fraction"] == pytest.approx(0.75)
    assert rows[2]["too_much"] and not rows[0]["too_much"]
    assert not summarise([result([0.1, 0.3, 0.1, 0.3])])[2]["too_much"]
    text = markdown("Loop 1", rows, MEASURES, 1)
    assert "| **cheap** | greedy answer | 0.100 | 0.400 | +0.300 [+0.300, +0.300] |" in text
    assert "**0.75** [0.75, 0.75]" in text and "±" not in text
    assert "taken by cheap" in verdict("Loop 1", rows)


def test_without_a_gain_of_the_true_reward_there_is_no_fraction():
    rows = summarise([result([0.3, 0.5, 0.3, 0.5], best=(0.0, 0.2, 0.0, 0.2))])
    assert rows[2]["measures"]["iou"]["fraction"] is None
    assert rows[2]["too_much"]  # any gain is more than none
    assert "**the true reward gains nothing**" in markdown("Loop 1", rows, MEASURES, 1)
    nothing = result([0.0, 0.2, 0.1, 0.1], best=(0.0, 0.2, 0.0, 0.2))
    assert not summarise([nothing])[2]["too_much"]


def test_intervals_over_checkpoints_stand_beside_those_over_regions():
    """Two checkpoints with gains .3 and .1: t of one degree, 12.706 x .1 on each side."""
    rows = summarise([result([0.3, 0.5, 0.3, 0.5]), result([0.1, 0.3, 0.1, 0.3])])
    cheap = rows[2]["measures"]["iou"]
    assert cheap["gain"] == pytest.approx(0.2) and cheap["interval"] == pytest.approx([0.2, 0.2])
    assert cheap["checkpoints"]["half"] == pytest.approx(1.2706, rel=1e-3)
    assert rows[2]["chosen"] == [{"a": "b"}] * 2
    assert "± 1.271" in markdown("Loop 1", rows, MEASURES, 2)
