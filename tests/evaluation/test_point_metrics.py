"""Other negative points for the same answers; metrics, intervals and their names."""

import numpy as np
import pytest
import torch

from rl_train.evaluation.bootstrap import bootstrap, means, metrics_of, rows_of
from rl_train.evaluation.cycle_metrics import selection_score
from rl_train.evaluation.point_metrics import METRICS, random_negatives, swapped_negatives
from rl_train.evaluation.table import before_after_table
from rl_train.points.parser import PointPrompt

BOX, P = (2.0, 2.0, 6.0, 8.0), (4.0, 5.0)


def with_points(*negative) -> PointPrompt:
    return PointPrompt((BOX,), (P,), negative)


def test_negative_points_of_the_next_answers():
    """They are at the same place of another image; as many as the answer's own, if there are."""
    sizes = [(10, 20), (20, 20), (10, 40), (10, 20)]  # (H, W)
    one, two = with_points((1, 1)), with_points((4, 4), (6, 8))
    none = with_points()
    found = swapped_negatives([one, two, none, None], sizes)
    assert found == [with_points((4, 2)), with_points((1, 2)), none, None]
    found = swapped_negatives([two, one, with_points((8, 9))], sizes[:3])
    assert found[0] == with_points((1, 0.5), (4, 9))
    assert swapped_negatives([two], sizes) == [none]


def test_random_points_lie_outside_of_the_boxes():
    size = (10, 20)
    for index in range(20):
        answer = random_negatives(with_points((0, 0), (1, 1), (2, 2)), size, index)
        assert answer == random_negatives(with_points((3, 3), (1, 1), (9, 2)), size, index)
        assert answer.boxes == (BOX,) and len(set(answer.negative)) == 3
        for x, y in answer.negative:
            assert 0 <= x <= 20 and 0 <= y <= 10 and not (2 <= x <= 6 and 2 <= y <= 8)
    assert random_negatives(None, size, 0) is None and random_negatives(
        with_points((1, 1)), size, 0
    ) != random_negatives(with_points((1, 1)), size, 1)
    everywhere = PointPrompt(((0, 0, 20, 10),), (), ((1, 1),))
    assert len(random_negatives(everywhere, size, 0).negative) == 1


def test_metrics_and_the_paired_interval_of_what_negatives_add():
    rng = np.random.default_rng(0)
    without = torch.from_numpy(rng.random(200))
    gain = torch.from_numpy(0.1 + 0.05 * rng.standard_normal(200))
    values = dict(
        seg_iou=without + gain,
        seg_iou_without=without,
        gain_negative=gain,
        num_negative=torch.tensor([2.0, 0.0]).repeat(100),
        negative_in_target=torch.tensor([1.0, 0.0]).repeat(100),
        negative_in_confused=torch.tensor([0.0, 0.0]).repeat(100),
        num_positive=torch.zeros(200),
        positive_in_target=torch.zeros(200),
    )
    found = means(values)
    assert found["gain_negative"] == pytest.approx(found["seg_iou"] - found["seg_iou_without"])
    assert found["neg_in_target"] == 0.5 and found["neg_in_confused"] == 0
    assert "points_in_target" not in found  # a share of nothing
    assert found["num_negative"] == 1
    low, high = bootstrap(rows_of(values, "gain_negative"))
    assert 0.08 < low < found["gain_negative"] < high < 0.12  # though the IoUs lie in [0, 1]
    assert set(metrics_of(values)) - set(METRICS) == {"seg_iou", "seg_p50"}
    assert selection_score(dict(seg_iou=0.4, gain_negative=0.1)) == 0.4
    lines = before_after_table(values, values).splitlines()
    assert lines[0] == "evaluation split, n = 200: before and after"
    assert [line.split()[0] for line in lines].count("gain_negative") == 1
