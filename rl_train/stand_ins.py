"""What takes the place of judge, optimizer and others in a step that is only tried (`memory`)."""

import contextlib
from collections.abc import Iterator

import torch

from rl_train.distributed import gradient_norms


def rising(completions, **_) -> list[float]:
    """A reward that differs between the rows of a group, so that there is an update."""
    return [row % 7 / 7 for row in range(len(completions))]


class SilentJudge:
    """Scores everything 0 without asking."""

    def score(self, references, captions) -> torch.Tensor:
        return torch.zeros(len(captions))


class KeepsWeights:
    """An optimizer that takes no step."""

    def __init__(self, trainable):
        self.trainable = trainable

    def step(self):
        pass

    def zero_grad(self, set_to_none: bool):
        for parameter in self.trainable.values():
            parameter.grad = None


class NotTried(Exception):
    """A task of the user's own failed where that says nothing of the run."""


class LongestExamples:
    """A task of supervised training whose answers have all tokens that they may.

    Args:
        most: tokens that an answer may have, unless the task says `longest_answer`.
        pad_id: the token that makes answers so long; it counts as one of theirs.
    """

    def __init__(self, task, most: int, pad_id: int):
        self.task, self.name, self.weight, self.pad_id = task, task.name, task.weight, pad_id
        self.most = getattr(task, "longest_answer", most)

    def examples(self, *question) -> tuple[object, list[list[int]]]:
        with self._asking():
            prompts, answers = self.task.examples(*question)
        return prompts, [ids + [self.pad_id] * (self.most - len(ids)) for ids in map(list, answers)]

    def terms(self, *question) -> tuple[list, dict]:
        with self._asking():
            return self.task.terms(*question)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        kind = type(self.task)
        try:
            yield
        except ValueError as error:  # how a task refuses samples; all else is a fault
            if kind.__module__.startswith("rl_train."):
                raise
            where = f"--tasks {kind.__module__}:{kind.__name__}"
            raise NotTried(f"{where} does not take made-up samples ({error})") from error


class NotAveraged:
    """`distributed.GradientAverage` of one rank, whose gradients are as many bytes.

    Args:
        given: receives what the module is called with.
    """

    def __init__(self, module, names, given: list):
        self.module, self.names, self.given = module, names, given

    def __call__(self, *args, last: bool):
        self.given.append(args)
        return self.module(*args, last)

    def averaging(self, last: bool):
        return contextlib.nullcontext()

    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        norms = gradient_norms(self.names.values())
        return norms, norms
