"""Files that a run did not write stay: never removed, renamed, cut or written over."""

import os
import shutil

import pytest

from rl_train.checkpoint import save_load
from rl_train.checkpoint.record import RECORD
from rl_train.utils.io import CannotWrite
from tests.campaigns.kill_campaign import RUN, differences
from tests.runs import complaint_of, flags, run, run_unmeasured, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)

# 36 files of somebody else, of names as near to the run's own as they can be.
FILES = """
notes.txt
config.tmp
config.json.bak
.config.json.unfinished
data.json
run.json
eval.json
trainables.safetensors
checkpoint_best.old/eval.json
checkpoint_best.tmp/training_state.pt
checkpoint_step_2.old/training_state.pt
checkpoint_mine.tmp/config.json
checkpoint_step_abc/training_state.pt
checkpoint_step_02/training_state.pt
checkpoint_step_2_copy/config.json
my_checkpoint_step_1/config.json
.checkpoint_best.unfinished/trainables.safetensors
.checkpoint_best.replaced/trainables.safetensors
.checkpoint_step_2.unfinished/trainables.safetensors
.checkpoint_step_4.replaced/trainables.safetensors
.checkpoint_step_4.01234567.0.unfinished/trainables.safetensors
.mine.unfinished/a
.mine.replaced/a
final_model.old/model.safetensors
rollouts/rank0_old.jsonl
rollouts/rank1.jsonl
rollouts/rank7.jsonl
rollouts/rank.jsonl
rollouts/notes.md
tensorboard/events.out.tfevents.backup
tensorboard/events.out.tfevents.1.somebody.2.0
tensorboard/other_run/events.out.tfevents.1.somebody.2.0
evaluation/step_0.tmp
evaluation/step_2.json.bak
evaluation/mine.json
wandb/latest-run/notes
""".split()
# Without those that a new run would cut, for which it is refused.
AT_A_START = [name for name in FILES if not name[:-6].endswith(("rank1", "rank7"))]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return run_unmeasured(data, tmp_path_factory.mktemp("run") / "whole", **RUN)


def seed(output, names):
    """Write the files; return what is to stay: {file: (content, inode, time of change)}."""
    for number, name in enumerate(names):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(f'{{"step": {number}, "of": "somebody"}}\nno line of a run')
    return state(output, names)


def state(output, names):
    stats = {name: os.stat(output / name) for name in names}
    return {
        name: ((output / name).read_bytes(), stat.st_ino, stat.st_mtime_ns)
        for name, stat in stats.items()
    }


def remove(output, names):
    for name in names:
        folder, *below = name.split("/")
        shared = folder in ("rollouts", "tensorboard", "evaluation")
        path = output / folder / below[0] if shared else output / folder
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def test_a_run_in_a_folder_of_others(data, whole, tmp_path):
    """Begun, resumed before its end and after it, with checkpoints that are removed."""
    output = tmp_path / "run"
    before = seed(output, AT_A_START)
    assert len(before) >= 30
    run(data, output, **RUN | dict(save_steps=1))
    assert state(output, AT_A_START) == before
    shutil.rmtree(output / "checkpoint_step_4")
    run(data, output, resume="", **RUN | dict(save_steps=1))
    run(data, output, resume="", **RUN | dict(save_steps=1))
    assert state(output, AT_A_START) == before
    remove(output, AT_A_START)
    assert differences(whole, output) == []


def test_files_that_come_into_a_run_s_folder_later(data, whole, tmp_path):
    """Also a checkpoint of an earlier step, which --save_total_limit does not count."""
    output = run(data, tmp_path / "run", **RUN | dict(save_total_limit=0))
    foreign = shutil.copytree(output / "checkpoint_step_2", output / "checkpoint_step_1")
    names = [*FILES, *(f"checkpoint_step_1/{p.name}" for p in foreign.iterdir() if p.is_file())]
    before = seed(output, FILES) | state(output, names)
    shutil.rmtree(output / "checkpoint_step_4")
    run(data, output, resume="", **RUN | dict(save_total_limit=1))
    assert [folder.name for folder in save_load.list_checkpoints(output)] == [
        "checkpoint_step_1",
        "checkpoint_step_4",
    ]
    assert state(output, names) == before
    remove(output, [*FILES, "checkpoint_step_1/"])
    assert differences(whole, output) == []


IN_THE_WAY = [
    "rollouts/rank0.jsonl",
    "rollouts/rank3.jsonl",
    "evaluation/step_0.json",
    "evaluation/step_2.json",
    "checkpoint_best/eval.json",
    "checkpoint_step_2/training_state.pt",
    "final_model/config.json",
    "wandb.json",
    "train.log",
    "starts.json",
]


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_a_new_run_that_would_write_over_something_is_refused(data, tmp_path, name):
    output = tmp_path / "run"
    before = seed(output, [name])
    shown = name if "/" not in name or name.startswith(("rollouts", "eval")) else name.split("/")[0]
    assert complaint_of(flags(data, output, **RUN)) == (
        f"rl_train: --output_dir {output} holds {shown} and no config.json of a run: name another "
        "folder, or move it away"
    )
    assert state(output, [name]) == before and [p.name for p in output.iterdir()] == [
        name.split("/")[0]
    ]


def test_a_folder_of_the_user_under_a_checkpoint_s_name_ends_the_run_and_stays(
    data, tmp_path, monkeypatch
):
    """It came while the run was going."""
    output, save, kept = tmp_path / "run", save_load.save, {}

    def saved(*args):
        if not kept:
            kept.update(seed(output, ["checkpoint_step_4/mine", "checkpoint_step_2/mine"]))
        save(*args)

    monkeypatch.setattr(save_load, "save", saved)
    with pytest.raises(SystemExit) as stopped:
        run(data, output, **RUN)
    assert str(stopped.value).startswith(
        f"rl_train: {output / 'checkpoint_step_2'} cannot be written: it is there, and this run "
        "did not make it; move it away; "
    )
    assert state(output, kept) == kept


def test_an_exported_model_of_the_user_is_not_replaced(tmp_path):
    final = tmp_path / "final_model"
    before = seed(tmp_path, ["final_model/model.safetensors"])
    with pytest.raises(CannotWrite, match="final_model cannot be written: it is there, and this"):
        with save_load.replacing(final):
            pytest.fail("nothing is to be written")
    assert state(tmp_path, before) == before and not (tmp_path / RECORD).exists()
    (tmp_path / "empty").mkdir()
    with save_load.replacing(tmp_path / "empty") as folder:  # as tools.export allows
        (folder / "file").write_text("new")
    assert (tmp_path / "empty" / "file").exists()
