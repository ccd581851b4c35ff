"""Record of a training step: the rollouts and metrics between its batches and its update.

Letters: B samples of a batch, N rows of a rollout, G generations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rl_train.config.grpo_config import LossConfig
from rl_train.loggers.metrics import StepMetrics
from rl_train.loss import (
    LossDenominators,
    MicroBatch,
    ReferenceScores,
    ScoredRollout,
    count_micro_batches,
    divide_by_batch_std,
    iter_micro_batches,
    loss_denominators,
    select_for_update,
)
from rl_train.rewards.combine import combine
from rl_train.rollout import RewardOutput, Rollout
from rl_train.tasks.base import Task
from rl_train.utils.nan_check import NanWatcher


@dataclass
class PendingRollout:
    """Rollout of a task whose teacher was asked, and whose rewards are not there yet."""

    task: Task
    rollout: Rollout
    reference: ReferenceScores | None
    wait_for_rewards: Callable[[], RewardOutput]  # what `Task.begin_rewards` returned
    nan_watcher: NanWatcher  # of the model's outputs so far

    def rewards(self) -> RewardOutput:
        """Wait for the teacher's answers and return the rewards."""
        outcome = self.wait_for_rewards()
        self.nan_watcher.join(self.task.context.policy.nan_watcher.take())
        return outcome


class Step:
    """Rollouts of the batches that one update learns from, and their metrics.

    Args:
        config: of the loss.
        num_ranks: ranks whose rollouts the update joins.
    """

    def __init__(self, config: LossConfig, num_ranks: int):
        self.config, self.num_ranks = config, num_ranks
        self.num_batches = 0  # of the loader, whose samples were asked every task's question
        self.rollouts: list[ScoredRollout] = []
        self.in_update: list[ScoredRollout] = []  # those with a gradient, of `prepare_update`
        self.metrics = StepMetrics()
        self.denominators: dict[str, LossDenominators] = {}  # {task: ..}, of `prepare_update`

    def ask(
        self, task: Task, rollout: Rollout, reference: ReferenceScores | None
    ) -> PendingRollout:
        """Ask the teacher what the rewards of a rollout need."""
        wait_for_rewards = task.begin_rewards(rollout)
        nan_watcher = task.context.policy.nan_watcher.take()
        return PendingRollout(task, rollout, reference, wait_for_rewards, nan_watcher)

    def add(
        self,
        pending: PendingRollout,
        outcome: RewardOutput,
        training_reward: torch.Tensor,
        advantages: torch.Tensor,
    ):
        """Add the rollout of a task, with its rewards.

        Args:
            training_reward: (N,) from which the advantages (N,) were computed.
        """
        task = pending.task
        scored = ScoredRollout(
            task=task,
            rollout=pending.rollout,
            outcome=outcome,
            reward=combine(outcome.rewards, task.reward_weights),  # without --scale_components
            advantages=advantages,
            reference=pending.reference,
            nan_watcher=pending.nan_watcher,
            training_reward=training_reward,
            mask_truncated_completions=self.config.mask_truncated_completions,
        )
        self.rollouts.append(scored)

    def prepare_update(self) -> bool:
        """Set the update's rows and loss denominators; return whether there is anything to learn.

        There is not if the rewards of every group are equal. All ranks must call it: it counts the
        step's rows over all of them. With --scale_rewards batch it also divides the advantages by
        the std of the step's rewards.

        Raises:
            FloatingPointError: a rollout of any rank has numbers that are not finite.
        """
        if self.config.scale == "batch":
            divide_by_batch_std(self.rollouts)
        self.denominators, has_signal = loss_denominators(self.rollouts, self.num_ranks)
        self.in_update = select_for_update(self.rollouts, self.config)
        return has_signal

    def count_micro_batches(self, size: int) -> int:
        """Return how many `micro_batches` yields on this rank."""
        return count_micro_batches(self.in_update, size)

    def micro_batches(self, size: int) -> Iterator[MicroBatch]:
        """Yield at most `size` rows of a rollout at a time; count the statistics of each."""
        for micro_batch in iter_micro_batches(self.in_update, size, self.denominators):
            yield micro_batch
            on_policy = self.metrics.updates == 0
            name = micro_batch.scored.task.name
            self.metrics.add_update(name, micro_batch.statistics, on_policy)
