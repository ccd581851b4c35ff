"""The command line: what is wrong there ends the program with one sentence that names the flag."""

import ast
import dataclasses
import re
import runpy
import sys

import pytest
import torch

from rl_train import cli
from rl_train.config.flags import flag_fields, flag_name, has_flag
from rl_train.config.grpo_config import Config
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.tasks import DEFAULT_TASKS, TASKS
from tests.ranks import fork
from tests.runs import FRAGMENT, ROOT, complaint_of, flags, on_one_core

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture
def complaint(data, tmp_path):
    """Runs the command line with some flags changed; returns the sentence that it ends with."""
    return lambda *extra, **changes: complaint_of(
        [*flags(data, tmp_path / "run", **changes), *extra]
    )


def config_classes() -> list[type]:
    """The classes of configs of which a command line is made."""
    return [kind for kind in Config.__annotations__.values() if dataclasses.is_dataclass(kind)]


# The command line


@pytest.mark.parametrize("name", ["model_path", "data_dir", "eval_data_dir"])
def test_folder_that_does_not_exist(complaint, name):
    assert f"--{name} /nowhere: no such folder" in complaint(**{name: "/nowhere"})


def test_a_format_of_held_out_regions_that_are_not_given(complaint):
    said = complaint(eval_data_dir="reasonsge:x")
    assert "--eval_data_dir reasonsge:x: must be [NAME[/SUBSET,..]:]FOLDER, NAME of gar," in said


def test_names_of_curves_choose_the_best(data, tmp_path):
    named = dict(metric_for_best_model=["eval/seg_on_target", "cycle_iou"], distractors="")
    assert cli.parse(flags(data, tmp_path, **named)).run.metric_for_best_model == [
        "seg_on_target",
        "cycle_iou",
    ]
    assert cli.parse(flags(data, tmp_path)).run.metric_for_best_model == []


@pytest.mark.parametrize("name", ["model_path", "data_dir", "output_dir"])
def test_flag_that_is_needed(complaint, name):
    assert f"--{name}" in complaint(**{name: None})


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_generations", 1),
        ("batch_size", 0),
        ("max_completion_length", 0),
        ("micro_batch_size", 0),
        ("num_iterations", 0),
        ("gradient_accumulation_steps", 0),
        ("temperature", 0),
        ("learning_rate", -1),
        ("text_hidden_fcs_lr", 0),
        ("ema_decay", 1.1),
        ("ema_decay", -0.1),
        ("ema_decay", "nan"),
        ("ablation_reward", "random"),
        ("latent_std", -0.1),
        ("latent_std", -1),
        ("latent_std", "x"),
        ("latent_std", "nan"),
        ("latent_std", "inf"),
        ("save_steps", 0),
        ("kl_coef", -1),
        ("loop1_weight", -1),
        ("lora_r", "four"),
        ("loss_type", "ppo"),
        ("tasks", "loop3"),
        ("teacher_answer", "free"),
        ("clip_range_high", 0),
        ("clip_range_high", -0.1),
        ("lora_alpha", 0),
        ("lora_alpha", -8),
        ("seed", -1),
        ("seed", 2**63),
        ("scale_rewards", "std"),
        ("overlong_buffer", -1),
    ],
)
def test_value_out_of_range(complaint, name, value):
    assert f"--{name}" in complaint(**{name: value})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_every_float_is_finite(complaint, value):
    of_tasks = [TASKS[name].Options for name in DEFAULT_TASKS]
    names = [
        flag_name(field)
        for config in (*config_classes(), *of_tasks)
        for field in flag_fields(config)
        if "float" in str(field.type)
    ]
    assert len(names) > 15
    for name in names:
        sentence = complaint(f"--{name}={value}", **{name: None})
        assert f"--{name}" in sentence and value in sentence, name


def test_auto_sigma_needs_a_mask(complaint, monkeypatch):
    monkeypatch.setattr(
        Sa2VAPolicy, "seg_tokens", lambda policy, ids, valid: torch.zeros_like(valid)
    )
    assert "--latent_std auto: " in complaint(latent_std="auto")


def test_values_that_depend_on_others(data, tmp_path):
    def parse(**changes):
        return cli.parse(flags(data, tmp_path, **changes))

    def sigma(value):
        return parse(latent_std=value).tasks["caption_mask_caption"].latent_std

    assert sigma(None) == sigma("auto") == "auto" and sigma("0") == 0
    assert parse().optim.ema_decay is None
    assert parse(ema_decay=0).optim.ema_decay == 0 and parse(ema_decay=1).optim.ema_decay == 1


def test_a_task_of_weight_0_is_left_out(data, tmp_path):
    config = cli.parse(flags(data, tmp_path, loop1_weight=0))
    assert list(config.tasks) == ["caption_mask_caption"]
    assert config.flags["loop1_weight"] == 0  # and is on record


def test_every_flag_is_a_field_of_a_config(data, tmp_path):
    """Parsed flags and the configs' fields are one: no flag that nobody can read."""
    config = cli.parse(flags(data, tmp_path))
    held = {"tasks": list(config.tasks)}
    for part in (*vars(config).values(), *config.tasks.values()):
        if dataclasses.is_dataclass(part):
            fields = [f for f in flag_fields(part) if has_flag(f, ["sa2va"])]
            held |= {flag_name(f): getattr(part, f.name) for f in fields}
    assert held == config.flags and "answer_style" not in held and "sam_path" not in held
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.learning_rate = 1.0


def test_another_s_target_needs_another_sample(complaint):
    sentence = complaint(ablation_reward="near")
    assert "--ablation_reward near: is of points, not of the task loop1" in sentence
    sentence = complaint(ablation_reward="other", batch_size=1)
    assert "--ablation_reward other: " in sentence and "--batch_size 1 has none" in sentence


def test_an_order_that_is_none(complaint):
    assert "--sampler random: must be module:function" in complaint(sampler="random")
    assert "--sampler math:no: module 'math' has no attribute 'no'" in complaint(sampler="math:no")


def test_a_flag_that_needs_another(complaint, tmp_path):
    """Told before the model, of which there is none here, is read."""
    sentence = complaint(allow_changed_data="", model_path=tmp_path)
    assert "--allow_changed_data True: needs --resume" in sentence


@pytest.mark.parametrize(
    "wanted", [dict(use_llm_judge=""), dict(reward_weights=["loop2.meteor=.25", "loop2.judge=.75"])]
)
def test_judge_that_is_down(complaint, tmp_path, wanted):
    sentence = complaint(**wanted, llm_judge_base_url="http://127.0.0.1:9/v1")
    assert (
        "--llm_judge_base_url http://127.0.0.1:9/v1" in sentence
        and "meta-llama/Meta-Llama-3.1-8B-Instruct" in sentence
    )
    assert not (tmp_path / "run").exists()


def test_unknown_judge_mode(complaint):
    assert "--llm_judge_mode" in complaint(llm_judge_mode="stars")


def test_reward_of_the_users_own(complaint):
    assert "--reward no_such_module:f" in complaint(reward="no_such_module:f")
    assert "--reward math:sqrt=x" in complaint(reward="math:sqrt=x")


def test_unknown_flag(complaint):
    assert "--num_samples" in complaint("--num_samples", "4")


def test_abbreviated_flag(complaint):
    assert "--learning" in complaint("--learning", "1e-5", learning_rate=None)


def test_all_loops_switched_off(complaint):
    sentence = complaint(loop1_weight=0, loop2_weight=0)
    assert "--tasks" in sentence and "weight above 0" in sentence
    sentence = complaint(loop1_weight=0, tasks="mask_caption_mask")
    assert "--tasks mask_caption_mask:" in sentence and "weight above 0" in sentence


def test_a_loop_named_twice(complaint):
    assert "--tasks" in complaint(tasks=["mask_caption_mask", "mask_caption_mask"])


def test_an_answer_beyond_the_context_names_the_flags(complaint):
    sentence = complaint(max_tiles=12, max_completion_length=2000)
    assert "--max_tiles 12" in sentence and "--max_completion_length 2000" in sentence


# Tasks of the user's own

TASK = """
from dataclasses import dataclass

from rl_train.config.flags import flag
from rl_train.tasks import MaskCaptionMask

class Twin(MaskCaptionMask):
    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "of its loss", name="twin_weight")
        trainable_modules = ("lora",)

class Heir(MaskCaptionMask):
    name = "heir"  # and its flags are those of loop 1

CONSTANT = 3
"""


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """A module with tasks, and one that cannot be imported."""
    (tmp_path / "own_tasks.py").write_text(TASK)
    (tmp_path / "own_faulty.py").write_text("import module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("loop3", "loop3"),
        ("mask_caption_mas", "mask_caption_mask"),  # what is known is listed
        ("no_such_module:Task", "No module named 'no_such_module'"),
        ("own_tasks.deep:Task", "No module named 'own_tasks.deep'"),
        ("own_tasks:Nothing", "has no attribute 'Nothing'"),
        ("own_tasks:CONSTANT", "must be module:class"),
        ("own_tasks:", "own_tasks"),
        (":Task", "Task"),
        ("", ""),
    ],
)
def test_a_task_that_is_not_there(complaint, own_tasks, name, reason):
    sentence = complaint(tasks=[name])
    assert f"--tasks {name}" in sentence and reason in sentence


def test_two_tasks_of_one_name(complaint, own_tasks):
    sentence = complaint(tasks=["mask_caption_mask", "own_tasks:Twin"])
    assert "--tasks mask_caption_mask own_tasks:Twin" in sentence and "name" in sentence


def test_a_task_of_the_users_own(data, tmp_path, own_tasks):
    """Its own flag takes the place of the one whose name it has."""
    config = cli.parse(flags(data, tmp_path, tasks="own_tasks:Twin", twin_weight=0.5))
    assert list(config.tasks) == ["own_tasks:Twin"]
    assert config.tasks["own_tasks:Twin"].weight == config.flags["twin_weight"] == 0.5


def test_a_task_that_inherits_another_s_flags_shares_them(data, tmp_path, own_tasks):
    names = ["mask_caption_mask", "own_tasks:Heir"]
    argv = flags(data, tmp_path / "run", tasks=names, loop1_weight=0.5)
    config = cli.parse(argv)
    assert [config.tasks[name].weight for name in names] == [0.5, 0.5]


def test_a_module_that_a_task_imports_is_named(complaint, own_tasks):
    sentence = complaint(tasks="own_faulty:Task")
    assert "--tasks own_faulty:Task" in sentence and "module_that_is_missing" in sentence


# Every flag does something


def test_every_flag_is_read():
    """Some code reads the field of each flag as an attribute."""
    read = {
        node.attr
        for file in (ROOT / "rl_train").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    configs = [*config_classes(), *(task.Options for task in TASKS.values())]
    known = {field.name for config in configs for field in flag_fields(config)}
    assert len(known) > 40 and known - read == set(), "flags that nobody reads"


def test_every_flag_has_help(capsys):
    """And --help ends in peace, a % in a help text included."""
    for names in (DEFAULT_TASKS, ["point_segmentation"]):
        with pytest.raises(SystemExit) as stopped:
            cli.parse(["--tasks", *names, "--help"])
        assert stopped.value.code == 0
        helped = capsys.readouterr().out
        parser = cli.build_parser({name: TASKS[name] for name in names})
        for action in parser._actions:
            assert action.help and f"--{action.dest}" in helped or action.dest == "help", action
            assert not re.match(FRAGMENT, action.help), action
        assert ("--sam_path" in helped) == (names == ["point_segmentation"])
        assert "default: None" not in helped and helped.count("(required)") == 3


def test_a_run_of_both_loops_has_few_flags():
    parser = cli.build_parser({name: TASKS[name] for name in DEFAULT_TASKS})
    assert len([action for action in parser._actions if action.dest != "help"]) <= 76


def test_a_misspelt_required_flag_is_said_to_be_misspelt(complaint):
    said = complaint("--modle_path", "m", model_path=None)
    assert said == "rl_train: --modle_path: no such flag, did you mean --model_path?"


def test_a_wrong_command_line_is_two_lines_and_status_2(tmp_path):
    """A tool's too."""
    for number, (file, words, name) in enumerate(
        (
            ("rl_train/train.py", ["--lora_rr", "4"], "rl_train: --lora_rr"),
            ("tools/export.py", ["--rol", "policy"], "export: --rol"),
            (
                "tools/inspect_data.py",
                ["--data_dir", str(tmp_path)],
                f"inspect_data: --data_dir {tmp_path}",
            ),
        )
    ):

        def run_module():
            sys.argv = [file, *words]
            runpy.run_path(str(ROOT / file), run_name="__main__")

        folder = tmp_path / str(number)
        folder.mkdir()
        status, said = fork(folder, run_module)
        assert status == 2 and said.startswith(name), said
        assert said.count("\n") <= 2
