"""tools/environment.sh and run_rl_train.sh before anything is installed: by fake interpreters."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT

# An interpreter of a version; IT_HAS lists what an import of it finds.
FAKE = """#!/bin/bash
echo "$0 $*" >> {log}
case "$*" in
*python_version*) echo {version} ;;
*version_info*) exit {is_old} ;;
*"import pip"*) exit {lacks_pip} ;;
*find_spec*) exit {lacks_packages} ;;
"-m venv "*) mkdir -p "$3/bin" && cp {complete} "$3/bin/python" ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A PATH of fakes and a few tools, and a function that sources environment.sh there."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, folder: Path):
        self.folder, self.bin, self.log = folder, folder / "bin", folder / "calls"
        self.bin.mkdir()
        self.log.touch()
        for tool in ("bash", "cat", "cp", "dirname", "env", "mkdir"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.complete = self.python(folder / "complete", "3.12.1")

    def python(self, file: Path, version: str, lacks_pip=0, lacks_packages=0) -> Path:
        """Write a fake interpreter."""
        file.parent.mkdir(parents=True, exist_ok=True)
        is_old = int(int(version.split(".")[1]) < 11)
        complete = self.folder / "complete"
        file.write_text(
            FAKE.format(log=self.log, **{k: v for k, v in locals().items() if k != "self"})
        )
        file.chmod(0o755)
        return file

    def source(self, **environment: str) -> subprocess.CompletedProcess:
        """Source environment.sh in an empty folder, and print the PYTHON that it chose."""
        command = f'set -euo pipefail; source {ROOT}/tools/environment.sh; echo "$PYTHON"'
        environment = dict(PATH=str(self.bin)) | environment
        work = self.folder / "checkout"
        work.mkdir(exist_ok=True)
        return subprocess.run(
            ["bash", "-c", command], cwd=work, env=environment, capture_output=True, text=True
        )


def sentence(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2 and not done.stdout, done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_an_old_python_is_named_with_the_remedy(machine):
    machine.python(machine.bin / "python3", "3.10.12")
    said = sentence(machine.source())
    assert said.startswith("Python 3.10.12 (python3) is too old: 3.11 or newer is needed; set ")
    assert "PYTHON=/path/to/python3.11" in said and "apt install python3.11-venv" in said
    assert not list((machine.folder / "checkout").iterdir())


def test_a_newer_one_on_the_path_is_taken(machine):
    machine.python(machine.bin / "python3", "3.10.12")
    machine.python(machine.bin / "python3.12", "3.12.1")
    done = machine.source()
    assert done.returncode == 0 and done.stdout == ".venv/bin/python\n", done
    assert "python3.12 -m venv .venv" in machine.log.read_text()


def test_no_newer_one_replaces_the_users(machine):
    """Whoever sets PYTHON is told, and gets no other."""
    old = machine.python(machine.folder / "old", "3.9.1")
    machine.python(machine.bin / "python3", "3.12.1")
    assert f"Python 3.9.1 ({old}) is too old" in sentence(machine.source(PYTHON=str(old)))
    assert f"Python 3.9.1 ({old}) is too old" in sentence(machine.source(PYTHON=str(old), VENV=""))
    said = sentence(machine.source(PYTHON="/nowhere/python3"))
    assert "PYTHON=/nowhere/python3 does not run" in said and "apt install" in said


def test_an_environment_of_an_older_python(machine):
    venv = machine.folder / "checkout" / ".venv"
    machine.python(venv / "bin" / "python", "3.10.12", lacks_packages=1)
    machine.python(machine.bin / "python3", "3.12.1")
    said = sentence(machine.source())
    assert said.startswith(".venv holds Python 3.10.12, and 3.11 or newer is needed; move it away")
    assert "mv .venv .venv.old" in said and "VENV=/another/folder" in said
    assert [file.name for file in (venv / "bin").iterdir()] == ["python"]


def test_an_environment_whose_interpreter_is_gone(machine):
    """Its base was removed, or the folder was copied from another machine."""
    binaries = machine.folder / "checkout" / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to("/nowhere/python3.11")
    machine.python(machine.bin / "python3", "3.12.1")
    said = sentence(machine.source())
    assert ".venv/bin/python does not run; move it away (mv .venv .venv.old)" in said
    assert (binaries / "python").is_symlink()
    assert "-m venv" not in machine.log.read_text()


def test_an_environment_without_pip(machine):
    """`python -m venv` was interrupted, or Debian's ensurepip is missing."""
    venv = machine.folder / "checkout" / ".venv"
    machine.python(venv / "bin" / "python", "3.12.1", lacks_pip=1, lacks_packages=1)
    machine.python(machine.bin / "python3", "3.12.1")
    said = sentence(machine.source())
    assert said.startswith(".venv is half installed: it has no pip; move it away")


def test_a_complete_environment_is_taken_as_it_is(machine):
    machine.python(machine.folder / "checkout" / ".venv" / "bin" / "python", "3.11.2")
    done = machine.source()
    assert done.returncode == 0 and done.stdout == ".venv/bin/python\n"
    assert "pip" not in machine.log.read_text()


def test_what_is_installed_is_said_and_shown(machine):
    """It takes minutes: pip is not silenced."""
    venv = machine.folder / "checkout" / ".venv"
    machine.python(venv / "bin" / "python", "3.12.1", lacks_packages=1)
    done = machine.source()
    assert done.returncode == 0, done
    assert done.stdout.startswith("installing PyTorch, transformers and the other requirements")
    (command,) = [line for line in machine.log.read_text().splitlines() if "pip install" in line]
    assert command.endswith("-m pip install -e .[test] -c constraints.txt")


def test_without_an_environment_nothing_is_installed(machine):
    python = machine.python(machine.bin / "python3", "3.12.1", lacks_packages=1)
    done = machine.source(VENV="", PYTHON="python3")
    assert done.returncode == 0 and done.stdout == "python3\n"
    assert not [w for w in ("-m venv", "pip") if w in machine.log.read_text()], python


def launch(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the launcher where no interpreter is: what it says comes before that is looked for."""
    return subprocess.run(
        ["bash", "run_rl_train.sh", *argv],
        cwd=ROOT,
        env=dict(PATH="/nowhere:/bin", PYTHON="/nowhere/python3", VENV="/nowhere/venv")
        | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["demo", "--help"], ["points", "-h"]])
def test_help_names_all_words_and_variables(argv):
    done = launch(*argv)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.count("\n") <= 40 and max(map(len, done.stdout.splitlines())) <= 120
    for word in ("demo", "points", "supervised"):
        assert f"\n  {word} " in done.stdout, word
    for word in ("--model_path", "--max_restarts", "--resume"):
        assert word in done.stdout, word
    for variable in (ROOT / "rl_train" / "distributed" / "launch.py").read_text().split('"'):
        if variable.isupper() and variable.isidentifier() and "TORCH" not in variable:
            assert variable in done.stdout, variable
    assert {"PYTHON", "VENV", "NPROC", "NNODES"} <= set(done.stdout.replace(",", " ").split())


@pytest.mark.parametrize(
    "word, advice",
    [
        ("point", "did you mean points?"),
        ("sft", "did you mean supervised?"),
        ("dmo", "did you mean demo?"),
        ("train", "the words are demo, points, supervised"),
    ],
)
def test_a_misspelt_word(word, advice):
    done = launch(word, "--max_steps", "5")
    assert f"unknown word {word}; {advice}" in sentence(done)


def test_a_demo_takes_flags(tmp_path):
    """They stand behind the demo's own, so that they count."""
    calls, python = tmp_path / "calls", tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/bash\ncase "$1" in -c) ;; *) echo "$*" >> {calls} ;; esac\n')
    python.chmod(0o755)
    for argv in (["points"], ["demo"]):
        calls.unlink(missing_ok=True)
        environment = dict(VENV="", PYTHON=str(python), PATH=os.environ["PATH"])
        done = launch(*argv, "--max_steps", "5", **environment)
        assert done.returncode == 0, done.stderr
        assert calls.read_text().splitlines()[-1].endswith("--resume auto --max_steps 5")
        assert "_demo --" in calls.read_text()


def test_setup_names_an_old_python():
    code = "import sys; sys.version_info = (3, 10, 12); exec(open('setup.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "is too old: rl-sa2va needs 3.11 or newer" in done.stderr.splitlines()[-1]
