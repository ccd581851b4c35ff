"""What a user can get wrong ends the program with one sentence that names the flag or the file."""

import ast
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_train import parts, train
from rl_train.config import build_parser, check_output_dir, claim_output_dir, parse_args
from rl_train.policies.sa2va import Policy
from tests.runs import CHECKPOINT, ROOT, draw_data, flags, on_one_core

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_data(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the tiny checkpoint, to be spoilt."""
    return shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")


@pytest.fixture
def complaint(data, tmp_path, capsys):
    """Runs the command line with some flags changed, and returns the one sentence that it ends with."""

    def end(*extra, **changes) -> str:
        with pytest.raises(SystemExit) as stopped:
            train.main([*flags(data, tmp_path / "run", **changes), *extra])
        assert stopped.value.code not in (0, None)
        if stopped.value.code == 2:  # argparse: usage, then the sentence
            usage, sentence = capsys.readouterr().err.split("python -m rl_train.train: error: ")
            assert usage.startswith("usage: ")
        else:
            sentence = stopped.value.code
            assert sentence.startswith("rl_train: ")
        assert "\n" not in sentence.strip() and "Traceback" not in sentence
        return sentence

    return end


# The command line


@pytest.mark.parametrize("name", ["model_path", "data_dir", "eval_data_dir"])
def test_folder_that_does_not_exist(complaint, name):
    assert f"--{name} /nowhere: no such folder" in complaint(**{name: "/nowhere"})


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
        ("prompt_learning_rate", 0),
        ("ema_decay", 1.1),
        ("ema_decay", -0.1),
        ("ema_decay", "nan"),
        ("likelihood_share", 1.1),
        ("likelihood_share", "nan"),
        ("control", "random"),
        ("mask_sigma", -0.1),
        ("mask_sigma", -1),
        ("mask_sigma", "x"),
        ("mask_sigma", "nan"),
        ("mask_sigma", "inf"),
        ("save_steps", 0),
        ("kl_coef", -1),
        ("mask_to_caption_weight", -1),
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
    ],
)
def test_value_out_of_range(complaint, name, value):
    assert f"--{name}" in complaint(**{name: value})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_every_float_is_finite(complaint, value):
    names = [action.dest for action in build_parser()._actions if action.type is float]
    assert len(names) > 15
    for name in names:
        assert f"--{name} {value}: must be a finite number" in complaint(
            f"--{name}={value}", **{name: None}
        ), name


def test_a_base_is_shared_by_several_processes(complaint):
    assert "--shard_base: there is one process" in complaint(shard_base="")


def test_auto_sigma_needs_a_mask(complaint, monkeypatch):
    monkeypatch.setattr(Policy, "seg_tokens", lambda policy, ids, valid: torch.zeros_like(valid))
    assert "--mask_sigma auto: " in complaint(mask_sigma="auto")


def test_values_that_depend_on_others(data, tmp_path):
    def parse(**changes):
        return parse_args(flags(data, tmp_path, **changes))

    judge = dict(use_llm_judge="", use_llm_judge_loop2="")
    assert parse().likelihood_share == 0.5 and parse(**judge).likelihood_share == 0
    assert (
        parse(**judge, likelihood_share=0.3).likelihood_share == 0.3
        and parse(likelihood_share=0).likelihood_share == 0
    )
    assert (
        parse(learning_rate=3e-6).prompt_learning_rate == 3e-6
        and parse(prompt_learning_rate=1e-3).prompt_learning_rate == 1e-3
    )
    assert (
        parse(mask_sigma=None).mask_sigma == parse(mask_sigma="auto").mask_sigma == "auto"
        and parse(mask_sigma="0").mask_sigma == 0
    )
    assert parse(ema_decay=0).ema_decay == 0 and parse(ema_decay=1).ema_decay == 1


@pytest.mark.parametrize("share", [-0.1, 1.1, "nan"])
def test_share_of_judge_failures(complaint, share):
    assert "--max_judge_failures" in complaint(max_judge_failures=share)


def test_judge_of_loop_2_needs_a_judge(complaint):
    sentence = complaint(use_llm_judge_loop2="")
    assert "--use_llm_judge_loop2" in sentence and "needs --use_llm_judge," in sentence


def test_judge_that_is_down(complaint, tmp_path):
    sentence = complaint(use_llm_judge="", llm_judge_base_url="http://127.0.0.1:9/v1")
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
    assert "2 rewards are called sqrt" in complaint(reward=["math:sqrt", "cmath:sqrt=2"])


def test_unknown_flag(complaint):
    assert "--num_samples" in complaint("--num_samples", "4")


def test_abbreviated_flag(complaint):
    assert "--learning" in complaint("--learning", "1e-5", learning_rate=None)


def test_all_loops_switched_off(complaint):
    assert "--caption_to_mask_weight" in complaint(
        mask_to_caption_weight=0, caption_to_mask_weight=0
    )
    assert "--mask_to_caption_weight" in complaint(
        mask_to_caption_weight=0, tasks="mask_caption_mask"
    )


def test_a_loop_named_twice(complaint):
    assert "--tasks" in complaint(tasks=["mask_caption_mask", "mask_caption_mask"])


# Model and data


def test_folder_without_a_model(complaint, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty" / "config.json") in complaint(model_path=tmp_path / "empty")


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
    sentence = complaint(batch_size=61)
    assert "60 samples" in sentence and "--batch_size 61" in sentence and "--data_dir" in sentence


def test_nothing_left_to_hold_out(complaint):
    assert "--eval_samples 60" in complaint(eval_data_dir=None, eval_samples=60)


# The output folder


def claimed(data, tmp_path, **changes):
    """The output folder of a run that has begun."""
    claim_output_dir(parse_args(flags(data, tmp_path / "run", **changes)))
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
    args = parse_args(flags(data, tmp_path / "run", batch_size=2, resume=""))
    vars(args)["world_size"] = 2
    claim_output_dir(args)
    for batch_size, world_size, accumulation, fits in (
        (4, 1, 1, True),
        (2, 1, 2, True),
        (1, 4, 1, True),
        (2, 1, 1, False),
        (2, 4, 1, False),
    ):
        vars(args).update(
            batch_size=batch_size, world_size=world_size, gradient_accumulation_steps=accumulation
        )
        if fits:
            check_output_dir(args)
        else:
            with pytest.raises(
                ValueError, match=f"4 prompts a step, now {batch_size * world_size}: --batch_size x"
            ):
                check_output_dir(args)


@pytest.mark.parametrize("place", ["file", "file/run", "file/a/run", "gone/run"])
def test_output_folder_that_cannot_be_written(data, tmp_path, monkeypatch, place):
    """Known before data and model are read."""
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(parts, "split_dataset", None)
    with pytest.raises(
        SystemExit, match=f"^rl_train: --output_dir {tmp_path / place} cannot be written: .*: [NI]"
    ) as stopped:
        train.main(flags(data, tmp_path / place))
    assert "\n" not in str(stopped.value) and sorted(path.name for path in tmp_path.iterdir()) == [
        "file",
        "gone",
    ]


def test_nothing_to_resume(complaint):
    assert "--resume" in complaint(resume="")


def test_resume_of_what_is_no_checkpoint(complaint, data, tmp_path):
    assert f"--resume {CHECKPOINT}" in complaint(resume=CHECKPOINT)
    assert "--resume /nowhere" in complaint(resume="/nowhere")


def test_bad_input_does_not_use_up_the_output_folder(complaint, tmp_path):
    complaint(batch_size=61)
    assert not (tmp_path / "run" / "config.json").exists()
    assert "--data_dir" in complaint(batch_size=62)  # and not: already holds a run


# Every flag does something


def attributes_of_args(tree) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "args"
    }


def test_every_flag_is_read():
    read = set()
    for file in (ROOT / "rl_train").rglob("*.py"):
        tree = ast.parse(file.read_text())
        if file.name == "config.py":
            tree.body = [node for node in tree.body if getattr(node, "name", "") != "build_parser"]
        read |= attributes_of_args(tree)
    known = {action.dest for action in build_parser()._actions} - {"help"}
    assert known - read == set(), "flags that nobody reads"
    assert read - known == set(), "flags that do not exist"


def test_every_flag_has_help():
    assert all(action.help for action in build_parser()._actions)
