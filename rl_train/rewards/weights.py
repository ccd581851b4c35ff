"""Weights of reward components as --reward_weights names them."""

import argparse
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ComponentWeight:
    """The weight of one component of one task's reward; 0 leaves it out."""

    task: str
    component: str
    weight: float

    @classmethod
    def parse(cls, text: str) -> "ComponentWeight":
        """Return the weight of "TASK.COMPONENT=WEIGHT". Raises ValueError for another form."""
        name, equals, number = text.partition("=")
        task, dot, component = name.partition(".")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not (equals and dot and task and component and math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"{text}: must be TASK.COMPONENT=WEIGHT, such as loop1.iou=1, WEIGHT at least 0"
            )
        return cls(task, component, weight)


def weight_text(text: str) -> str:
    """Return a word of --reward_weights. Raises ArgumentTypeError if it is none."""
    try:
        ComponentWeight.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def check_weights(weights: Sequence[ComponentWeight], components: dict[str, Collection[str]]):
    """Raise ValueError, listing the right names, if a weight is of no task or no component.

    Args:
        components: {task: the components that may have a weight}; those of a task without any are
            not known yet.
    """
    seen = set()
    for each in weights:
        name = f"{each.task}.{each.component}"
        flag = f"--reward_weights {name}={each.weight:g}"
        if each.task not in components:
            raise ValueError(f"{flag}: the tasks of this run are {', '.join(components)}")
        known = components[each.task]
        if known and each.component not in known:
            names = ", ".join(f"{each.task}.{component}" for component in known)
            raise ValueError(f"{flag}: the components of {each.task} are {names}")
        if name in seen:
            raise ValueError(f"{flag}: {name} is named twice")
        seen.add(name)


def of_task(weights: Sequence[ComponentWeight], task: str) -> dict[str, float]:
    """Return {component: weight} of one task."""
    return {each.component: each.weight for each in weights if each.task == task}
