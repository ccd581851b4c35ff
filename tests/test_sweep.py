"""The sweep: arms are the demo's flags with changes, runs are resumed or skipped, and its table is
of complete runs."""

import json
from types import SimpleNamespace

import pytest

from rl_train.cli import build_parser, parse
from rl_train.tasks import TASKS
from tests.runs import ROOT
from tools import sweep


def test_the_arms_start_from_the_flags_of_the_launcher():
    launcher = (ROOT / "run_rl_train.sh").read_text().replace("\\\n", " ").split()
    pairs = dict(zip(sweep.DEMO.split()[::2], sweep.DEMO.split()[1::2]))
    assert len(pairs) > 8
    for flag, value in pairs.items():
        assert launcher[launcher.index(flag) + 1] == value, flag


@pytest.mark.parametrize("arm", sweep.ARMS)
def test_every_arm_is_flags_that_the_run_knows(arm, tmp_path):
    line = sweep.command(arm, 3, tmp_path, tmp_path / "out", ["--max_steps", "7"])
    args = build_parser(TASKS).parse_args(line[3:])
    assert args.seed == 3 and args.max_steps == 7 and args.output_dir == str(tmp_path / "out")


def finished(folder, before, after, rewards, steps=2, config=None):
    """A run's folder as `rl_train.train` leaves it; without `after`, one that was killed."""
    (folder / "evaluation").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    (folder / "config.json").write_text(
        json.dumps(dict(max_steps=steps, num_generations=2) | (config or {}))
    )
    for step, values in ((0, before), (steps, after)):
        if values is not None:
            (folder / "evaluation" / f"step_{step}.json").write_text(
                json.dumps(
                    dict(
                        values=dict.fromkeys(
                            ("cycle_iou", "cycle_meteor", "seg_iou", "caption_meteor"), values
                        )
                    )
                )
            )
    (folder / "rollouts" / "rank0.jsonl").write_text(
        "".join(json.dumps(dict(task="loop1", reward=r)) + "\n" for r in rewards)
    )


def test_the_table_by_hand(tmp_path, capsys):
    """Three seeds that gain .1, .2 and .3 on two regions each; a killed run does not count."""
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        finished(
            tmp_path / "arm" / f"seed{seed}", [0.0, 0.4], [gain, 0.4 + gain], [0.5, 0.5, 0.1, 0.2]
        )
    finished(tmp_path / "arm" / "seed3", [0.0, 0.4], None, [0.5, 0.5])
    finished(tmp_path / "killed" / "seed0", [0.0, 0.4], None, [0.5, 0.5])
    found = sweep.table(tmp_path)
    assert set(found) == {"arm"} and found["arm"]["runs"] == 3
    assert found["arm"]["zero_std"] == {"loop1": 0.5}
    cell = found["arm"]["seg_iou"]
    assert cell["mean"] == pytest.approx(0.2) and cell["before"] == pytest.approx(0.2)
    assert cell["half"] == pytest.approx(
        4.303 * 0.1 / 3**0.5, rel=1e-3
    )  # Student's t of 2 degrees of freedom
    assert cell["regions"] == pytest.approx((0.2, 0.2))  # both regions gain the same
    assert "arm" in capsys.readouterr().out


def test_a_complete_run_is_not_run_again_a_killed_one_is_resumed_and_one_of_other_flags_refused(
    tmp_path, monkeypatch
):
    demo, output = tmp_path / "demo", tmp_path / "sweep"
    for name in ("checkpoint", "train", "heldout"):
        (demo / name).mkdir(parents=True)

    def flags(seed, *extra):
        folder = output / "loop1" / f"seed{seed}"
        return parse(sweep.command("loop1", seed, demo, folder, list(extra))[3:]).flags

    finished(output / "loop1" / "seed0", [0.0], [0.1], [0.5] * 8, 120, flags(0))
    finished(output / "loop1" / "seed1", [0.0], None, [0.5] * 8, 120, flags(1))
    finished(output / "loop1" / "seed2", [0.0], [0.1], [0.5] * 8, 20, flags(2, "--max_steps", "20"))
    lines = []

    def run(line, env, **kwargs):
        lines.append(line)
        assert env["CUDA_VISIBLE_DEVICES"] == "" and env["OMP_NUM_THREADS"] == "1"
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(sweep.subprocess, "run", run)
    with pytest.raises(SystemExit) as stopped:
        sweep.main(
            [
                "--arms",
                "loop1",
                "--seeds",
                "0",
                "1",
                "2",
                "3",
                "--jobs",
                "1",
                "--demo",
                str(demo),
                "--output",
                str(output),
            ]
        )
    faults = str(stopped.value).split("; ")
    assert len(faults) == 3
    assert (
        "seed 1: exit status 1, see" in faults[0]
        and "--max_steps was 20, now 120" in faults[1]
        and "seed 3" in faults[2]
    )
    assert len(lines) == 2 and lines[0][-1] == "--resume" and "--resume" not in lines[1]


def test_an_output_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--output", str(tmp_path / "typo")])
    assert "typo: no such folder" in capsys.readouterr().err
