"""docs/points.md: it names what a user may set, and what curves and tables show."""

import dataclasses

from rl_train.evaluation.point_metrics import METRICS
from rl_train.points.parser import COORDINATE_SCALES, NEGATIVE_POINTS, REASONS, REPAIRS, STYLES
from rl_train.rewards.published_points import REWARD_SETS
from rl_train.tasks.point_segmentation import PointSegmentation
from tests.runs import ROOT

TEXT = (ROOT / "docs" / "points.md").read_text()
OF_ANSWERS = {"point_weight", "max_points"}  # whose help says all


def test_every_value_and_reason_is_named():
    shown = ("points_in_target", "neg_in_target", "neg_in_confused", "num_negative")
    parts = [part for _, names in REWARD_SETS.values() for part in names]
    for word in (
        *REASONS,
        *REPAIRS,
        *REWARD_SETS,
        *parts,
        *STYLES,
        *NEGATIVE_POINTS,
        *COORDINATE_SCALES,
        *METRICS,
        *shown,
    ):
        assert f"`{word}`" in TEXT or f" {word}`" in TEXT, word


def test_every_flag_is_named():
    for field in dataclasses.fields(PointSegmentation.Options):
        name = field.metadata["name"] or field.name
        assert f"`--{name}" in TEXT or f"+ --{name}" in TEXT or name in OF_ANSWERS, name
