"""Flags and curves of TRL and of earlier scripts: each row of the document's tables."""

import re

import pytest

from rl_train import cli
from rl_train.foreign_curves import CURVES, curves_table
from rl_train.foreign_flags import (
    DEFAULTS,
    EACH_STEP,
    FOREIGN,
    LAUNCHER,
    NO_EXPERTS,
    NO_TOOLS,
    OURS,
    OWN_SAMPLER,
)
from rl_train.tasks import TASKS
from rl_train.translate_flags import defaults_table, find, flags_table, pieces, translate
from tests.runs import CHECKPOINT, ROOT, complaint_of, flags, on_one_core

one_core = pytest.fixture(autouse=True)(on_one_core)
DOCUMENT = (ROOT / "docs" / "coming_from.md").read_text()
PARSER = cli.build_parser(TASKS)
KNOWN = cli.known_flags(PARSER)
NAMED = re.compile(r"--\w+")
NONE_OF_OURS = {OWN_SAMPLER, EACH_STEP, LAUNCHER, NO_EXPERTS, NO_TOOLS}  # say why there is none
ACCEPTED = [name for name, row in FOREIGN.items() if row.ours]
SOME = [
    (name, value)
    for name, row in FOREIGN.items()
    for value in [*row.values, *([row.example] if row.example else [])]
] + [(name, value) for name, values in OURS.items() for value in values]
REFUSED = [name for name, row in FOREIGN.items() if row.why]


@pytest.fixture
def parse(data, tmp_path):
    """Function of words behind a whole command line, without the flags `left_out`: its flags."""

    def parsed(words, left_out=()):
        absent = {name.removeprefix("--").removeprefix("no-"): None for name in left_out}
        return cli.parse([*flags(data, tmp_path / "run", **absent), *words]).flags

    return parsed


def a_value(flag: str, data) -> str:
    """Another than the default of one of our flags, as it would be written."""
    paths = {"--model_path": CHECKPOINT, "--data_dir": data / "heldout", "--dtype": "float32"}
    given = paths | {"--llm_judge_base_url": "http://host/v1", "--llm_judge_model": "m"}
    return str(given.get(flag, 3))


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_same_meaning_sets_ours(parse, data, name, monkeypatch):
    monkeypatch.setattr(cli, "check_project", lambda project: None)  # of --wandb
    ours = FOREIGN[name].ours
    value = a_value(ours, data)
    set_by = parse([name, value], [ours])
    assert set_by == parse([ours, value], [ours]) == parse([f"{name}={value}"], [ours])
    said = set_by[ours[2:]]
    said = str(said[0] if isinstance(said, list) else said)
    assert said in (value, f"{value}.0") and said != str(PARSER.get_default(ours[2:]))


@pytest.mark.parametrize("name, value", SOME)
def test_a_value_that_means_ours_sets_it(parse, name, value, monkeypatch):
    monkeypatch.setattr(cli, "check_project", lambda project: None)
    words = translate([name, value], KNOWN)
    left_out = [word for word in words if word.startswith("--")]
    assert set(left_out) <= KNOWN and name not in words[1:]
    assert parse([name, value], [*left_out, name]) == parse(words, [*left_out, name])


@pytest.mark.parametrize("name", REFUSED)
def test_another_meaning_is_refused_with_ours(data, tmp_path, capsys, name):
    given = name.replace("*", "x")
    row = find(given)
    sentence = complaint_of(capsys, [*flags(data, tmp_path / "run"), given, "something"])
    assert sentence.strip() == f"{given} something: {row.why}"
    named = set(NAMED.findall(row.why))
    assert named <= KNOWN and (named or row.why in NONE_OF_OURS)


def test_the_document_says_what_the_code_does():
    """If not: `python -c "from rl_train.translate_flags import *; print(flags_table())"`."""
    for table in (flags_table(), defaults_table(PARSER), curves_table()):
        assert table in DOCUMENT


def test_what_others_write_in_other_ways():
    def ours(words):
        return " ".join(translate(words.split(), KNOWN))

    assert ours("--bf16") == ours("--bf16 True") == "--dtype bfloat16"
    assert ours("--top_p 1.0 --top-k=0 --use_vllm False --beta=.1") == "--kl_coef .1"
    assert ours("--warmup_steps 0.1") == "--warmup_ratio 0.1"
    assert ours("--report_to tensorboard wandb") == "--wandb"
    assert ours("--resume_from_checkpoint") == "--resume"
    assert ours("--resume_from_checkpoint run/checkpoint_step_1") == (
        "--resume run/checkpoint_step_1"
    )
    assert ours("--learning-rate 1 --num-generations=2 --epsilon-high 3") == (
        "--learning_rate 1 --num_generations 2 --clip_range_high 3"
    )
    for kept in ("--gradient_checkpointing", "--max_steps 7", "--loss_type=grpo", "--new-one 1 -h"):
        assert ours(kept) == kept
    assert list(pieces(["x", "--a", "1", "-2", "--b=3"])) == [
        ("x", [], ["x"]),
        ("--a", ["1", "-2"], ["--a", "1", "-2"]),
        ("--b", ["3"], ["--b=3"]),
    ]


def test_a_word_without_dashes_is_no_flag():
    for words in (["seed", "3"], ["config"], ["-seed", "3"], ["beta", "1", "--seed", "3"]):
        assert translate(words, KNOWN) == words


@pytest.mark.parametrize(
    "words", ["--beta 1 --kl_coef 1", "--kl_coef 1 --beta 1", "--bf16 --torch_dtype float32"]
)
def test_one_thing_is_said_once(words):
    with pytest.raises(ValueError, match="both say --(kl_coef|dtype): give one of them"):
        translate(words.split(), KNOWN)
    assert translate("--kl_coef 1 --kl_coef 2".split(), KNOWN) == "--kl_coef 1 --kl_coef 2".split()


def test_a_task_s_own_flag_keeps_its_meaning():
    assert translate(["--beta", "2"], KNOWN | {"--beta"}) == ["--beta", "2"]


def test_a_program_without_our_flag_gives_no_advice_that_names_it():
    """Supervised training has no groups: there the number is that of --batch_size."""
    for name, ours in (
        ("--per_device_train_batch_size", "--num_generations"),
        ("--beta", "--kl_coef"),
    ):
        assert translate([name, "8"], KNOWN - {ours}) == [name, "8"]


def test_what_both_have_is_a_flag_or_has_a_row():
    assert set(DEFAULTS) <= KNOWN
    for ours, (theirs, _) in DEFAULTS.items():
        row = find(theirs)
        said = "" if row is None else row.here()
        assert (theirs == ours and row is None) or f"`{ours}" in said, theirs


@pytest.mark.oracle
def test_the_rows_are_those_of_trl():
    """All that GRPOConfig adds to transformers has a row, but for what is one of our flags."""
    trl = pytest.importorskip("trl")
    import dataclasses

    from transformers import TrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    usual = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = [name for name in theirs if name not in usual]
    missing = [name for name in own if f"--{name}" not in KNOWN]
    assert [name for name in missing if find(f"--{name}") is None] == []
    for theirs_name, default in DEFAULTS.values():
        name = theirs_name.removeprefix("--")
        if name in theirs and default not in ("all", "never"):
            assert theirs[name] == default, name


def test_curves_are_written_in_one_way():
    assert all(theirs or earlier for theirs, earlier, _ in CURVES.values())
