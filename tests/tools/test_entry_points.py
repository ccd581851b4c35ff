"""Every command starts in a process of its own: no import depends on another's order."""

import re
import runpy
import subprocess
import sys

import pytest

from rl_train import cli
from rl_train.sft import SFT
from rl_train.utils.command_line import default_note
from tests.runs import ENVIRONMENT, FRAGMENT, ROOT
from tools import check_checkpoint, convert_data, evaluate_flags, predict
from tools.rank_samples import RANK

COMMANDS = ["rl_train.train", "rl_train.sft", "tools.evaluate", "tools.export", "tools.predict"]


# Each import in a fork of a process that has none of ours, only the libraries that take seconds.
IMPORT_ALONE = """
import importlib, os, sys
import peft, torch, transformers
for module in sys.argv[1:]:
    assert not {"rl_train", "sa2va_hf", "tools"} & set(sys.modules)
    child = os.fork()
    if child == 0:
        importlib.import_module(module)
        sys.stdout.write(module + " ")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""


def test_commands_are_imported_alone():
    command = [sys.executable, "-c", IMPORT_ALONE, *COMMANDS]
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.split() == COMMANDS, ended.stderr


PARSERS = dict(
    predict=predict.build_parser(),
    check_checkpoint=check_checkpoint.build_parser(),
    evaluate=evaluate_flags.build_parser("Evaluate."),
    convert_data=convert_data.build_parser(),
)


@pytest.mark.parametrize("program", PARSERS)
def test_each_flag_has_a_help_that_states_its_default_once(program):
    """A default in plain words would stand beside the one that the parser adds."""
    actions = PARSERS[program]._actions
    assert not [action.option_strings[0] for action in actions if not action.help]
    assert not [action.help for action in actions if re.match(FRAGMENT, action.help)]
    assert not [
        action.option_strings[0]
        for action in actions
        if "default" in action.help and default_note(action)
    ]


PROGRAMS = ["evaluate", "export", "predict", "inspect_data", "rollouts", "rank_samples"]
PROGRAMS += ["benchmarks/random_checkpoint", "demo/refcoco_writer", "demo/make_demo"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_unknown_flag_is_status_2(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, "--no_such_flag"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / f"{program}.py"), run_name="__main__")
    assert ended.value.code == 2 and "--no_such_flag: no such flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    "program, words",
    [
        ("convert_data", "--dataset and --data_dir and --output must be given"),
        ("benchmarks/__main__", "data, decode, head, logprob"),
    ],
)
def test_a_missing_command_is_named(program, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / f"{program}.py"), run_name="__main__")
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("program", [cli.GRPO, SFT, RANK], ids=lambda program: program.name)
def test_the_usage_names_the_flags_that_are_required(program):
    tasks = {name: program.tasks[name] for name in program.default_tasks}
    parser = cli.build_parser(tasks, program)
    named = set(re.findall(r"--\w+", parser.usage))
    assert named == {a.option_strings[0] for a in parser._actions if a.required}
