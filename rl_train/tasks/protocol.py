"""The protocol by which the loop knows a task and the action that it may draw."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from rl_train.rewards import LLMJudge, UserReward
from rl_train.rewards.length import LengthTerm
from rl_train.roles import Roles
from rl_train.types import Batch, Outcome, Rollout


class Action(Protocol):
    """What a policy draws beside its text: M actions in the N rows of a rollout."""

    def calibrate(self, batches, max_new_tokens: int):
        """Fit what the action needs to know of the base, before the first step."""

    def draw(self, rollout: Rollout, draws) -> object:
        """The record of the actions drawn in a rollout, under the role that sampled it."""

    def parameters(self, rollout, rows: slice, scores) -> torch.Tensor:
        """(M, D) of the distribution of the M actions in `rows`, by the weights in use."""

    def loss(self, work, rows: slice, scores, totals, config) -> tuple[list, dict]:
        """(terms to add to the loss of `rows`, statistics as of `objective.MicroBatchLoss`)."""

    def count(self, rollout, scored) -> int:
        """How many actions the scored rows (N,) bool hold."""

    def curves(self, rollout: Rollout, outcome: Outcome) -> dict[str, tuple[float, float]]:
        """{curve: (total, count)} of a rollout's actions."""

    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict): ...


@dataclass(frozen=True)
class Context:
    """What a task is built from beside its own options."""

    policy: object
    roles: Roles
    max_new_tokens: int  # of an answer of the teacher
    judge: LLMJudge | None = None  # if --use_llm_judge
    user_rewards: tuple[UserReward | LengthTerm, ...] = ()  # of --reward, and of length flags


class Task(Protocol):
    """One question, its rewards and what else its loss holds. Built as Class(options, context)."""

    Options: type  # frozen dataclass of `config.flag` fields; `weight` and `trains` among its names
    name: str  # prefix of its curves
    weight: float  # of its loss
    weights: dict[str, float]  # of the reward components that count; others are logged only
    action: Action | None  # what is drawn beside the text
    family: str  # of the models that it asks, see `policies.families`; of the class
    asks_teacher: bool  # whether `judge` asks that role, which else is not kept; of the class
    # (policy, batch, features, max_new_tokens) -> {column: B values} held out, in place of
    # `cycle_measures.measure`, which is None's; of the class
    measure: Callable | None

    def prompts(self, batch: Batch, features) -> object:
        """One prompt for each sample of the batch, made by the policy."""

    def judge(self, rollout: Rollout) -> Outcome:
        """The rewards of a rollout, NaN where not scored; writes nothing into it."""
