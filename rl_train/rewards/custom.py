"""Reward functions of the user, named on the command line: --reward module:function=weight.

    def num_words(completions, **kwargs):                          # the signature of TRL and R1-V
        return [min(len(text.split()) / 20, 1.0) for text in completions]

A function receives the columns of `add_user_rewards` that its parameters name, or all of them if it
takes **kwargs. One of them, `task`, is the name of the task that the completions answer (loop1,
loop2, ..), so that one function can reward both loops differently.

It returns one number per completion, or None where it has none to give: a list, a tuple, a tensor
or an array of one dimension. An exception in it ends the run with its traceback.
"""

import inspect
import math
import reprlib
from collections.abc import Callable, Sequence
from numbers import Real

import numpy as np
import torch

from rl_train.rollout import Rollout
from rl_train.utils.io import UserFault
from rl_train.utils.load_named import load_named


class BadReward(UserFault):
    """Error of a user's function that returned no rewards; the sentence names --reward."""


class UserReward:
    """A user's function as a reward component.

    Args:
        spec: "module:function"; the component is logged by the function's name.
        weight: of the component in the reward.
        function: by default the one that `spec` names.

    Raises:
        ValueError: as `load_named`.
    """

    def __init__(self, spec: str, weight: float = 1.0, function: Callable | None = None):
        self.spec, self.weight, self.name = spec, weight, spec.rpartition(":")[2]
        self.function = function or load_named("--reward", spec, "function", callable)

    @classmethod
    def parse(cls, text: str) -> "UserReward":
        """Return the reward of "module:function" or "module:function=weight" (default 1).

        Raises:
            ValueError: wrong form.
        """
        spec, equals, weight = text.partition("=")
        try:
            value = float(weight) if equals else 1.0
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"--reward {text}: the weight {weight!r} is not a number")
        return cls(spec, value)

    def __call__(self, completions: list[str], **columns: Sequence) -> torch.Tensor:
        """Return the function's values of N completions, as (N,) float32, NaN for None.

        Args:
            columns: lists of N entries that the function may use; see `add_user_rewards`.

        Raises:
            BadReward: not N values, or one that is neither a number that float32 holds nor None (or
                NaN).
        """
        # As TRL: a function names the columns that it wants, or takes all by **kwargs.
        parameters = inspect.signature(self.function).parameters
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
            columns = {name: column for name, column in columns.items() if name in parameters}
        # Lists of the function's own: what it does to them reaches nothing else.
        columns = {
            name: list(column) if isinstance(column, list) else column
            for name, column in columns.items()
        }
        values = self.function(completions=list(completions), **columns)
        if isinstance(values, (torch.Tensor, np.ndarray)):
            values = values.tolist()
        is_list = isinstance(values, (list, tuple)) and len(values) == len(completions)
        # A bool is a Real, a complex number or a string is none.
        if is_list and all(value is None or isinstance(value, Real) for value in values):
            floats = [math.nan if value is None else float(value) for value in values]
            rewards = torch.tensor(floats, dtype=torch.float32)  # (N,)
            if not rewards.isinf().any():
                return rewards
        raise BadReward(
            f"--reward {self.spec}: returned {reprlib.repr(values)} for {len(completions)} "
            "completions, not a list with a finite number or None for each"
        )


def overlong_penalty(longest: int, buffer: int) -> UserReward:
    """Return the component "overlong", the cost of long answers (--overlong_buffer).

    It is 0 up to longest - buffer tokens, and falls from there linearly to -1 (DAPO, eq. 13).

    Args:
        longest: --max_completion_length; buffer: tokens.
    """

    def penalty(completions: list[str], num_tokens: list[int]) -> list[float]:
        # 0 at longest - buffer tokens, -1 at longest and beyond
        return [min(max((longest - buffer - n) / buffer, -1.0), 0.0) for n in num_tokens]

    return UserReward("overlong", 1.0, penalty)


def add_user_rewards(
    rewards: dict[str, torch.Tensor],
    user_rewards: Sequence[UserReward],
    rollout: Rollout,
    prompts: list[str],
    masks: list[torch.Tensor],
    targets: list[torch.Tensor],
    **columns: Sequence,
) -> dict[str, torch.Tensor]:
    """Return a task's rewards of N rows together with the user's, {name: (N,)}.

    The user's functions receive the completions and lists of N prompts (the questions), captions
    (the true ones), image_ids, masks (the predicted ones), targets (the true ones), stopped (bool:
    the answer was not cut at --max_completion_length), num_tokens (int: of the answer, its end
    among them), and the further `columns`. Masks and targets are (H, W) bool. The tasks of the
    project pass task (one str: the task's name, with which its metrics begin) and mask_confidence
    (float: mean sigmoid inside the predicted mask, 0 if it is empty). Samples with a question also
    have question, answer (the true one) and columns of their own, which take no name from above.

    Raises:
        BadReward: as `UserReward`, or two components have one name.
    """
    if not user_rewards:
        return rewards
    batch = rollout.batch
    of_samples = dict(batch.columns)
    if batch.questions:
        of_samples |= dict(question=batch.questions, answer=batch.answers)
    of_rows = {name: rollout.repeat_for_rows(values) for name, values in of_samples.items()}
    of_rows.pop("completions", None)
    columns = (
        of_rows
        | dict(
            prompts=prompts,
            masks=masks,
            targets=targets,
            captions=rollout.repeat_for_rows(batch.captions),
            image_ids=rollout.repeat_for_rows(batch.image_ids),
            stopped=rollout.stopped.tolist(),
            num_tokens=rollout.valid.sum(1).tolist(),
        )
        | columns
    )
    for reward in user_rewards:
        if reward.name in rewards:
            raise BadReward(f"--reward: {reward.name} is already a component, rename the function")
        values = reward(rollout.texts, **columns)
        rewards = rewards | {reward.name: values}
    return rewards
