"""Phases of a step: which one runs, and the seconds and memory of each.

The training loop holds no clock: `PhaseRecorder.time_calls` wraps the calls that the loop makes.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from rl_train.loggers.metrics import PhaseTimer
from rl_train.policies.base import Policy
from rl_train.tasks.base import Task

P, T = ParamSpec("P"), TypeVar("T")


class PhaseRecorder:
    """Phase in progress, and the timer of the step in progress.

    Attributes:
        phase: "encode", "rollout", "reference", "teacher" or "update"; "evaluation" between
            steps. The timer also knows "data", the wait for the loader.
        timer: of the step in progress, None in an evaluation.
    """

    def __init__(self, device: torch.device):
        self.device, self.phase = device, "evaluation"
        self.timer: PhaseTimer | None = None
        self.inside_call = False  # of a timed function

    def begin_step(self):
        """Begin a step in the phase "encode", with a timer of its own."""
        self.phase, self.timer = "encode", PhaseTimer(self.device)

    def end_step(self) -> PhaseTimer:
        """Count the time until now as the phase in progress; return the step's timer."""
        timer = self.timer
        timer(self.phase)
        self.phase, self.timer = "evaluation", None
        return timer

    def enter(self, phase: str, waited_in: str | None = None):
        """Begin a phase. Time until now counts as `waited_in`; default: the phase in progress."""
        if self.timer:
            self.timer(waited_in or self.phase)
            self.phase = phase

    def time_calls(self, policy: Policy, tasks: Iterable[Task]):
        """Wrap the calls of the training loop, so that each begins its phase.

        A call leads to the phase `then` when it returns: behind a rollout the reference scores it,
        behind the last rewards comes the update.
        """
        policy.encode = self._phase("encode", policy.encode, then="rollout", waited_in="data")
        policy.sample = self._phase("rollout", policy.sample, then="reference")
        for task in tasks:
            if task.action:
                task.action.draw = self._phase("rollout", task.action.draw, then="reference")
            task.begin_rewards = self._in_two_parts(task.begin_rewards)

    def _in_two_parts(self, begin_rewards: Callable) -> Callable:
        """Return `begin_rewards` that is a phase, and returns a function that is one."""
        begin = self._phase("teacher", begin_rewards, then="rollout")
        return lambda rollout: self._phase("teacher", begin(rollout), then="update")

    def _phase(
        self, phase: str, function: Callable[P, T], then: str, waited_in: str | None = None
    ) -> Callable[P, T]:
        """Return `function` as a phase of its own, see `enter`."""

        @wraps(function)
        def in_phase(*args: P.args, **kwargs: P.kwargs) -> T:
            # An evaluation makes the same calls, and so may a task in its rewards.
            if self.timer is None or self.inside_call:
                return function(*args, **kwargs)
            self.enter(phase, waited_in)
            self.inside_call = True
            result = function(*args, **kwargs)
            self.inside_call = False
            self.enter(then)
            return result

        return in_phase
