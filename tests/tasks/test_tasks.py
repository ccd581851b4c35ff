"""A new task is a class and a line in TASKS: its flags are read."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from rl_train import cli
from rl_train.cli import parse
from rl_train.config.flags import WEIGHT, flag
from rl_train.rewards import UserReward
from rl_train.rewards.combine import combine
from rl_train.rollout import RewardOutput
from rl_train.tasks import TASKS
from rl_train.tasks.base import Task, TaskContext, with_measurements
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
    assert config.tasks["counting"].most == 4 and config.task_classes == dict(counting=Counting)
    with pytest.raises(SystemExit):
        cli.parse([*line.split(), "--least", "1"])


def test_every_task_has_a_weight():
    for name, kind in (TASKS | SFT_TASKS).items():
        assert kind.Options.__dataclass_fields__["weight"].metadata["name"], name


def test_rows_without_a_verdict_are_not_scored_by_the_rest():
    rewards = {
        "meteor": torch.tensor([0.4, 0.4]),
        "judge": torch.tensor([0.5, math.nan]),
        "mine": torch.ones(2),
        "iou": torch.ones(2),
    }
    weights = {"meteor": 0.25, "judge": 0.75, "mine": 1.0}
    assert not combine(rewards, weights).isnan().any()  # left alone, the row would be METEOR's
    context = SimpleNamespace(user_rewards=())
    task = SimpleNamespace(name="loop1", reward_weights=weights, context=context)
    rollout = SimpleNamespace(batch=SimpleNamespace(distractors=None))
    marked = with_measurements(task, rollout, RewardOutput(rewards, []))
    scored, unscored = combine(marked, weights)
    assert scored == pytest.approx(0.1 + 0.375 + 1) and unscored.isnan()
    assert marked["iou"].tolist() == [1, 1]
    assert rewards["meteor"].tolist() == pytest.approx([0.4, 0.4])
    task.reward_weights = {"mine": 1.0}  # the judge is only logged
    assert with_measurements(task, rollout, RewardOutput(rewards, []))["mine"].tolist() == [1, 1]


def test_the_users_rewards_are_added_to_a_task_s_own(batch):
    """The task says what they see; it need not call them."""

    class Ones(Task):
        name, reward_weights = "ones", {"one": 1.0}
        rows = torch.ones(4, dtype=torch.bool)

        def own_rewards(self, rollout):
            texts = ["?"] * len(rollout.texts)
            return RewardOutput({"one": torch.ones(4)}, [self.rows] * 4, [~self.rows] * 4, texts)

    def seen(completions, prompts, masks, targets, task):
        assert prompts == ["?"] * 4 and task == "ones"
        return [float(mask.all() and not target.any()) for mask, target in zip(masks, targets)]

    task = Ones()
    task.context = TaskContext(None, None, 8, None, (UserReward("mine:seen", 0.5, seen),))
    valid = torch.ones(4, 2, dtype=torch.bool)
    rollout = SimpleNamespace(batch=batch, texts=["a"] * 4, stopped=valid[:, 0], valid=valid)
    rollout.repeat_for_rows = lambda values: values
    rewards = task.rewards(rollout).rewards
    assert {name: values.tolist() for name, values in rewards.items()} == {
        "one": [1] * 4,
        "seen": [1] * 4,
    }
