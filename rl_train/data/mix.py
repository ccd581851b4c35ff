"""Several data sets as one, and which of them a prompt is of.

Letters: K data sets of n_k samples, n in all; P prompts a step.
"""

from collections import Counter

import numpy as np
from torch.utils.data import Subset


class Mix:
    """K data sets behind each other; an item's image_id has its data set's name before it.

    Args:
        datasets: by name; weights: how often each is drawn from, see `Shares`.
    """

    def __init__(self, datasets: dict[str, object], weights: list[float]):
        self.datasets, self.weights = datasets, weights
        self.ends = np.cumsum([len(dataset) for dataset in datasets.values()])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def sources(self) -> np.ndarray:
        """(n,) the number of each sample's data set."""
        return np.repeat(np.arange(len(self.datasets)), np.diff(self.ends, prepend=0))

    @property
    def image_keys(self) -> np.ndarray:
        """(n,) int64 key of each sample's image, the same wherever there is a copy of it."""
        return np.concatenate([dataset.image_keys for dataset in self.datasets.values()])

    @property
    def coco_ids(self) -> np.ndarray:
        """(n,) int64 `coco_id` of each sample's image."""
        return np.concatenate([dataset.coco_ids for dataset in self.datasets.values()])

    def report(self) -> dict:
        """The sums of the data sets' counts, and those of each by its name."""
        of_each = {name: dataset.report() for name, dataset in self.datasets.items()}
        whole = {name: sum(one[name] for one in of_each.values()) for name in ("kept", "rows")}
        skipped = sum((Counter(one["skipped"]) for one in of_each.values()), Counter())
        resized = sum(one["resized_masks"] for one in of_each.values())
        return whole | dict(skipped=dict(skipped), resized_masks=resized, of_each=of_each)

    def image_id(self, i: int) -> str:
        """Of sample i, without reading it."""
        name, dataset, k = self._place(i)
        return f"{name}:{dataset.image_id(k)}"

    def __getitem__(self, i: int) -> dict:
        name, dataset, k = self._place(i)
        sample = dataset[k]
        return sample | dict(image_id=f"{name}:{sample['image_id']}")

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """See `read_mask`, of sample i."""
        _, dataset, k = self._place(i)
        return dataset.mask(k, size)

    def _place(self, i: int):
        """(name, data set, index in it) of sample i."""
        number = int(np.searchsorted(self.ends, i, side="right"))
        name, dataset = list(self.datasets.items())[number]
        return name, dataset, int(i - (self.ends[number] - len(dataset)))


class Shares:
    """Which samples a step's prompts are: each data set by its weight, in an order of its own.

    Of the first prompts of a run, however many, each data set has its share to within a few; every
    pass over a data set is a fresh permutation of it from (seed, pass, data set). So step s does
    not depend on how the steps before it came about.

    Args:
        dataset: a `Mix`, or a Subset of one.

    Raises:
        ValueError: of a data set no sample is left; names it.
    """

    def __init__(self, dataset, seed: int):
        indices = np.arange(len(dataset))
        while isinstance(dataset, Subset):
            indices, dataset = np.asarray(dataset.indices)[indices], dataset.dataset
        self.names, self.seed = list(dataset.datasets), seed
        self.sources = dataset.sources[indices]  # (n,)
        self.members = [np.flatnonzero(self.sources == k) for k in range(len(self.names))]
        self.weights = np.array(dataset.weights) / sum(dataset.weights)  # (K,)
        for name, members in zip(self.names, self.members):
            if not len(members):
                raise ValueError(f"--mix: no region of {name} is left to train on")

    def step(self, step: int, size: int) -> np.ndarray:
        """(P,) indices of a step's prompts, P = size; all steps have as many."""
        mine, before = turns(self.weights, step * size, size)
        drawn = np.zeros(size, int)
        for k, members in enumerate(self.members):
            places = np.flatnonzero(mine == k)
            number = before[k] + np.arange(len(places))  # of all drawn from data set k
            for turn in np.unique(number // len(members)):
                order = np.random.default_rng([self.seed, turn, k]).permutation(len(members))
                now = number // len(members) == turn
                drawn[places[now]] = members[order[number[now] % len(members)]]
        return np.random.default_rng([self.seed, step, len(self.members)]).permutation(drawn)

    def count(self, indices: list[int]) -> dict[str, int]:
        """{data set: how many of the samples are of it}"""
        found = np.bincount(self.sources[indices], minlength=len(self.names))
        return dict(zip(self.names, found.tolist()))

    def describe(self, size: int, num_steps: int) -> str:
        """What a run of steps of `size` prompts draws from each, as lines."""
        lines = []
        for name, members, weight in zip(self.names, self.members, self.weights):
            passes = weight * size * num_steps / len(members)
            lines.append(
                f"{name}: {len(members)} regions, {weight:.1%} of all prompts: {weight * size:.1f} "
                f"of a step's {size}, {passes:.2f} passes in {num_steps} steps"
            )
        return "\n".join(lines)


def turns(weights: np.ndarray, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """((count,) which of K data sets each prompt from number `start` on is of, (K,) how many before
    it are of each), by weights (K,) that sum to 1.

    The next is always the one with the least (drawn + 1/2) / weight (Webster's rule for seats), the
    first of several. So nothing need be counted from a run's first prompt on.
    """
    early = start - len(weights)  # no more than `start` prompts are due by then
    done = np.array([_due_by(early, weight) for weight in weights])
    missing = start - done.sum()
    due = [(k + np.arange(missing + count) + 0.5) / w for k, w in zip(done, weights)]
    sets = np.repeat(np.arange(len(weights)), missing + count)
    next_ones = sets[np.lexsort((sets, np.concatenate(due)))[: missing + count]]
    return next_ones[missing:], done + np.bincount(next_ones[:missing], minlength=len(weights))


def _due_by(time: float, weight: float) -> int:
    """How many k = 0, 1, .. have (k + 1/2) / weight <= time, as floats have it."""
    number = max(int(time * weight + 0.5), 0)
    while number and (number - 0.5) / weight > time:
        number -= 1
    while (number + 0.5) / weight <= time:
        number += 1
    return number
