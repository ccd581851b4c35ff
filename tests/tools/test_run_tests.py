"""Tests of the tests: what they need, and `tools/run_tests.sh --gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# What a machine with a GPU may lack: the extras of setup.py.
OPTIONAL = "datasets trl inflect hypothesis openai xdist pycocoevalcap matplotlib"
WITHOUT = f"""
import sys
from functools import partial
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_what_is_there(name, path=None, target=None):
    missing = name.partition(".")[0] in "{OPTIONAL}".split()
    return None if missing else find_spec(name, path, target)

PathFinder.find_spec = partial(find_what_is_there)  # unlike a function it is never bound
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_tests_are_collected_without_the_extras():
    command = [sys.executable, "-c", WITHOUT, "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "gpu"]
    environment = os.environ | dict(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "test_generate.py::test_the_logits_of_a_bf16_model_are_not_rounded" in done.stdout


def test_help_is_printed_before_anything_is_installed(tmp_path):
    environment = dict(PATH=os.environ["PATH"], VENV=str(tmp_path / "venv"), PYTHON="/no/python")
    command = ["bash", str(ROOT / "tools" / "run_tests.sh"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("The project's tests") and "--gpu" in done.stdout
    assert "set -euo" not in done.stdout and not (tmp_path / "venv").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_skipped_silently():
    environment = os.environ | dict(VENV="", PYTHON=sys.executable)
    done = subprocess.run(
        ["bash", "tools/run_tests.sh", "--gpu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "--gpu: torch finds no CUDA device here\n"
