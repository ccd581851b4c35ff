"""Best of G samples by cheap scores, each with the direction that is best on training regions.

Letters: n regions, G samples of each.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from rl_train.evaluation.best_of_n import pick_best
from tools.experiments.gauntlet.table import LoopResult, Measures, Rival

Scores = dict[str, torch.Tensor]  # {score: (n, G)} of sampled answers
DIRECTIONS = ("largest", "smallest", "nearest to the mean")
# An oracle that knows where all objects are, not which one is meant: the largest is picked.
ANY_OBJECT = "IoU with any object"


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


def join_batches(parts: Sequence[dict[str, torch.Tensor]], num_generations: int) -> Scores:
    """Return {score: (n, G)} of the scores (N,) of consecutive batches, N = B*G."""
    return {
        name: torch.cat([part[name].cpu() for part in parts]).double().view(-1, num_generations)
        for name in parts[0]
    }


def choose_direction(name: str, scores: torch.Tensor, rewards: torch.Tensor) -> PickBy:
    """Return the direction whose picks have the highest reward on training regions.

    Args:
        scores, rewards: (n, G) of training regions.
    """
    mean = scores.mean().item()

    def reward(direction: str) -> float:
        return sum(pick_best(rewards, preference(scores, direction, mean)))

    return PickBy(name, max(DIRECTIONS, key=reward), mean)


def choose_directions(scores: Scores, names: Collection[str], reward: str) -> list[PickBy]:
    """Return the best direction of each of these scores on training regions; ANY_OBJECT's is fixed.

    Args: scores: {score: (n, G)} of training regions, with `reward` and `names` among them.
    """
    chosen = [
        choose_direction(name, scores[name], scores[reward]) for name in names if name != ANY_OBJECT
    ]
    return [*chosen, PickBy(ANY_OBJECT, "largest", mean=0.0)]


def put_first(measure: str, measures: Collection[str]) -> list[str]:
    """Return the names of measures with one put first: fractions are of the first."""
    return [measure, *(name for name in measures if name != measure)]


def measures_of_picked(
    scores: dict[str, torch.Tensor], by: torch.Tensor, measures: Collection[str]
) -> Measures:
    """Return {measure: its n values at the samples that `by` (n, G) is largest of}."""
    return {name: pick_best(scores[name], by) for name in measures}


def result_with_samples(
    *,
    greedy: Measures,
    rivals: Sequence[Rival],
    scores: dict[str, torch.Tensor],
    true_reward: str,
    picks: Sequence[PickBy],
    measures: Collection[str],
) -> LoopResult:
    """Return the result of greedy answers and of G samples: best of G by each pick is a rival.

    Args:
        greedy: of the base's own answers; `rivals` are those beside best of G.
        scores: {score: (n, G)} of the samples, with `true_reward` and `measures` among them.
    """
    best_of_g = [
        Rival(
            f"best of G by {pick.name}",
            pick.direction,
            "samples",
            measures_of_picked(scores, pick.preference(scores[pick.name]), measures),
        )
        for pick in picks
    ]
    return LoopResult(
        greedy=greedy,
        samples={name: scores[name].mean(1).tolist() for name in measures},
        best=measures_of_picked(scores, scores[true_reward], measures),
        rivals=[*rivals, *best_of_g],
    )
