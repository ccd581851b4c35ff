"""Best of G samples by cheap scores, each with the direction that is best on training regions.

Letters: n regions, G samples of each.
"""

from dataclasses import dataclass

import torch

from rl_train.evaluation.best_of_n import pick_best

DIRECTIONS = ("largest", "smallest", "nearest to the mean")


@dataclass(frozen=True)
class PickBy:
    """A cheap score as it was chosen: its name and which of its values a sample is picked by."""

    name: str
    direction: str
    mean: float  # of the score on training regions

    def preference(self, scores: torch.Tensor) -> torch.Tensor:
        """Return (n, G): the sample with the largest value of a row is picked."""
        return preference(scores, self.direction, self.mean)


def preference(scores: torch.Tensor, direction: str, mean: float) -> torch.Tensor:
    """Return scores (n, G) turned so that the largest is picked."""
    if direction == "largest":
        return scores
    return -scores if direction == "smallest" else -(scores - mean).abs()


def choose_direction(name: str, scores: torch.Tensor, rewards: torch.Tensor) -> PickBy:
    """Return the direction whose picks have the highest reward on training regions.

    Args:
        scores, rewards: (n, G) of training regions.
    """
    mean = scores.mean().item()

    def reward(direction: str) -> float:
        return sum(pick_best(rewards, preference(scores, direction, mean)))

    return PickBy(name, max(DIRECTIONS, key=reward), mean)
