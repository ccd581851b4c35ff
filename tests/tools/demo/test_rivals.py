"""The table of cheap causes that a demo ends with, and what it says that a run shows."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from tests.runs import CHECKPOINT, on_one_core, run_unmeasured
from tools.demo import rivals, train
from tools.demo.rivals import Gain, gain, main, moved_points, table, verdict
from tools.experiments.gauntlet import points
from tools.experiments.gauntlet.table import LoopResult, Rival

one_core = pytest.fixture(autouse=True)(on_one_core)


def of(name: str, change: float, n: int = 20) -> Gain:
    """A gain of about `change` on each of n regions."""
    noise = [0.01 * (k % 2) for k in range(n)]
    return gain(name, [0.2] * n, [0.2 + change + each for each in noise])


def test_a_gain_below_a_cheap_cause_is_no_learning():
    own, causes = {"cycle_iou": of("this run", 0.1)}, {"cycle_iou": [of("table", 0.2), of("b", 0)]}
    assert verdict(own, causes)[0] == "cycle IoU rises, not shown to exceed: table."
    assert "the loop working, not learning" in verdict(own, causes)[1]
    head, title, mine, first, second = table(own, causes)
    assert title == "cycle IoU" and mine.split()[:3] == ["this", "run", "0.2000"]
    assert first.split()[0] == "table" and second.split()[0] == "b"  # the strongest first


def test_a_gain_above_all_cheap_causes_is_no_proof_on_a_base_with_injected_mistakes():
    own = {"cycle_iou": of("this run", 0.3)}
    own["seg_iou"] = gain("this run", [0.2] * 20, [0.2] * 20)
    causes = {"cycle_iou": [of("table", 0.2)], "seg_iou": [of("area", -0.1)]}
    first, second, last = verdict(own, causes)
    assert first == "cycle IoU rises by more than these untrained causes."
    assert second == "IoU of a true caption's mask is not shown to rise."
    assert "not learning" in last and "by hand" in last
    nothing = verdict({"seg_iou": own["seg_iou"]}, {"seg_iou": causes["seg_iou"]})
    assert nothing == [second, rivals.SHOWS_NOTHING]


def test_a_finished_run_of_the_loops_is_compared(data, tmp_path, monkeypatch, capsys):
    """The regions are the run's own held-out ones, in the order of its evaluations."""
    monkeypatch.setattr(rivals, "NUM_REGIONS", 4)
    monkeypatch.setattr(rivals, "G", 2)
    monkeypatch.setattr(rivals, "VARIANTS", ("threshold of the mask",))
    changed = dict(max_steps=1, eval_samples=3, latent_std=1, max_completion_length=24)
    run = run_unmeasured(data, tmp_path / "run", **changed)
    main(["--run", str(run)])
    printed = capsys.readouterr().out
    assert (run / rivals.FILE).read_text() in printed and "n = 3" in printed
    assert (
        "one word for each set of confused words" in printed
        and "best of 2 by confidence" in printed
    )
    assert "chosen on 4 training regions" in printed and "What this shows: " in printed
    record = json.loads((run / "evaluation" / "step_0.json").read_text())
    lines = [line.split() for line in printed.splitlines() if "this run" in line]
    means = [sum(record["values"][name]) / 3 for name in rivals.TITLES]
    assert [float(line[2]) for line in lines] == pytest.approx(means, abs=1e-4)


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
    assert pick.name == "best of 8 by away, against the mean"
    assert pick.change() == pytest.approx(0.4)


def test_the_demo_trains_and_then_compares(data, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(train, "run_training", lambda argv: order.append("trained"))
    monkeypatch.setattr(train, "print_rivals", order.append)
    argv = ["--model_path", str(CHECKPOINT), "--data_dir", str(data / "train"), "--max_steps", "1"]
    train.main([*argv, "--output_dir", str(tmp_path / "run")])
    assert order == ["trained", Path(tmp_path / "run")]
