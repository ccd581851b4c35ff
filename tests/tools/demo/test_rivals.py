"""The table of cheap causes that a demo ends with, and what it says that a run shows."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.runs import CHECKPOINT, on_one_core, run_unmeasured
from tools.demo import rivals, train
from tools.demo.rivals import Gain, gain, main, moved_points, picked, table, verdict
from tools.experiments.gauntlet import points
from tools.experiments.gauntlet.table import LoopResult, Rival

one_core = pytest.fixture(autouse=True)(on_one_core)


def of(name: str, change: float, n: int = 20) -> Gain:
    """A gain of about `change` on each of n regions."""
    noise = [0.01 * (k % 2) for k in range(n)]
    return gain(name, [0.2] * n, [0.2 + change + each for each in noise])


def test_a_gain_below_a_cheap_cause_is_no_learning():
    own, causes = {"cycle_iou": of("this run", 0.1)}, {"cycle_iou": [of("table", 0.2), of("b", 0)]}
    lines = ["cycle IoU rises, not shown to exceed: table.", rivals.WORKS]
    assert verdict(own, causes) == lines
    head, title, mine, first, second = table(own, causes)
    assert title == "cycle IoU" and mine.split()[:3] == ["this", "run", "0.2000"]
    assert first.split()[0] == "table" and second.split()[0] == "b"  # the strongest first


def test_a_gain_above_all_cheap_causes_is_more_than_they_give():
    own = {"cycle_iou": of("this run", 0.3)}
    causes = {"cycle_iou": [of("table", 0.2), of("best of 8", 0.1)]}
    shows = rivals.LEARNT.format("cycle IoU")
    lines = ["cycle IoU rises by more than these untrained causes.", shows]
    assert verdict(own, causes) == lines
    # A second metric that does not exceed its causes takes nothing of that back.
    own["seg_iou"] = of("this run", 0.1)
    other = "IoU of a true caption's mask rises, not shown to exceed: area."
    for order in (1, -1):
        both = dict([*causes.items(), ("seg_iou", [of("area", 0.1)])][::order])
        assert verdict(own, both) == [*[lines[0], other][::order], shows]
    own["seg_iou"] = of("this run", 0.3)
    assert ", in IoU of a true caption's mask and cycle IoU." in verdict(own, both)[-1]


def test_a_run_that_gains_nothing_shows_nothing():
    own = {"seg_iou": gain("this run", [0.2] * 20, [0.2] * 20)}
    lines = verdict(own, {"seg_iou": [of("area", -0.1)]})
    assert lines == ["IoU of a true caption's mask is not shown to rise.", rivals.SHOWS_NOTHING]


def test_picks_of_samples_are_counted_from_the_greedy_answers():
    """Their direction is that of the training regions, the smallest area."""
    scores = dict(iou=torch.tensor([[0.9, 0.1], [0.2, 0.7]]), area=torch.tensor([[1.0, 5], [8, 2]]))
    heldout = dict(
        iou=torch.tensor([[0.6, 0.5], [0.3, 0.4]]), area=torch.tensor([[7.0, 3], [1, 9]])
    )
    (found,) = picked(scores, heldout, ("area",), [0.5, 0.1])
    assert found.name == f"best of {rivals.G} by area (smallest)"
    assert found.before.tolist() == pytest.approx([0.5, 0.1])
    assert found.after.tolist() == pytest.approx([0.5, 0.3])


def test_a_finished_run_of_the_loops_is_compared(data, tmp_path, monkeypatch, capsys):
    """The regions are the run's own held-out ones, in the order of its evaluations."""
    monkeypatch.setattr(rivals, "NUM_REGIONS", 4)
    monkeypatch.setattr(rivals, "G", 2)
    monkeypatch.setattr(rivals, "NUM_SHOWN", 9)
    monkeypatch.setattr(rivals, "VARIANTS", ("threshold of the mask",))
    changed = dict(max_steps=1, eval_samples=3, latent_std=1, max_completion_length=24)
    run = run_unmeasured(data, tmp_path / "run", **changed)
    main(["--run", str(run)])
    printed = capsys.readouterr().out
    assert (run / rivals.FILE).read_text() in printed
    for cause in ("one word for each set of confused words", "threshold of the mask"):
        assert cause in printed
    for score in (*rivals.CAPTION_SCORES, *rivals.MASK_SCORES):
        assert f"best of 2 by {score} (" in printed
    assert "chosen on 4 training regions" in printed and "What this shows: " in printed
    record = json.loads((run / "evaluation" / "step_0.json").read_text())
    lines = [line.split() for line in printed.splitlines() if "this run" in line]
    means = [sum(record["values"][name]) / 3 for name in rivals.TITLES]
    assert [float(line[2]) for line in lines] == pytest.approx(means, abs=1e-4)
    # All causes of a metric are counted from the same greedy answers.
    titles = "|".join(rivals.TITLES.values())
    _, *sections = re.split(f"^(?:{titles})$", (run / rivals.FILE).read_text(), flags=re.M)
    for section in sections:
        before = re.findall(r"^  (?!this run).* (\d\.\d{4})  +\d\.\d{4}  +[+-]", section, re.M)
        assert len(before) > 2 and len(set(before)) == 1
    assert len(sections) == 2


def test_a_run_that_is_not_finished_is_named(tmp_path):
    with pytest.raises(SystemExit, match=f"--run {tmp_path}: holds no finished run"):
        main(["--run", str(tmp_path)])


def test_habits_of_points_come_from_the_gauntlet(monkeypatch):
    greedy, samples = dict(iou=[0.1, 0.3]), dict(iou=[0.0, 0.2])
    found = [Rival("hidden", None, "greedy", dict(iou=[0.2, 0.3]))]
    found += [Rival("best of G by away", "largest", "samples", dict(iou=[0.5, 0.5]))]
    seen = []

    def result_of(task, training, heldout, args):
        seen.append((task.options.answer_style, args.num_generations))
        return LoopResult(greedy, samples, greedy, found)

    monkeypatch.setattr(points, "result_of", result_of)
    flags = Namespace(answer_style="points", max_completion_length=8, num_generations=4)
    policy = Namespace(coordinates="pixels")
    rule, pick = moved_points(policy, "training", "heldout", flags)
    assert seen == [("points", rivals.G)]
    assert rule.name == "hidden" and rule.before.tolist() == [0.1, 0.3]
    assert pick.name == f"best of {rivals.G} by away"
    assert pick.change() == pytest.approx(0.3)


def test_the_demo_trains_and_then_compares(data, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(train, "run_training", lambda argv: order.append("trained"))
    monkeypatch.setattr(train, "print_rivals", order.append)
    argv = ["--model_path", str(CHECKPOINT), "--data_dir", str(data / "train"), "--max_steps", "1"]
    train.main([*argv, "--output_dir", str(tmp_path / "run")])
    assert order == ["trained", Path(tmp_path / "run")]
