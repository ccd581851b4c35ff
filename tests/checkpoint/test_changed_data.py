"""A resume with other data is refused by the flag's name, or accepted by a flag that says so."""

import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pytest

from rl_train.checkpoint import save_load
from rl_train.checkpoint.record import RECORD
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.evaluation import evaluate
from rl_train.utils.io import read_json, write_json
from tests.runs import draw_data, rollouts, run, unmeasured
from tools.demo.make_demo import HELDOUT, TRAIN, write_split

one_core = pytest.fixture(autouse=True)(unmeasured)
RUN = dict(max_steps=2, save_steps=1, save_total_limit=0, eval_steps=1, eval_samples=8)
RUN |= dict(loop2_weight=0)


@pytest.fixture(scope="module")
def begun(data, tmp_path_factory):
    """A run of two steps, as it was after the first: {whether it has --eval_data_dir: folder}."""
    monkeypatch, folders = pytest.MonkeyPatch(), {}
    for _ in unmeasured(monkeypatch):
        for has_eval in (True, False):
            how = {} if has_eval else dict(eval_data_dir=None)
            output = run(data, tmp_path_factory.mktemp("begun"), **RUN | how)
            shutil.rmtree(output / "checkpoint_step_2")
            (output / "evaluation" / "step_2.json").unlink()
            folders[has_eval] = output
    monkeypatch.undo()
    return folders


def shards(folder):
    return sorted(folder.rglob("*.arrow"))


def rewrite(folder, change):
    """Write every shard's table anew, as `change` makes it of the old one."""
    for path in shards(folder):
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_stream(source).read_all()
            rows = pa.Table.from_pylist(table.to_pylist(), schema=table.schema)
        rows = change(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)


def edited(table, row, edit):
    """The table with one row that `edit` has changed in place."""
    rows = table.to_pylist()
    edit(rows[row])
    return pa.Table.from_pylist(rows, schema=table.schema)


def say_otherwise(row):
    row["conversations"][-1]["value"] = "another thing"


def flip(row):
    """A mask of the other regions' rows: the same image, other runs."""
    counts = row["mask_rle"]["counts"]
    row["mask_rle"]["counts"] = counts[:-2] + counts[-1] + counts[-2]


def fewer(count):
    return lambda table: table.slice(0, table.num_rows - count)


def swapped(table):
    order = np.arange(table.num_rows)
    order[[0, -1]] = order[[-1, 0]]
    return table.take(pa.array(order))


def repaint(row):
    """Another image: a picture of the same size, whose file ends otherwise."""
    row["image"]["bytes"] = row["image"]["bytes"] + b"\0"


# {name: (folder, its change, what the sentence says)}
SHARD_CHANGES = {
    "a row fewer": ("train", fewer(1), r"--data_dir .*: rows 84 -> 83"),
    "many rows fewer": ("train", fewer(40), r"--data_dir .*: rows 84 -> 44, images 20 -> 1\d"),
    "one row left out in front": ("train", lambda t: t.slice(1), r"--data_dir .*: rows 84 -> 83"),
    "two rows in another order": ("train", swapped, r"--data_dir .*84 rows as before, but other"),
    "a caption": ("train", lambda t: edited(t, 5, say_otherwise), "but other captions"),
    "the last caption": ("train", lambda t: edited(t, -1, say_otherwise), "but other captions"),
    "an image": ("train", lambda t: edited(t, 0, repaint), r"--data_dir .*images 20 -> 21"),
    # The split of 15 rows is that of all 16.
    "eval: two rows fewer": ("heldout", fewer(2), r"--eval_data_dir .*: (rows|8 rows|images)"),
    "eval: few rows": ("heldout", fewer(10), r"--eval_data_dir .*: (rows|images)"),
    "eval: all captions": (
        "heldout",
        lambda t: pa.concat_tables(edited(t.slice(i, 1), 0, say_otherwise) for i in range(len(t))),
        r"--eval_data_dir .*: 8 rows as before, but other captions",
    ),
}


def refusal(data, output, **changes):
    argv = RUN | dict(resume="") | changes
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    with pytest.raises(SystemExit) as stopped:
        run(data, output, **argv)
    sentence = str(stopped.value)
    assert "\n" not in sentence and sentence.startswith("rl_train: --")
    assert "Give the former data, or accept these with --allow_changed_data" in sentence
    left = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != ".lock"}
    assert {path: before[path] for path in left} == left
    return sentence


@pytest.mark.parametrize("case", SHARD_CHANGES)
def test_changed_shards_are_refused_by_the_flag(data, begun, tmp_path, case):
    folder, change, words = SHARD_CHANGES[case]
    output = shutil.copytree(begun[True], tmp_path / "run")
    for name in ("train", "heldout"):
        shutil.copytree(data / name, tmp_path / "data" / name)
    rewrite(tmp_path / "data" / folder, change)
    assert re.search(words, refusal(tmp_path / "data", output))


@pytest.mark.parametrize("seed", range(6))
def test_other_folders_are_refused_by_the_flag(data, begun, tmp_path, seed):
    output = shutil.copytree(begun[True], tmp_path / "run")
    write_split(tmp_path / "train", seed=seed + 1, split=TRAIN, num_scenes=18 + seed)
    sentence = refusal(data, output, data_dir=tmp_path / "train")
    assert sentence.startswith(f"rl_train: --data_dir {tmp_path / 'train'}: not the data that")
    write_split(tmp_path / "heldout", seed=seed + 1, split=HELDOUT, num_scenes=3 + seed)
    sentence = refusal(data, output, eval_data_dir=tmp_path / "heldout")
    assert sentence.startswith(
        f"rl_train: --eval_data_dir {tmp_path / 'heldout'}: not the regions that"
    )
    both = dict(data_dir=tmp_path / "train", eval_data_dir=tmp_path / "heldout")
    assert "; --eval_data_dir" in refusal(data, output, **both)


@pytest.mark.parametrize("num_scenes", [19, 24])
def test_new_rows_do_not_move_the_evaluation_split_silently(data, begun, tmp_path, num_scenes):
    """Else, without --eval_data_dir, an image that was trained on is measured afterwards."""
    output = shutil.copytree(begun[False], tmp_path / "run")
    write_split(tmp_path / "train", seed=0, split=TRAIN, num_scenes=num_scenes)
    sentence = refusal(data, output, data_dir=tmp_path / "train", eval_data_dir=None)
    assert f"--data_dir {tmp_path / 'train'}: not the data that the run was trained and" in sentence
    assert "an image that was trained on may now be measured" in sentence


def test_a_moved_folder_goes_on(begun, tmp_path):
    output = shutil.copytree(begun[True], tmp_path / "run")
    run(draw_data(tmp_path / "moved"), output, resume="", **RUN)
    assert save_load.list_checkpoints(output)[-1].name == "checkpoint_step_2"


def test_another_sample_list_is_refused_by_the_flag(data, tmp_path):
    """It may move and be in another order; of one step's samples, so that the order is all."""
    samples, file = GraspAnyRegionDataset(data / "train"), tmp_path / "list.txt"
    names = [samples.image_id(i) for i in range(8)]
    output, same = tmp_path / "run", RUN | dict(eval_steps=0, sample_list=file, max_steps=1)
    file.write_text("\n".join(names[:6]))
    run(data, output, **same)
    assert {line["image_id"] for line in rollouts(output)} <= set(names[:6])
    file.write_text("\n".join(names[:5]))
    changes = same | dict(max_steps=2)
    assert f" or --sample_list {file}: not the data" in refusal(data, output, **changes)
    assert "not the data" in refusal(data, output, **changes | dict(sample_list=None))
    moved = tmp_path / "moved.txt"
    moved.write_text("\n".join(reversed(names[:6])))
    run(data, output, resume="", **changes | dict(sample_list=moved))
    assert save_load.list_checkpoints(output)[-1].name == "checkpoint_step_2"


def test_changed_data_are_accepted_by_a_flag(data, begun, tmp_path, capsys):
    output = shutil.copytree(begun[True], tmp_path / "run")
    best = output / "checkpoint_best"
    evaluation = read_json(best / "eval.json")
    write_json(best / "eval.json", evaluation | dict(score=2.0))  # higher than any new one
    write_split(tmp_path / "heldout", seed=1, split=HELDOUT, num_scenes=5)
    run(
        data,
        output,
        resume="",
        eval_data_dir=tmp_path / "heldout",
        **RUN,
        allow_changed_data="",
    )
    said = capsys.readouterr().out
    assert f"--eval_data_dir {tmp_path / 'heldout'}: not the regions that" in said
    assert "Accepted by --allow_changed_data" in said
    assert "new scores are not compared with those of former regions" in said
    assert read_json(best / "eval.json")["step"] == 2  # not compared with the old score
    facts = [read_json(file) for file in (best / "data.json", output / RECORD)]
    assert facts[0] == facts[1]["data"]
    assert facts[0]["training"] == read_json(begun[True] / RECORD)["data"]["training"]
    assert facts[0]["evaluation"] != read_json(begun[True] / RECORD)["data"]["evaluation"]
    # and the run goes on with its new data without the flag
    run(data, output, resume="", eval_data_dir=tmp_path / "heldout", **RUN)


def test_the_flag_needs_a_resume(data, tmp_path):
    with pytest.raises(SystemExit, match="needs --resume"):
        run(data, tmp_path, **RUN, allow_changed_data="")


def test_a_run_of_an_earlier_version_goes_on_with_a_warning(data, begun, tmp_path, capsys):
    output = shutil.copytree(begun[True], tmp_path / "run")
    (output / RECORD).unlink()
    for file in output.glob("*/data.json"):
        file.unlink()
    run(data, output, resume="", **RUN | dict(save_total_limit=1))
    said = capsys.readouterr().out
    assert "checkpoint_step_1 does not say on which data it was trained" in said
    assert "checkpoint_best, checkpoint_step_1 are taken for this run's own" in said
    assert [f.name for f in save_load.list_checkpoints(output)] == ["checkpoint_step_2"]
    assert f"removed {output / 'checkpoint_step_1'} (--save_total_limit 1)" in said


def test_a_resume_before_the_first_checkpoint_compares_too(data, begun, tmp_path):
    output = shutil.copytree(begun[True], tmp_path / "run")
    shutil.rmtree(output / "checkpoint_step_1")
    write_split(tmp_path / "train", seed=1, split=TRAIN, num_scenes=20)
    assert "--data_dir" in refusal(data, output, data_dir=tmp_path / "train")


# The base's metrics


def test_a_resume_reads_what_the_base_measured(data, begun, tmp_path, monkeypatch, capsys):
    """The final table is the same; nothing is measured at step 0 again."""
    output = shutil.copytree(begun[True], tmp_path / "run")
    before = (output / "evaluation" / "step_0.json").read_bytes()
    roles, measure = [], evaluate.evaluate
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: roles.append(args[3]) or measure(*args))
    run(data, output, resume="", **RUN)
    resumed = capsys.readouterr().out
    assert roles == [("policy", "teacher")] and "evaluation before training, from" in resumed
    assert (output / "evaluation" / "step_0.json").read_bytes() == before
    run(data, tmp_path / "whole", **RUN)
    tables = [said.split("\n\n") for said in (resumed, capsys.readouterr().out)]
    rows = [[row for row in said.splitlines() if " -> " in row or "+" in row] for said in tables[0]]
    assert sum(rows, []) and set(sum(rows, [])) <= set("\n".join(tables[1]).splitlines())
    # Without a checkpoint the run begins anew, and its curves too.
    shutil.rmtree(output / "checkpoint_step_1"), shutil.rmtree(output / "checkpoint_step_2")
    roles.clear()
    run(data, output, resume="", **RUN)
    assert roles[0] == ("reference",) and len(roles) == 3


@pytest.mark.parametrize("damage", ["cut", "of other settings", "of an earlier version"])
def test_it_is_measured_again_where_the_file_is_of_others(
    data, begun, tmp_path, monkeypatch, damage
):
    output = shutil.copytree(begun[True], tmp_path / "run")
    file = output / "evaluation" / "step_0.json"
    content = json.loads(file.read_text())
    if damage == "cut":
        file.write_text(file.read_text()[:99])
    elif damage == "of other settings":
        content["settings"]["base"] = "0"
        file.write_text(json.dumps(content))
    else:
        del content["settings"]
        file.write_text(json.dumps(content))
    roles, measure = [], evaluate.evaluate
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: roles.append(args[3]) or measure(*args))
    run(data, output, resume="", **RUN)
    assert roles == [("reference",), ("policy", "teacher")]
    assert "settings" in json.loads(file.read_text())
