"""A task that trains on an ablation reward (--ablation_reward) in place of its own."""

from collections.abc import Callable

from rl_train.policies.base import Features
from rl_train.rewards.ablations import COMPONENT, AblationReward
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks.base import Task
from sa2va_hf.batches import Prompts


class AblatedTask(Task):
    """Task with the prompts, action and metrics of another, and an ablation as its reward.

    Args:
        task: the other; its own reward components are still measured and logged.
        current_seed: returns (step, index of the task) of the rollout in progress, which seeds
            "shuffled".
    """

    def __init__(
        self, task: Task, ablation: AblationReward, current_seed: Callable[[], tuple[int, int]]
    ):
        self.task, self.ablation, self.current_seed = task, ablation, current_seed
        self.name, self.family, self.context = task.name, task.family, task.context
        self.asks_teacher = task.asks_teacher
        self.action, self.measure = task.action, task.measure
        self.reward_weights = {COMPONENT: 1.0}

    @property
    def loss_weight(self) -> float:
        return self.task.loss_weight  # a task may change it from step to step

    def prompts(self, batch: Batch, features: Features) -> Prompts:
        return self.task.prompts(batch, features)

    def rewards(self, rollout: Rollout) -> RewardOutput:
        """Return the task's own rewards with the ablation's among them."""
        return self.begin_rewards(rollout)()

    def begin_rewards(self, rollout: Rollout) -> Callable[[], RewardOutput]:
        rewards = self.task.begin_rewards(rollout)
        return lambda: self.ablation(self.task, rollout, rewards(), self.current_seed())
