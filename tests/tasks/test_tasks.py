"""A new task is a class and a line in TASKS: its flags are read."""

from dataclasses import dataclass

import pytest

from rl_train import cli
from rl_train.cli import parse
from rl_train.config.flags import WEIGHT, flag
from rl_train.tasks import TASKS
from rl_train.tasks.sft_tasks import SFT_TASKS


class Counting:
    name, family = "counting", "sa2va"
    asks_teacher, measure, action = False, None, None

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "of counting's loss", name="counting_weight", type=WEIGHT)
        most: int = flag(9, "objects that are counted")
        trainable_modules = ("lora",)


def test_a_new_task_has_flags(monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS, "counting", Counting)
    line = f"--model_path {tmp_path} --data_dir {tmp_path} --output_dir {tmp_path}/o"
    line += " --tasks counting --most 4"
    config = parse(line.split())
    assert config.tasks["counting"].most == 4 and config.kinds == dict(counting=Counting)
    with pytest.raises(SystemExit):
        cli.parse([*line.split(), "--least", "1"])


def test_every_task_has_a_weight():
    for name, kind in (TASKS | SFT_TASKS).items():
        assert kind.Options.__dataclass_fields__["weight"].metadata["name"], name
