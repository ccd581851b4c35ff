"""A flag is declared once: parser, config.json and the rule of a resume follow its declaration."""

from dataclasses import dataclass, replace

import pytest

from rl_train import cli, train
from rl_train.config.flags import (
    COUNT,
    add_flags,
    flag,
    flag_fields,
    flag_name,
    flags_with,
    read_flags,
)
from rl_train.config.flags_page import render_page
from rl_train.config.grpo_config import CONFIG_CLASSES, PolicyConfig
from rl_train.config.saved import ADDED
from rl_train.config.sft_config import ALL_CONFIG_CLASSES
from rl_train.run.error_report import remedy
from rl_train.sft import SFT
from rl_train.tasks import TASKS, PointSegmentation
from rl_train.utils.command_line import FlagParser
from rl_train.utils.io import read_json, write_json
from tests.runs import CHECKPOINT, ROOT, complaint_of, flags, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)
CLASSES = [*ALL_CONFIG_CLASSES, *(task.Options for task in TASKS.values())]
ALIASES = [(alias, ours) for ours, n in flags_with("aliases", CLASSES).items() for alias in n]


@dataclass(frozen=True, kw_only=True)
class LargerPolicyConfig(PolicyConfig):
    """model"""

    free: int = flag(3, "may change", type=COUNT, aliases=("loose",), free_on_resume=True)
    fixed: int = flag(
        3, "may not", type=COUNT, lowers_memory_of=("update",), may_differ_by_rank=True
    )


def test_a_new_flag_is_one_line(data, tmp_path):
    """Parsed, on record in config.json, free or fixed on resume, and named where memory ends."""
    program = replace(cli.GRPO, configs=CONFIG_CLASSES | {"policy": LargerPolicyConfig})
    argv = flags(data, tmp_path / "run", max_steps=1)
    train.main([*argv, "--loose", "5", "--fixed", "6"], program)
    written = read_json(tmp_path / "run" / "config.json")
    assert (written["free"], written["fixed"]) == (5, 6)

    config = cli.parse([*argv, "--resume", "--free", "7", "--fixed", "6"], program)
    assert (config.policy.free, config.policy.fixed) == (7, 6)
    cli.check_output_dir(config, config.flags)
    with pytest.raises(
        ValueError, match="holds a run of another config: --fixed was 6, now 8; give"
    ):
        cli.check_output_dir(config, config.flags | dict(fixed=8))
    assert "fixed" in config.flags_with("may_differ_by_rank")
    assert "--fixed" not in remedy("update", config)  # a run that has begun keeps it
    elsewhere = replace(config, run=replace(config.run, output_dir=str(tmp_path / "new")))
    assert "--fixed" in remedy("update", elsewhere)


# Names of other projects


@pytest.fixture
def parse(data, tmp_path):
    """Function of words behind a whole command line, without the flag `left_out`: its flags."""

    def parsed(words, left_out):
        of_points = left_out in {flag_name(f) for f in flag_fields(PointSegmentation.Options)}
        changes = dict(tasks="point_segmentation") if of_points else {}
        changes |= {left_out: None}
        return cli.parse([*flags(data, tmp_path / "run", **changes), *words]).flags

    return parsed


@pytest.mark.parametrize("alias, ours", ALIASES)
def test_an_alias_sets_our_flag(parse, data, alias, ours):
    paths = {"model_path": CHECKPOINT, "data_dir": data / "heldout", "dtype": "float32"}
    paths |= {"llm_judge_base_url": "http://host/v1", "llm_judge_model": "m"}
    paths |= {"ablation_reward": "shuffled"}
    value = [] if ours == "mask_truncated_completions" else [str(paths.get(ours, 3))]
    assert parse([f"--{alias}", *value], ours) == parse([f"--{ours}", *value], ours)
    default = cli.build_parser(TASKS).get_default(ours)
    assert parse([f"--{alias}", *value], ours)[ours] != default


def test_the_page_of_flags_is_the_one_of_this_code():
    """Written by python -m rl_train.config.flags_page > docs/flags.md"""
    page = (ROOT / "docs" / "flags.md").read_text()
    assert page == render_page()
    assert all(f"`--{alias}`" in page for alias, _ in ALIASES) and "default: " not in page


def test_supervised_training_has_the_aliases_of_its_flags():
    parser = cli.build_parser(SFT.tasks, SFT)
    args = ["--model_name_or_path=M", "--dataset_name=D", "--output_dir=O"]
    assert parser.parse_args([*args, "--per_device_batch_size=7"]).batch_size == 7
    with pytest.raises(SystemExit, match="--beta: no such flag"):
        parser.parse_args([*args, "--beta=1"])


# Words that are no flags


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--learning-rate", "1"], "--learning-rate: no such flag, did you mean --learning_rate?"),
        (["--loss_typ=grpo"], "--loss_typ: no such flag, did you mean --loss_type?"),
        (["--reward_weight", "1"], "--reward_weight: no such flag, did you mean --reward_weights?"),
        (["--hub_token", "x", "--epsilons", "1"], "flag; --epsilons: no such flag, did you mean"),
        (["--hub_token", "x"], "rl_train: --hub_token: no such flag"),
        (
            ["--likelihood_weight", "1"],
            "rl_train: --likelihood_weight: no such flag, give weights such as --reward_weights "
            "loop2.meteor=0.5 loop2.likelihood=0.5",
        ),
        (
            ["--use_llm_judge", "--use_llm_judge_loop2"],
            "rl_train: --use_llm_judge_loop2: no such flag, give weights such as --reward_weights "
            "loop2.meteor=0.25 loop2.judge=0.75",
        ),
        (["--ema_half_life", "0.2"], "no such flag, give --ema_decay, the decay per update"),
        (["--entropy_coef", "0.01"], "no such flag, a larger --kl_coef or --temperature keeps"),
        (["--seg_state", "after_norm"], "no such flag, add the key seg_state to the model's"),
        (["beta"], "rl_train: beta: neither a flag nor the value of one"),
        (["--answer_style", "points"], "--answer_style: only with --tasks point_segmentation"),
        (["--sam_path", "x"], "--sam_path: only with --tasks point_segmentation"),
    ],
)
def test_an_unknown_flag_is_refused_with_a_similar_one(data, tmp_path, words, sentence):
    said = complaint_of([*flags(data, tmp_path / "run"), *words])
    assert sentence in said


def test_a_run_with_a_flag_that_is_gone_is_not_resumed_without_it(data, tmp_path):
    config = cli.parse([*flags(data, tmp_path / "run"), "--resume"])
    write_json(tmp_path / "run" / "config.json", config.flags | dict(entropy_coef=0.0))
    cli.check_output_dir(config, config.flags)
    write_json(tmp_path / "run" / "config.json", config.flags | dict(entropy_coef=0.01))
    with pytest.raises(ValueError, match="--entropy_coef was 0.01, which is a flag no more"):
        cli.check_output_dir(config, config.flags)


def test_a_run_begun_before_a_flag_is_resumed_without_it(data, tmp_path):
    for words, refused in (([], False), (["--quantize_base", "4bit"], True)):
        config = cli.parse([*flags(data, tmp_path / "run"), "--resume", *words])
        before = {name: value for name, value in config.flags.items() if name not in ADDED}
        write_json(tmp_path / "run" / "config.json", before)
        if refused:
            with pytest.raises(ValueError, match="--quantize_base was None, now 4bit"):
                cli.check_output_dir(config, config.flags)
        else:
            cli.check_output_dir(config, config.flags)


# Kinds of fields


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """kinds"""

    needed: str = flag(help="no default")
    share: float | None = flag(None, "or none", name="a_share")
    words: list[str] = flag([], "several")
    on: bool = flag(True, "can be switched off")
    off: bool = flag(False, "can be switched on")


def test_a_field_is_parsed_by_its_type():
    parser = FlagParser("python -m tools.kinds")
    add_flags(parser, Kinds)
    usual = read_flags(parser.parse_args(["--needed", "x"]), Kinds)
    assert usual == Kinds(needed="x", share=None, words=[], on=True, off=False)
    argv = "--needed x --a_share .5 --words a b --no-on --off".split()
    given = read_flags(parser.parse_args(argv), Kinds)
    assert given == Kinds(needed="x", share=0.5, words=["a", "b"], on=False, off=True)
    with pytest.raises(
        SystemExit, match="^kinds: --a_share nan: must be a finite number\nrun with"
    ):
        parser.parse_args(["--needed", "x", "--a_share", "nan"])
