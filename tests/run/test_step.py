"""The record of a step: whose fault a number is that is not finite."""

from types import SimpleNamespace

import torch

from rl_train.config.grpo_config import LossConfig
from rl_train.rollout import RewardOutput
from rl_train.run.step import Step
from rl_train.utils.nan_check import NanWatcher


class Task:
    """A task whose teacher answers with these numbers when its rewards are computed."""

    def __init__(self, name, policy, answers):
        self.name, self.context = name, SimpleNamespace(policy=policy)
        self.answers, self.reward_weights = answers, {"iou": 1.0}

    def begin_rewards(self, rollout):
        def rewards():
            self.context.policy.nan_watcher("mask logits", self.answers)
            return RewardOutput({"iou": torch.zeros(2)}, masks=[], targets=[])

        return rewards


def test_a_fault_is_that_of_the_task_whose_rewards_met_it():
    """Rewards of all tasks are computed before any is added."""
    policy = SimpleNamespace(nan_watcher=NanWatcher())
    step = Step(LossConfig(), num_ranks=1)
    answers = {"loop2": torch.tensor([torch.nan]), "loop1": torch.ones(1)}
    asked = [step.ask(Task(name, policy, numbers), None, None) for name, numbers in answers.items()]
    outcomes = [rollout.rewards() for rollout in asked]
    for rollout, outcome in reversed([*zip(asked, outcomes)]):
        step.add(rollout, outcome, torch.zeros(2), torch.zeros(2))
    faults = {scored.task.name: scored.faults() for scored in step.rollouts}
    assert faults == {"loop1": [], "loop2": ["loop2: mask logits"]}
