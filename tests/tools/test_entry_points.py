"""Every command starts in a process of its own: no import depends on another's order."""

import subprocess
import sys

import pytest

from tests.runs import ENVIRONMENT, ROOT

COMMANDS = ["rl_train.train", "rl_train.sft", "tools.evaluate", "tools.export", "tools.predict"]


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_is_imported_alone(module):
    command = [sys.executable, "-c", f"import {module}"]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
