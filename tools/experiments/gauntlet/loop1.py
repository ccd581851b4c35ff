"""Loop 1's cheap causes: chosen on training regions, measured on held-out ones.

Letters: n regions, G samples of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from rl_train.rewards.ablations import word_agreement
from tools.experiments.gauntlet.regions import Heard, Regions
from tools.experiments.gauntlet.samples import (
    ANY_OBJECT,
    PickBy,
    choose_directions,
    put_first,
    result_with_samples,
)
from tools.experiments.gauntlet.table import LoopResult, Measures, Rival
from tools.experiments.gauntlet.words import Rewording, rewordings, words_of

MEASURES = {"iou": "cycle IoU", "found": "object found"}


@dataclass(frozen=True)
class Chosen:
    """Choices made on training regions, by the reward: a name in MEASURES."""

    reward: str
    rewordings: list[Rewording]
    picks: list[PickBy]


def measures_of(heard: Sequence[Heard], reward: str = "iou") -> Measures:
    """Return {measure: values of n regions}, the reward first."""
    return {name: [getattr(each, name) for each in heard] for name in put_first(reward, MEASURES)}


def sample_scores(regions: Regions, num_generations: int) -> dict[str, torch.Tensor]:
    """Return {score: (n, G)} of G captions that the base samples: measures and cheap scores."""
    groups, logps = regions.sampled_captions(num_generations)
    texts = [text for group in groups for text in group]
    heard = regions.listen([(row, text) for row, group in enumerate(groups) for text in group])
    flat = {field.name: [getattr(each, field.name) for each in heard] for field in fields(Heard)}
    flat[ANY_OBJECT] = flat.pop("best_object_iou")
    flat["length"] = [float(len(words_of(text))) for text in texts]
    flat["likelihood without image"] = regions.likelihood_without_image(texts)
    majority = word_agreement(texts, num_generations)
    scores = {
        name: torch.tensor(values, dtype=torch.float64).view(-1, num_generations)
        for name, values in flat.items()
    }
    return scores | {
        "own likelihood": logps.double(),
        "majority": majority.double().view(-1, num_generations),
    }


def choose(training: Regions, num_generations: int, reward: str = "iou") -> Chosen:
    """Choose every cheap cause on training regions, by a reward in MEASURES."""
    captions = training.greedy_captions()
    chosen = rewordings(
        captions,
        training.references,
        training.masks,
        lambda queries: [getattr(each, reward) for each in training.listen(queries)],
    )
    scores = sample_scores(training, num_generations)
    cheap = [name for name in scores if name not in MEASURES]
    return Chosen(reward, chosen, choose_directions(scores, cheap, reward))


def measure(heldout: Regions, chosen: Chosen, num_generations: int) -> LoopResult:
    """Measure what was chosen on held-out regions; nothing is chosen here."""
    captions, rivals = heldout.greedy_captions(), []
    for rewording in chosen.rewordings:
        texts = [rewording.caption(text, mask) for text, mask in zip(captions, heldout.masks)]
        heard = heldout.listen(list(enumerate(texts)))
        measures = measures_of(heard, chosen.reward)
        rivals.append(Rival(rewording.name, rewording.chosen, "greedy", measures))
    scores = sample_scores(heldout, num_generations)
    return result_with_samples(
        greedy=measures_of(heldout.listen(list(enumerate(captions))), chosen.reward),
        rivals=rivals,
        scores=scores,
        true_reward=chosen.reward,
        picks=chosen.picks,
        measures=put_first(chosen.reward, MEASURES),
    )
