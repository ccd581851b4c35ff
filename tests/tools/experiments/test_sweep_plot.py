"""The picture of a sweep's runs, of values that are written here."""

import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from tools.experiments import sweep
from tools.experiments.sweep_plot import SPAN, draw

pytest.importorskip("matplotlib")
TAG = "loop1/on_target"


def finished(folder, values):
    """Write a run's folder that logged these values, with the files that make it complete."""
    (folder / "evaluation").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(max_steps=len(values))))
    for step in (0, len(values)):
        (folder / "evaluation" / f"step_{step}.json").write_text("{}")
    with SummaryWriter(str(folder / "tensorboard")) as log:
        for step, value in enumerate(values):
            log.add_scalar(TAG, value, step)


def test_a_line_is_the_mean_over_runs_and_a_point_that_of_a_span_of_steps(tmp_path):
    for demo, level in (("one", 0.25), ("two", 0.75)):
        steps = [level - 0.25] * (SPAN // 2) + [level + 0.25] * (SPAN // 2)  # mean: level
        finished(tmp_path / "loop1" / demo / "seed0", steps + [level] * SPAN + [100.0])
    finished(tmp_path / "loop1_area" / "one" / "seed0", [0.125] * 2 * SPAN)
    (axes,) = draw(tmp_path, TAG, []).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn == {
        "loop1 (n = 2)": [[SPAN / 2, 0.5], [SPAN * 3 / 2, 0.5]],
        "loop1_area (n = 1)": [[SPAN / 2, 0.125], [SPAN * 3 / 2, 0.125]],
    }
    (axes,) = draw(tmp_path, TAG, ["loop1_area"]).axes
    assert [line.get_label() for line in axes.lines] == ["loop1_area (n = 1)"]
    low, high = axes.get_ylim()
    assert low < 0.125 < high


@pytest.mark.parametrize(
    "tag, arms, sentence",
    [
        ("loop1/on_targt", [], "--plot loop1/on_targt: .*seed0 logged no such value"),
        (TAG, ["points"], "--plot: arm points has no complete run"),
        (TAG, ["loop1_area"], f"--plot {TAG}: .* has 3 steps, fewer than {SPAN}"),
        (TAG, [], f"--plot {TAG}: runs of loop1 differ in length"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path, tag, arms, sentence):
    finished(tmp_path / "loop1" / "one" / "seed0", [0.0] * SPAN)
    finished(tmp_path / "loop1" / "two" / "seed0", [0.0] * 2 * SPAN)
    finished(tmp_path / "loop1_area" / "one" / "seed0", [0.0] * 3)
    with pytest.raises(ValueError, match=sentence):
        draw(tmp_path, tag, arms)


def test_without_matplotlib_the_flag_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--plot: matplotlib is not installed"):
        sweep.main(["--output", str(tmp_path), "--plot", TAG, str(tmp_path / "p.png")])
