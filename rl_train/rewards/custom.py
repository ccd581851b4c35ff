"""Reward functions of the user's own, named on the command line: --reward module:function=weight.

    def num_words(completions, **kwargs):                          # the signature of TRL and R1-V
        return [min(len(text.split()) / 20, 1.0) for text in completions]

It is given what its parameters name, of what a task has to give (`user_components`); all of it if
it takes **kwargs. It returns one number per completion, or None where it has none to give: a list,
a tuple, a tensor or an array of one dimension. An exception in it ends the run with its traceback.
"""

import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Real

import numpy as np
import torch

LARGEST = 1e15  # of a reward, with its weight or without; float32 still holds sums of its squares


class BadReward(ValueError):
    """A function of the user's own returned what are no rewards; the sentence names --reward."""


def load_named(flag: str, spec: str, kind: str, is_kind: Callable) -> object:
    """Return the object of the user's own that "module:name" names.

    What the module raises while it is imported passes through.

    Args:
        kind: what it must be, for the sentence; is_kind: whether an object is that.

    Raises:
        ValueError: another form, no such module or object; names the flag and the spec.
    """
    module_name, _, name = spec.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"{flag} {spec}: must be module:{kind}, such as my_module:my_{kind}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{flag} {spec}: there is no module {error.name}") from error
        raise
    if not is_kind(vars(module).get(name)):
        raise ValueError(f"{flag} {spec}: the module {module_name} has no {kind} {name}")
    return vars(module)[name]


def load_reward(spec: str) -> Callable:
    """Return the function that "module:function" names. Raises ValueError as `load_named`."""
    return load_named("--reward", spec, "function", callable)


class UserReward:
    """One function of the user's own as a reward component.

    Args:
        spec: "module:function"; weight: of the component, which is logged by the function's name.

    Raises:
        ValueError: as `load_reward`.
    """

    def __init__(self, spec: str, weight: float = 1.0):
        self.spec, self.weight = spec, weight
        self.function = load_reward(spec)
        self.name = spec.partition(":")[2]
        self.asks = parameters_of(self.function)

    @classmethod
    def parse(cls, text: str) -> "UserReward":
        """Return the reward of "module:function" or "module:function=weight" (default 1).

        Raises:
            ValueError: another form.
        """
        spec, equals, weight = text.partition("=")
        try:
            value = float(weight) if equals else 1.0
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"--reward {text}: the weight {weight!r} is not a number")
        return cls(spec, value)

    def __call__(self, completions: list[str], **kwargs) -> torch.Tensor:
        """Return the function's values of N completions, as (N,) float32, NaN for None.

        What the function raises passes through.

        Args:
            kwargs: lists of N entries that the function may use; see `user_components`.

        Raises:
            BadReward: not N values, or one that is neither a number within +-LARGEST nor None (or
                NaN).
        """
        if self.asks is not None:
            kwargs = {name: value for name, value in kwargs.items() if name in self.asks}
        values = self.function(completions=completions, **kwargs)
        if isinstance(values, (torch.Tensor, np.ndarray)):
            values = values.tolist()
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            count = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
            raise BadReward(
                f"--reward {self.spec}: returned {count} for {len(completions)} completions, "
                "not one number each"
            )
        largest = LARGEST / max(abs(self.weight), 1)
        for value in values:
            if value is not None and not _is_number(value, largest):
                shown = repr(value)
                raise BadReward(
                    f"--reward {self.spec}: returned {shown[:60]}{'..' * (len(shown) > 60)}, "
                    f"which is neither None nor a finite number up to {largest:g}"
                )
        return torch.tensor(
            [math.nan if value is None else float(value) for value in values], dtype=torch.float32
        )  # (N,)


def _is_number(value, largest: float) -> bool:
    """Whether `value` is a real number within +-largest, or NaN."""
    if not isinstance(value, Real):  # a bool is one, a complex number or a string is none
        return False
    if isinstance(value, np.generic):
        value = value.item()  # float16 cannot be compared with larger numbers
    return value != value or -largest <= value <= largest


def parameters_of(function: Callable) -> set[str] | None:
    """Return the names of what `function` takes; None if it takes anything."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some that are written in C
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def load_user_rewards(texts: list[str], taken: Sequence[str] = ()) -> list[UserReward]:
    """Return the rewards of "module:function=weight" texts.

    Args:
        taken: names of the project's own that stand beside them.

    Raises:
        ValueError: as `UserReward.parse`, or if two have one name.
    """
    rewards = [UserReward.parse(text) for text in texts]
    for name, count in Counter([*taken, *(reward.name for reward in rewards)]).items():
        if count > 1:
            raise ValueError(f"--reward {' '.join(texts)}: {count} rewards are called {name}")
    return rewards


def user_components(
    rewards: Sequence[UserReward], rollout, prompts, masks, targets, **more
) -> dict[str, torch.Tensor]:
    """Return {name: (N,)} of the user's rewards of a rollout of N rows.

    They are called with the completions and lists of N prompts (the questions), captions (the true
    ones), image_ids, masks (judged), targets (the regions), stopped (bool: the answer ended by
    itself, was not cut at --max_completion_length), num_tokens (int: of the answer, its end among
    them), and what else `more` names; masks and targets are (H, W) bool. The tasks of the project
    give mask_confidence (float: the mean of the sigmoid inside the judged mask, 0 of an empty one).

    Args:
        rollout: of `rl_train.types`.
    """
    kwargs = dict(prompts=prompts, masks=masks, targets=targets, **more)
    kwargs["captions"] = rollout.of_rows(rollout.batch.captions)
    kwargs["image_ids"] = rollout.of_rows(rollout.batch.image_ids)
    kwargs["stopped"] = rollout.stopped.tolist()
    kwargs["num_tokens"] = rollout.valid.sum(1).tolist()
    return {reward.name: reward(rollout.texts, **kwargs) for reward in rewards}


def with_components(ours: dict[str, torch.Tensor], users: dict[str, torch.Tensor]) -> dict:
    """Return both together. Raises BadReward if one of the user's has a name of ours."""
    if taken := sorted(ours.keys() & users):
        raise BadReward(f"--reward: {taken[0]} is a component of the task, rename the function")
    return ours | users
