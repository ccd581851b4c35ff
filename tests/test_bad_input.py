"""A wrong model, data set or output folder ends the program with one sentence that names it."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from rl_train import cli, train
from rl_train.cli import check_output_dir
from rl_train.run import open_data
from rl_train.utils.io import write_json
from tests.runs import CHECKPOINT, REGIONS, complaint_of, flags, on_one_core

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the tiny checkpoint, to be spoilt."""
    return shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")


@pytest.fixture
def complaint(data, tmp_path):
    """Runs the command line with some flags changed; returns the sentence that it ends with."""
    return lambda *extra, **changes: complaint_of(
        [*flags(data, tmp_path / "run", **changes), *extra]
    )


# Model and data


def test_folder_without_a_model(complaint, tmp_path):
    (tmp_path / "empty").mkdir()
    sentence = complaint(model_path=tmp_path / "empty")
    assert f"--model_path {tmp_path / 'empty'}: holds no config.json" in sentence


def test_attributes_of_another_form(complaint, tmp_path):
    (tmp_path / "words.json").write_text('{"color": ["red"]}')
    sentence = complaint(attributes=tmp_path / "words.json")
    assert f"--attributes {tmp_path / 'words.json'} does not hold" in sentence


def test_another_kind_of_model(complaint, checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 8}))
    assert "config.json" in complaint(model_path=checkpoint)


def test_checkpoint_with_missing_keys(complaint, checkpoint):
    state = load_file(checkpoint / "model.safetensors")
    gone = sorted(state)[7]
    save_file(
        {k: v for k, v in state.items() if k != gone},
        checkpoint / "model.safetensors",
        {"format": "pt"},
    )
    sentence = complaint(model_path=checkpoint)
    assert str(checkpoint) in sentence and gone in sentence and "1 keys missing" in sentence


def test_checkpoint_cut_off(complaint, checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    assert str(file) in complaint(model_path=checkpoint)


def test_tokenizer_without_seg(complaint, checkpoint):
    file = checkpoint / "tokenizer.json"
    file.write_text(file.read_text().replace("[SEG]", "[MASK]"))
    sentence = complaint(model_path=checkpoint)
    assert str(checkpoint) in sentence and "[SEG]" in sentence


def test_checkpoint_without_tokenizer(complaint, checkpoint):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert str(checkpoint) in complaint(model_path=checkpoint)


def test_folder_without_shards(complaint):
    assert f"--data_dir {CHECKPOINT}" in complaint(data_dir=CHECKPOINT)


def test_dataset_smaller_than_a_step(complaint):
    sentence = complaint(batch_size=REGIONS + 1)
    assert f"{REGIONS} samples" in sentence and f"--batch_size {REGIONS + 1}" in sentence
    assert "--data_dir" in sentence


def test_nothing_left_to_hold_out(complaint):
    assert f"--eval_samples {REGIONS}" in complaint(eval_data_dir=None, eval_samples=REGIONS)


def test_images_that_are_trained_on_and_held_out(complaint, data, capsys):
    train = str(data / "train")
    sentence = complaint(eval_data_dir=train)
    assert (
        f"--eval_data_dir {train} share images" in sentence and "--train_eval_overlap" in sentence
    )
    assert "nothing is left to train on" in complaint(
        eval_data_dir=train, train_eval_overlap="drop"
    )
    drop = f"{REGIONS} of {REGIONS} training regions) (--train_eval_overlap drop)"
    assert drop in capsys.readouterr().out


# The output folder


def claimed(data, tmp_path, **changes):
    """The output folder of a run that has begun."""
    config = cli.parse(flags(data, tmp_path / "run", **changes))
    write_json(tmp_path / "run" / "config.json", config.flags | dict(world_size=1))
    return tmp_path / "run"


def test_output_folder_in_use(complaint, data, tmp_path):
    output = claimed(data, tmp_path)
    sentence = complaint()
    assert f"--output_dir {output}" in sentence and "--resume" in sentence


def test_resume_with_another_config_names_the_flags(complaint, data, tmp_path):
    before = (claimed(data, tmp_path, lora_r=4) / "config.json").read_text()
    sentence = complaint(resume="", lora_r=8, seed=3, num_workers=1)
    assert "--lora_r was 4, now 8" in sentence and "--seed was 0, now 3" in sentence
    assert "--num_workers" not in sentence and "--batch_size" not in sentence
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_resume_on_another_number_of_ranks_keeps_the_prompts_of_a_step(data, tmp_path):
    """Else the position in the data, the schedule and the number of steps would be others."""

    def asked(world_size, **changes):
        config = cli.parse(flags(data, tmp_path / "run", resume="", **changes))
        return config, config.flags | dict(world_size=world_size)

    write_json(tmp_path / "run" / "config.json", asked(2, batch_size=2)[1])
    for batch_size, world_size, accumulation, fits in (
        (4, 1, 1, True),
        (2, 1, 2, True),
        (1, 4, 1, True),
        (2, 1, 1, False),
        (2, 4, 1, False),
    ):
        changes = dict(batch_size=batch_size, gradient_accumulation_steps=accumulation)
        now = asked(world_size, **changes)
        if fits:
            check_output_dir(*now)
            continue
        prompts = batch_size * world_size
        with pytest.raises(ValueError, match=f"4 prompts a step, now {prompts}: --batch_size x"):
            check_output_dir(*now)


@pytest.mark.parametrize("place", ["file", "file/run", "file/a/run", "gone/run"])
def test_output_folder_that_cannot_be_written(data, tmp_path, monkeypatch, place):
    """Known before data and model are read."""
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(open_data, "split_dataset", None)
    with pytest.raises(
        SystemExit, match=f"^rl_train: --output_dir {tmp_path / place} cannot be written: .*: [NI]"
    ) as stopped:
        train.main(flags(data, tmp_path / place))
    assert "\n" not in str(stopped.value) and sorted(path.name for path in tmp_path.iterdir()) == [
        "file",
        "gone",
    ]


def test_auto_starts_a_run_or_continues_it(data, tmp_path):
    config = cli.parse(flags(data, tmp_path / "run", resume="auto"))
    check_output_dir(config, config.flags)
    claimed(data, tmp_path)
    check_output_dir(config, config.flags)
    with pytest.raises(ValueError, match="--seed was 0, now 1"):
        check_output_dir(config, config.flags | dict(seed=1))


def test_what_torchrun_may_start_again_resumes_by_itself(data, tmp_path, monkeypatch):
    """And not from a folder that lies before what has been done since."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert cli.parse(flags(data, tmp_path)).run.resume is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert cli.parse(flags(data, tmp_path)).run.resume == "auto"
    assert cli.parse(flags(data, tmp_path, resume="")).run.resume == "latest"
    with pytest.raises(SystemExit, match="--max_restarts needs --resume auto"):
        cli.parse(flags(data, tmp_path, resume=CHECKPOINT))


def test_nothing_to_resume(complaint):
    assert "--resume" in complaint(resume="")


def test_resume_of_what_is_no_checkpoint(complaint):
    assert f"--resume {CHECKPOINT}" in complaint(resume=CHECKPOINT)
    assert "--resume /nowhere" in complaint(resume="/nowhere")


def test_bad_input_does_not_use_up_the_output_folder(complaint, tmp_path):
    complaint(batch_size=REGIONS + 1)
    assert not (tmp_path / "run" / "config.json").exists()
    assert "--data_dir" in complaint(batch_size=REGIONS + 2)  # and not: already holds a run
