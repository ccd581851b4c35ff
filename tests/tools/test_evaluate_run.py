"""`tools.evaluate --run`: two checkpoints of a run, measured as the run itself measured them."""

import json
import shutil

import pytest

from rl_train.utils.io import read_json
from tests.runs import on_one_core, run
from tools import evaluate

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of two large steps that was measured before, between and after them."""
    monkeypatch = pytest.MonkeyPatch()
    for _ in on_one_core(monkeypatch):
        how = dict(learning_rate=5e-3, warmup_ratio=0, ema_decay=0.5, eval_samples=5, eval_steps=1)
        output = tmp_path_factory.mktemp("evaluated") / "run"
        run(data, output, save_steps=1, save_total_limit=0, distractors="", **how)
    monkeypatch.undo()
    return output


@pytest.fixture
def complaint(trained, capsys):
    """Function of words behind --run: the sentence with which the tool ends."""

    def said(*words, of=trained):
        with pytest.raises(SystemExit) as stopped:
            evaluate.main(["--run", str(of), *map(str, words)])
        return stopped.value.code.splitlines()[0]

    return said


def test_both_are_measured_as_the_run_measured_them(trained, tmp_path, capsys):
    """Every number of the run's own files again: base, policy and teacher."""
    files = [read_json(trained / "evaluation" / f"step_{step}.json") for step in (0, 1, 2)]
    before_run = sorted((p, p.stat().st_mtime_ns) for p in trained.rglob("*"))
    file = tmp_path / "new" / "compared.json"
    evaluate.main(["--run", str(trained), "--output", str(file)])
    said, found = capsys.readouterr().out, read_json(file)
    assert "before: base; after: checkpoint_step_2 (policy)" in said
    assert f"evaluation split of {trained}, n = 5: before and after" in said
    # As text, in which a value that was not measured (NaN) equals itself.
    values = [json.dumps(file["values"], sort_keys=True) for file in files]
    compared = [json.dumps(found[k]["values"], sort_keys=True) for k in ("before", "after")]
    assert compared == [values[0], values[2]] and values[0] != values[2]
    assert found["image_ids"] == files[0]["image_ids"] and "seg_on_target" in found["differences"]
    change = found["differences"]["cycle_iou"]
    means = [file["means"]["cycle_iou"] for file in files]
    assert change["change"] == pytest.approx(means[2] - means[0], abs=1e-9)
    assert change["interval"][0] <= change["change"] <= change["interval"][1]
    words = ["--compare", "checkpoint_step_1", "2:teacher", "--output", str(file)]
    evaluate.main(["--run", str(trained), *words, "--batch_size", "1"])
    found = read_json(file)
    assert found["compared"] == ["checkpoint_step_1 (policy)", "checkpoint_step_2 (teacher)"]
    assert found["before"]["captions"] == files[1]["captions"]
    assert found["after"]["captions"] == files[2]["teacher"]["captions"]
    # Batches of another size round differently.
    assert found["after"]["means"] == pytest.approx(files[2]["teacher"]["means"], abs=1e-4)
    assert sorted((p, p.stat().st_mtime_ns) for p in trained.rglob("*")) == before_run


def test_what_a_run_does_not_have(trained, complaint, tmp_path):
    assert complaint("--compare", "7", "2").startswith(
        f"evaluate: --compare 7: {trained} has base, 1, 2, "
    )
    assert "--compare 1:judge: " in complaint("--compare", "base", "1:judge")
    assert "--compare base:teacher: " in complaint("--compare", "base:teacher", "1")
    assert "no such flag" in complaint("--before", "x")
    said = complaint("--lora_r", 9)
    assert f"--lora_r 9: the run of --run {trained} had 4, and is measured by its own" in said
    assert "config.json is missing or damaged" in complaint(
        "--compare", "base", "base", of=tmp_path
    )


def test_another_split_is_refused(trained, complaint, data, tmp_path):
    said = complaint("--eval_data_dir", data / "train", "--train_eval_overlap", "keep")
    assert "--train_eval_overlap keep: the run of --run" in said
    moved = shutil.copytree(data / "heldout", tmp_path / "moved")
    config = read_json(trained / "config.json")
    copy = shutil.copytree(trained, tmp_path / "run")
    (copy / "config.json").write_text(json.dumps(config | dict(eval_data_dir="/gone")))
    assert "--eval_data_dir /gone: no such folder" in complaint("--compare", "1", "2", of=copy)
    evaluate.main(["--run", str(copy), "--compare", "1", "2", "--eval_data_dir", str(moved)])
    record = read_json(copy / ".rl_train_record.json")
    record["data"]["evaluation"]["rows"] = 4
    (copy / ".rl_train_record.json").write_text(json.dumps(record))
    said = complaint("--compare", "1", "2", "--eval_data_dir", moved, of=copy)
    assert "its evaluation split is another one now: rows 4 -> 5" in said
