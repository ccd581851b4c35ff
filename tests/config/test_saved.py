"""--config: flags of another run or of a YAML file, below those of the command line."""

import json

import pytest

from rl_train import cli, train
from rl_train.sft import SFT
from rl_train.utils.io import read_json, write_json
from tests.runs import complaint_of, flags, run_unmeasured, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)


@pytest.fixture
def base(data, tmp_path) -> list[str]:
    """A command line without flags that the files below hold, but for the folders."""
    names = ("model_path", "data_dir", "eval_data_dir", "output_dir")
    words = flags(data, tmp_path / "new")
    return [word for n in names for word in words[words.index(f"--{n}") :][:2]]


@pytest.fixture
def written(tmp_path):
    """Function that writes a text or an object into a file of this name: its path as text."""

    def write(name, content):
        file = tmp_path / name
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(file)

    return write


def test_a_saved_config_gives_the_same_flags(data, tmp_path, written):
    """All kinds: lists, switches both ways, none, a number."""
    changes = dict(reward_weights=["loop2.meteor=0.5", "loop2.likelihood=0.5"], distractors="")
    changes |= {"ema_decay": 0.9, "no-gradient_checkpointing": "", "scale_rewards": "batch"}
    changes |= dict(tasks=["caption_mask_caption"], latent_std="auto", seed=2**62)
    before = cli.parse(flags(data, tmp_path / "run", **changes)).flags
    assert before["gradient_checkpointing"] is False and before["ema_decay"] == 0.9
    file = written("config.json", before | dict(world_size=2, resume="auto"))
    after = cli.parse(["--config", file, "--output_dir", str(tmp_path / "new")])
    assert after.flags == before | dict(output_dir=str(tmp_path / "new"))
    said = after.taken.sentence
    assert f"--config {file}: {len(before) - 3} flags are its; not taken: output_dir " in said
    assert "resume auto" in said and "world_size 2" in said and "of the command line" not in said


def test_the_command_line_goes_first(written, base):
    """Lists are replaced."""
    saved = dict(
        reward_weights=["loop1.iou=2"], ema_decay=0.9, learning_rate=1e-3, distractors=True
    )
    words = ["--config", written("a.json", saved), "--reward_weights", "loop2.meteor=3"]
    config = cli.parse([*base, *words, "--ema_decay=0.8", "--seed", "5"])
    assert config.flags["reward_weights"] == ["loop2.meteor=3"] and config.flags["distractors"]
    assert config.optim.ema_decay == 0.8
    assert config.optim.learning_rate == 1e-3 and config.run.seed == 5
    assert "2 flags are its; of the command line: --reward_weights, --ema_decay" in (
        config.taken.sentence
    )


def test_yaml_of_both_trainings(written, base):
    """Its `1e-4` is text; a name of another project and a task alone are taken."""
    file = written("my.yaml", "learning_rate: 1e-4\nper_device_batch_size: 3\nwandb: true\n")
    for program in (cli.GRPO, SFT):
        config = cli.parse([*base, "--config", file], program)
        assert config.optim.learning_rate == 1e-4 and config.rollout.batch_size == 3
        assert config.run.wandb == "rl-sa2va"
    one = written("one.yaml", "tasks: region_captions\ntrainable_modules: [lora]\n")
    assert cli.parse([*base, "--config", one], SFT).flags["tasks"] == ["region_captions"]


def test_flags_of_tasks_that_the_command_line_leaves_out(written, base):
    file = written("a.json", dict(tasks=list(cli.DEFAULT_TASKS), loop1_weight=0.5, loop2_weight=2))
    config = cli.parse([*base, "--config", file, "--tasks", "caption_mask_caption"])
    assert config.flags["loop2_weight"] == 2 and "loop1_weight" not in config.flags
    assert "not taken: loop1_weight (of another task)" in config.taken.sentence


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        (
            "a.json",
            '{"lerning_rate": 1}',
            "--lerning_rate: no such flag, did you mean --learning_r",
        ),
        ("a.yaml", "learning_rate: fast", "--learning_rate fast: must be a number above 0"),
        ("a.yaml", "learning_rate: -1", "--learning_rate -1: must be a number above 0"),
        ("a.yaml", "loss_type: ppo", "--loss_type ppo: must be one of grpo, bnpo"),
        ("a.yaml", "batch_size: 2.5", "--batch_size 2.5: must be an integer at least 1"),
        ("a.yaml", "batch_size: [2, 3]", "--batch_size [2, 3]: must be text or a number"),
        ("a.yaml", "batch_size: true", "--batch_size true: must be text or a number"),
        ("a.yaml", "batch_size:", "--batch_size null: must be text or a number"),
        ("a.yaml", "distractors: 1", "--distractors 1: must be true or false"),
        (
            "a.yaml",
            "no-gradient_checkpointing: true",
            "--no-gradient_checkpointing: write gradient_checkpointing: false",
        ),
        ("a.yaml", "beta: 1\nkl_coef: 2", "--kl_coef: the same flag as --beta, give one of them"),
        ("a.yaml", "seed: 1\nseed: 2", "--seed is given twice"),
        ("a.json", '{"seed": 1, "seed": 2}', "--seed is given twice"),
        ("a.yaml", "ema_half_life: .2", "--ema_half_life: no such flag, give --ema_decay"),
        ("a.yaml", "entropy_coef: 0.1", "--entropy_coef: no such flag, a larger --kl_coef"),
        ("a.yaml", "answer_style: points", "--answer_style: only with --tasks point_segmentation"),
        ("a.yaml", "tasks: loop3", "--tasks loop3: unknown"),
        ("a.yaml", "tasks: {a: b}", "--tasks {'a': 'b'}: must be names of tasks"),
        ("a.json", "[1]", "must hold flags and their values, as a run's config.json"),
        ("a.yaml", "just words", "must hold flags and their values, as a run's config.json"),
        ("a.json", "{", "neither JSON (*.json) nor YAML: Expecting"),
        ("a.yaml", "a: [", "neither JSON (*.json) nor YAML: while parsing"),
    ],
)
def test_a_faulty_file_is_a_sentence_with_file_and_flag(written, base, name, text, sentence):
    file = written(name, text)
    said = complaint_of([*base, "--config", file])
    assert said.startswith("rl_train: --") and sentence in said and file in said
    assert said.count("\n") == 0


def test_a_file_that_is_not_there(base, tmp_path):
    said = complaint_of([*base, "--config", str(tmp_path)])
    assert said == f"rl_train: --config {tmp_path}/config.json: No such file or directory"


def test_a_folder_that_has_moved_is_said_to_be_of_the_file(written, base):
    file = written("a.yaml", "seed: 1\ndata_dir: /gone")
    words = [
        word for word in base if word not in ("--data_dir", base[base.index("--data_dir") + 1])
    ]
    said = complaint_of([*words, "--config", file])
    assert said == f"rl_train: --data_dir /gone: no such folder (--data_dir is of --config {file})"


def test_old_flags_without_effect_are_passed_over(written, base):
    file = written("a.json", dict(entropy_coef=0.0, use_llm_judge_loop2=False, seed=3))
    assert cli.parse([*base, "--config", file]).run.seed == 3


def test_a_run_by_the_config_of_another(data, tmp_path):
    """The folder is given; the numbers are the same, and the log says where flags are from."""
    first = run_unmeasured(data, tmp_path / "a", seed=7, max_steps=1)
    train.main(["--config", str(first), "--output_dir", str(tmp_path / "b")])
    configs = [read_json(tmp_path / name / "config.json") for name in "ab"]
    for config in configs:
        config.pop("output_dir")
    assert configs[0] == configs[1] and configs[0]["seed"] == 7
    rows = [(tmp_path / name / "rollouts" / "rank0.jsonl").read_text() for name in "ab"]
    assert rows[0] == rows[1]
    assert f"--config {first}/config.json: " in (tmp_path / "b" / "train.log").read_text()
    # The run that the file is of is continued by it too.
    write_json(tmp_path / "c.json", configs[0] | dict(max_steps=2))
    words = ["--config", str(tmp_path / "c.json"), "--output_dir", str(first), "--resume"]
    train.main(words)
    assert read_json(first / "config.json")["max_steps"] == 2
    starts = read_json(first / "starts.json")["starts"]  # each with its own flags
    assert [start["from_step"] for start in starts] == [0, 1]
    assert [start["flags"]["max_steps"] for start in starts] == [1, 2]
