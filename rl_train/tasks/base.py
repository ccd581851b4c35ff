"""Interfaces of a task and of the action that it may sample beside its text; shared functions.

Letters: B samples, N rows of a rollout, M actions in them, D parameters of an action, H W the
pixels of a mask.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from rl_train.config.grpo_config import LossConfig
from rl_train.engine import ScoreOutput
from rl_train.loss import LossDenominators, ScoredRollout, Statistic
from rl_train.policies.base import Features, Policy
from rl_train.rewards import LLMJudge, UserReward
from rl_train.rewards.cider import DocumentFrequencies
from rl_train.rewards.custom import add_user_rewards
from rl_train.rewards.iou import ON_TARGET, on_target
from rl_train.roles import Roles
from rl_train.rollout import Batch, RewardOutput, Rollout, SampledLatents
from rl_train.utils.rng import RowRNG
from sa2va_hf.batches import Prompts
from sa2va_hf.to_device import to_device


class LatentAction(Protocol):
    """Actions that a policy samples beside its text: M in the N rows of a rollout."""

    # Whether `loss` has a term that groups of equal rewards learn from; else these cost no backward
    has_supervised_term: bool = True

    def calibrate(self, batches: Iterable[Batch], max_new_tokens: int):
        """Fit the action's distribution to the base model, before the first step."""

    def draw(self, rollout: Rollout, rng: RowRNG) -> SampledLatents:
        """Sample the actions of a rollout, under the weights that sampled its text."""

    def distribution_params(
        self, rollout: Rollout, rows: slice, scores: ScoreOutput
    ) -> torch.Tensor:
        """Return the (M, D) parameters of the actions in `rows`, by the weights in use."""

    def loss(
        self,
        scored: ScoredRollout,
        rows: slice,
        scores: ScoreOutput,
        denominators: LossDenominators,
        config: LossConfig,
    ) -> tuple[list[torch.Tensor], dict[str, Statistic]]:
        """Return (terms to add to the loss of `rows`, {name: statistic})."""

    def metrics(self, rollout: Rollout, outcome: RewardOutput) -> dict[str, tuple[float, float]]:
        """Return {metric: (total, count)} of a rollout's actions."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]): ...


@dataclass(frozen=True)
class TaskContext:
    """Objects of a run that a task is built from, beside its own options."""

    policy: Policy
    roles: Roles
    max_reply_tokens: int  # longest reply of the teacher
    judge: LLMJudge | None = None  # if --use_llm_judge, or a weight of --reward_weights
    user_rewards: tuple[UserReward, ...] = ()  # of --reward
    has_masks: bool = True  # whether the training samples have masks, not only boxes and points
    names_nothing: bool = False  # whether captions of some samples name nothing
    use_llm_judge: bool = True  # whether the judge counts without --reward_weights too
    frequencies: DocumentFrequencies | None = None  # of CIDEr, if --reward_weights names it

    @property
    def judges_by_default(self) -> bool:
        return self.judge is not None and self.use_llm_judge

    @property
    def user_weights(self) -> dict[str, float]:
        return {reward.name: reward.weight for reward in self.user_rewards}


class Task(Protocol):
    """A question to the policy and its rewards. Built as Class(options, context).

    A subclass inherits the defaults here. The tasks of supervised training have examples in place
    of prompts and rewards, see `sft_tasks.SFTTask`.
    """

    # Frozen dataclass of `flags.flag` fields, with `weight` and `trainable_modules` among them
    Options: type
    name: str  # prefix of its metrics
    family: str  # of the models that it asks, see `policies.registry`
    context: TaskContext
    loss_weight: float
    reward_weights: dict[str, float]  # of the reward components that count; others are logged only
    # Components that --reward_weights may name beside those of `reward_weights`
    reward_components: tuple[str, ...] = ()
    # Own components with a weight, set by `set_reward_weights`; others need no computation
    weighted_components: tuple[str, ...] = ()
    action: LatentAction | None = None  # sampled beside the text
    takes_boxes: bool = False  # whether samples may have boxes and points in place of a mask
    takes_no_target: bool = False  # whether captions of samples may name nothing in the image
    asks_teacher: bool = False  # whether it uses that role; else no teacher is kept
    turns: int = 1  # questions about an image in an example of supervised training, at most
    # (policy, batch, features, max_new_tokens) -> {column: B values} of the evaluation split;
    # None: `cycle_metrics.measure`
    measure: Callable[[Policy, Batch, Features, int], dict[str, list]] | None = None

    def set_reward_weights(self, weights: dict[str, float]):
        """Set `reward_weights`: these of the task's own components, and the user's.

        A component of weight 0 is left out.
        """
        nonzero = {name: weight for name, weight in weights.items() if weight}
        self.weighted_components = tuple(nonzero)
        self.reward_weights = nonzero | self.context.user_weights

    def prompts(self, batch: Batch, features: Features) -> Prompts:
        """Return one prompt for each sample of the batch, made by the policy."""

    def true_masks(self, rollout: Rollout) -> list[torch.Tensor]:
        """Return the N true regions (H, W) bool on the policy's device."""
        device = self.context.policy.device
        return rollout.repeat_for_rows([to_device(mask, device) for mask in rollout.batch.masks])

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return the task's own rewards of a rollout, NaN where not scored. It is not written to.

        A task that defines `rewards` in its place has neither measurements nor the user's rewards.
        """

    def rewards(self, rollout: Rollout) -> RewardOutput:
        """Return `own_rewards` with the measurements and the user's rewards among them."""
        outcome = self.own_rewards(rollout)
        return replace(outcome, rewards=with_measurements(self, rollout, outcome))

    def begin_rewards(self, rollout: Rollout) -> Callable[[], RewardOutput]:
        """Ask the teacher; return a function that waits for its answers and returns `rewards`.

        In between a GPU computes masks while the CPU scores another task's captions, and captions
        are sampled together with what another task samples.
        """
        answers = self.ask_teacher(rollout)

        def rewards() -> RewardOutput:
            self._asked = rollout, answers
            try:
                return self.rewards(rollout)
            finally:
                self._asked = None

        return rewards

    def ask_teacher(self, rollout: Rollout) -> Any:
        """Ask the teacher what the rewards need, if possible without waiting for a GPU."""

    # (rollout, result of `ask_teacher`) while the function that `begin_rewards` returned runs
    _asked: tuple[Rollout, Any] | None = None

    def teacher_answers(self, rollout: Rollout) -> Any:
        """Return what `ask_teacher` returned for `begin_rewards`; ask now about another rollout."""
        if self._asked is None or self._asked[0] is not rollout:
            return self.ask_teacher(rollout)
        return self._asked[1]


def with_measurements(
    task: Task, rollout: Rollout, outcome: RewardOutput
) -> dict[str, torch.Tensor]:
    """Return a task's own rewards with "on_target" and the user's rewards, all on the CPU.

    "on_target" is measured if the other regions of the images are known and masks are answered. If
    the LLM judge has a weight and failed on a row, all weighted rewards of the row become NaN: the
    row is not scored.
    """
    batch, masks, verdicts = rollout.batch, outcome.masks, outcome.rewards.get("judge")
    rewards = {name: values.cpu() for name, values in outcome.rewards.items()}
    if batch.distractors is not None and masks is not outcome.targets:
        rewards[ON_TARGET] = on_target(masks, batch.masks, batch.distractors)
    columns = dict(task=task.name) | outcome.columns
    if outcome.replies:
        columns["replies"] = outcome.replies
    if outcome.mask_confidence:
        columns["mask_confidence"] = outcome.mask_confidence
    rewards = add_user_rewards(
        rewards,
        task.context.user_rewards,
        rollout,
        outcome.questions,
        masks,
        outcome.targets,
        **columns,
    )
    if verdicts is not None and "judge" in task.reward_weights:  # not with --reward_only
        # `combine` leaves out single NaN components, and rows whose components are all NaN.
        for name in task.reward_weights:
            rewards[name] = torch.where(verdicts.isnan(), torch.nan, rewards[name])
    return rewards
