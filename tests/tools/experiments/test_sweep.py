"""The sweep: arms are the demo's flags with changes, runs are resumed or skipped."""

from types import SimpleNamespace

import pytest

from rl_train.cli import build_parser, parse
from rl_train.rewards.ablations import ablations_of
from rl_train.tasks import TASKS
from tests.runs import ROOT
from tests.tools.experiments.test_sweep_table import finished
from tools.experiments import sweep


def test_the_arms_start_from_the_flags_of_the_launcher():
    launcher = (ROOT / "run_rl_train.sh").read_text().replace("\\\n", " ")
    points = f"{sweep.OF_POINTS.split(' --model_path')[0]} {sweep.POINTS}"
    for demo, flags in zip(launcher.split("elif"), (sweep.DEMO, points), strict=True):
        pairs = dict(zip(flags.split()[::2], flags.split()[1::2]))
        assert len(pairs) > 7
        words = demo.split()
        for flag, value in pairs.items():
            assert words[words.index(flag) + 1] == value, flag


def test_every_arm_is_flags_that_the_run_knows(tmp_path):
    parser, demo = build_parser(TASKS), tmp_path / "a b"
    found = {
        arm: parser.parse_args(
            sweep.command(arm, 3, demo, tmp_path / "out", ["--max_steps", "7"])[3:]
        )
        for arm in sweep.ARMS
    }
    for arm, args in found.items():
        assert args.seed == 3 and args.max_steps == 7 and args.output_dir == str(tmp_path / "out")
        points = arm in sweep.POINT_ARMS
        assert args.data_dir == f"{demo}/train"
        assert args.model_path == f"{demo}/{'qwen' if points else 'checkpoint'}"
        assert args.sam_path == (f"{demo}/sam" if points else None)
        assert args.tasks == ["point_segmentation"] or not points
        of_policy = arm == "both" or arm.startswith(("loop2", "referring"))
        assert args.mask_loss_coef == (0 if of_policy else 0.1)
        assert len(args.tasks) == (2 if arm in ("both", "defaults") else 1)
    controls = {
        arm: args.ablation_reward for arm, args in found.items() if args.ablation_reward != "none"
    }
    assert [arm for arm, args in found.items() if args.scale_components] == ["loop2_scaled"]
    of_points = {f"points_{c}": c for c in ablations_of("points") if c != "hidden"}
    of_loops = {f"{loop}_{c}": c for loop in sweep.LOOPS for c in ablations_of(loop)}
    assert controls == of_loops | of_points
    assert found["defaults"].reward_weights == [] and found["defaults"].latent_std == "auto"


def test_on_the_lab_a_task_trains_on_its_part_of_the_scenes(tmp_path, monkeypatch):
    parser, base, lab = build_parser(TASKS), tmp_path / "0", tmp_path / "lab"
    parts = dict(loop1="regions", loop2_length="phrases")
    parts |= dict(captioning="captioned", referring="segmented")
    for arm, part in parts.items():
        line = sweep.command(arm, 3, base, tmp_path / "out", ["--dtype", "float32"], lab)
        args = parser.parse_args(line[3:])
        assert args.model_path == f"{base}/base" and args.subsets == [part]
        assert args.data_dir == f"{lab}/train" and args.eval_data_dir == f"{lab}/heldout"
        assert args.dtype == "float32" and args.batch_size == 16 and args.attributes is None
    how = f"--lab {lab} --seeds 0 --output {tmp_path}/o"
    with pytest.raises(SystemExit, match="--arms both: not with --lab"):
        sweep.main(f"--arms both --demos {base} {how}".split())
    with pytest.raises(SystemExit, match="--lab: name the bases in --demos"):
        sweep.main(f"--arms loop1 {how}".split())
    lines = []

    def run(line, **kwargs):
        lines.append(line)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(sweep.subprocess, "run", run)
    with pytest.raises(SystemExit, match="loop1 0 seed 0: exit status 1"):
        sweep.main(f"--arms loop1 --demos {base} {how}".split())
    assert f"{base}/base" in lines[0] and f"{lab}/train" in lines[0] and "regions" in lines[0]


def test_flags_for_all_arms_stand_behind_two_dashes():
    line = (
        "--arms loop1 --output o --metrics seg_iou cycle_iou -- --max_steps 80 --scale_components"
    )
    args = sweep.build_parser().parse_args(line.split())
    assert args.extra == ["--max_steps", "80", "--scale_components"]
    assert args.metrics == ["seg_iou", "cycle_iou"]


def test_a_complete_run_is_not_run_again_a_killed_one_is_resumed_and_one_of_other_flags_refused(
    tmp_path, monkeypatch
):
    demos, output = [tmp_path / "one", tmp_path / "two"], tmp_path / "sweep"
    for demo in demos:
        for name in ("checkpoint", "train", "heldout"):
            (demo / name).mkdir(parents=True)

    def flags(demo, seed, *extra):
        folder = output / "loop1" / demo.name / f"seed{seed}"
        return parse(sweep.command("loop1", seed, demo, folder, list(extra))[3:]).flags

    def made(demo, seed, after, steps=160, *extra):
        folder = output / "loop1" / demo.name / f"seed{seed}"
        finished(folder, [0.0], after, [0.5] * 8, steps, flags(demo, seed, *extra))

    one, two = demos
    made(one, 0, [0.1])
    made(two, 0, None)
    made(one, 1, [0.1], 20, "--max_steps", "20")
    lines = []

    def run(line, env, **kwargs):
        lines.append(line)
        assert env["CUDA_VISIBLE_DEVICES"] == "" and env["OMP_NUM_THREADS"] == "1"
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(sweep.subprocess, "run", run)
    how = ["--arms", "loop1", "--seeds", "0", "1", "--jobs", "1", "--output", str(output)]
    with pytest.raises(SystemExit) as stopped:
        sweep.main([*how, "--demos", *map(str, demos)])
    faults = str(stopped.value).split("; ")
    assert len(faults) == 3
    assert "loop1 two seed 0: exit status 1, see" in faults[0]
    assert "--max_steps was 20, now 160" in faults[1] and "one/seed1" in faults[1]
    assert "loop1 two seed 1" in faults[2]
    assert len(lines) == 2 and lines[0][-1] == "--resume" and "--resume" not in lines[1]
    assert f"{two}/train" in lines[0] and str(output / "loop1" / "two" / "seed1") in lines[1]


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--output", "typo"], "typo: no such folder"),
        (["--output", ".", "--demos", "a/demo", "b/demo"], "--demos: 2 folders are called demo"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, monkeypatch, argv, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=sentence):
        sweep.main(argv)


def test_the_tables_are_printed_and_kept(tmp_path, capsys):
    for arm, gain in (("loop1", 0.3), ("loop1_length", 0.1)):
        finished(tmp_path / arm / "one" / "seed0", [0.0], [gain], [0.5] * 2)
    sweep.main(["--output", str(tmp_path), "--against", "loop1_length"])
    printed = capsys.readouterr().out
    assert "| `loop1` | 1 | +0.300 ± inf |" in printed and "Minus `loop1_length`" in printed
    assert (tmp_path / "table.json").is_file()
    with pytest.raises(SystemExit, match="sweep: --metrics seg_iuo: no run in .*seg_iou"):
        sweep.main(["--output", str(tmp_path), "--metrics", "seg_iuo"])
