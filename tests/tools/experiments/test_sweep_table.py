"""The sweep's tables, of complete runs, by hand."""

import json
import math

import pytest

from tools.experiments.sweep import METRICS
from tools.experiments.sweep_table import interval, markdown, measures, summary, t_quantile

FOUR = list(METRICS)


def finished(folder, before, after, rewards, steps=2, config=None):
    """A run's folder as `rl_train.train` leaves it; without `after`, one that was killed.

    Before and after are the values of all metrics on each held-out region.
    """
    (folder / "evaluation").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    config = dict(max_steps=steps, num_generations=2) | (config or {})
    (folder / "config.json").write_text(json.dumps(config))
    for step, values in ((0, before), (steps, after)):
        if values is not None:
            record = dict(
                values=dict.fromkeys(FOUR, values),
                means=dict.fromkeys(FOUR, sum(values) / len(values)),
            )
            (folder / "evaluation" / f"step_{step}.json").write_text(json.dumps(record))
    lines = [json.dumps(dict(task="loop1", reward=reward)) for reward in rewards]
    (folder / "rollouts" / "rank0.jsonl").write_text("".join(line + "\n" for line in lines))


def test_the_table_by_hand(tmp_path):
    """Two demos and two seeds that gain .1 to .4; a killed run does not count."""
    for number, gain in enumerate((0.1, 0.2, 0.3, 0.4)):
        folder = tmp_path / "arm" / f"demo{number // 2}" / f"seed{number % 2}"
        finished(folder, [0.0, 0.4], [gain, 0.4 + gain], [0.5, 0.5, 0.1, 0.2])
    finished(tmp_path / "arm" / "demo0" / "seed3", [0.0, 0.4], None, [0.5, 0.5])
    finished(tmp_path / "killed" / "demo0" / "seed0", [0.0, 0.4], None, [0.5, 0.5])
    found = summary(tmp_path, FOUR, [])
    assert set(found["arms"]) == {"arm"} and found["arms"]["arm"]["num_runs"] == 4
    assert found["arms"]["arm"]["zero_std"] == {"loop1": 0.5}
    assert found["before"] == pytest.approx(dict.fromkeys(FOUR, 0.2))
    cell = found["arms"]["arm"]["seg_iou"]
    assert cell["mean"] == pytest.approx(0.25)
    assert cell["half"] == pytest.approx(3.182 * (0.05 / 3) ** 0.5 / 2, rel=1e-3)  # t of 3
    assert cell["runs"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    lines = markdown(found, FOUR).split("\n")[-4:]
    assert lines[0] == f"| arm | runs | {' | '.join(FOUR)} | zero std |"
    assert lines[1] == "|---" * 7 + "|"
    assert lines[2] == "| *before* |  | 0.200 | 0.200 | 0.200 | 0.200 |  |"
    # Of the demos' means, .15 and .35: t of 1 degree of freedom times .1.
    assert lines[3].startswith("| `arm` | 4 | +0.250 ± 0.205, ± 1.271 over 2 | ")
    assert lines[3].endswith(" | loop1 0.50 |")


def test_differences_are_paired_by_demo_and_seed(tmp_path):
    """Gains that differ by demo, the control's .1 and .12 below; what has no partner is left out.

    Unpaired, the interval of the difference would be twenty times as wide.
    """
    gains = {("a", 0): 0.1, ("b", 0): 0.5, ("b", 1): 0.3}
    less = {("a", 0): 0.1, ("b", 0): 0.12}
    for (demo, seed), gain in gains.items():
        finished(tmp_path / "arm" / demo / f"seed{seed}", [0.1], [0.1 + gain], [0.5] * 2)
    for (demo, seed), lost in less.items():
        gain = gains[demo, seed] - lost
        finished(tmp_path / "plain" / demo / f"seed{seed}", [0.1], [0.1 + gain], [0.5] * 2)
    finished(tmp_path / "apart" / "c" / "seed0", [0.1], [0.2], [0.5] * 2)
    found = summary(tmp_path, ["seg_iou"], ["plain"])
    assert list(found["against"]["plain"]) == ["arm"]
    pairs = found["against"]["plain"]["arm"]
    assert pairs["num_runs"] == 2 and pairs["seg_iou"]["mean"] == pytest.approx(0.11)
    half = 12.706 * (0.02 / 2**0.5) / 2**0.5
    assert pairs["seg_iou"]["half"] == pytest.approx(half, rel=1e-3)
    lines = markdown(found, ["seg_iou"]).split("\n")[-3:]
    assert lines == [
        "| arm | pairs | seg_iou |",
        "|---|---|---|",
        "| `arm` | 2 | +0.110 ± 0.127, ± 0.127 over 2 |",
    ]
    with pytest.raises(ValueError, match="--against loop9: .* but of apart, arm, plain"):
        summary(tmp_path, ["seg_iou"], ["loop9"])


def test_demos_of_one_checkpoint_count_once(tmp_path):
    """Three demos, two of them with the same checkpoint by its digest; gains .1, .3 and .6."""
    for number, (base, gain) in enumerate((("x", 0.1), ("x", 0.3), ("y", 0.6))):
        folder = tmp_path / "arm" / f"demo{number}" / "seed0"
        finished(folder, [0.0], [gain], [0.5] * 2)
        file = folder / "evaluation" / "step_0.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(settings=dict(base=base))))
    over = summary(tmp_path, ["seg_iou"], [])["arms"]["arm"]["seg_iou"]["over_checkpoints"]
    assert over["runs"] == pytest.approx([0.2, 0.6]) and over["mean"] == pytest.approx(0.4)
    assert over["half"] == pytest.approx(12.706 * 0.2, rel=1e-3)


def test_any_measure_of_the_evaluations(tmp_path):
    """Its mean if there is one, else that of its values where it is known."""
    for seed, hit in enumerate(("[1, 0, NaN, 1]", "[NaN]")):
        finished(tmp_path / "arm" / "demo" / f"seed{seed}", [0.2], [0.3], [0.5] * 2)
        for step, ciou in ((0, 0.25), (2, 0.5)):
            file = tmp_path / "arm" / "demo" / f"seed{seed}" / "evaluation" / f"step_{step}.json"
            file.write_text(
                f'{{"means": {{"seg_ciou": {ciou}}}, "values": {{"hit": {hit}, "union": [4]}}}}'
            )
    assert measures(file) == {"union": 4, "seg_ciou": 0.5}
    found = summary(tmp_path, ["seg_ciou", "hit"], ["arm"])
    assert found["before"] == pytest.approx({"seg_ciou": 0.25, "hit": 2 / 3})
    assert found["arms"]["arm"]["seg_ciou"]["mean"] == 0.25
    line = "| `arm` | 2 | +0.250 ± 0.000 | +0.000 ± inf (1) | loop1 1.00 |"
    assert line in markdown(found, ["seg_ciou", "hit"]).split("\n")
    with pytest.raises(ValueError, match="--metrics colour: no run in .*, but .*seg_ciou"):
        summary(tmp_path, ["colour"], [])


def test_student_s_t():
    """Quantiles of printed tables; the normal distribution's at the end."""
    known = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 29: 2.045, 10**5: 1.960}
    for freedom, quantile in known.items():
        assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-4), freedom
    assert interval([0.5])["half"] == math.inf and math.isnan(interval([math.nan])["mean"])
