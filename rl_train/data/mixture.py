"""Several data sets as one, and the sampler that chooses among them by weight.

Letters: K data sets of n_k samples, n in all; P prompts a step.
"""

from collections import Counter, defaultdict

import numpy as np
from torch.utils.data import Subset

from rl_train.data.base import RegionDataset
from rl_train.data.distractors import unwrap_subset
from rl_train.data.images import Encoded
from rl_train.utils.text import counted


class MixtureDataset:
    """K data sets concatenated into one `RegionDataset`.

    The name of its data set stands before each image_id.

    Args:
        datasets: by name; weights: how often each is sampled, see `MixtureSampler`.

    Attributes:
        sources: (n,) the number of each sample's data set; image_keys, coco_ids, content_keys,
            has_masks, has_objects, names_nothing: as in `RegionDataset`.

    Raises:
        ValueError: some data sets have masks and others none; names --data_mixture.
    """

    def __init__(self, datasets: dict[str, RegionDataset], weights: list[float]):
        self.datasets, self.weights = datasets, weights
        sizes = [len(dataset) for dataset in datasets.values()]
        self.ends, self.sources = np.cumsum(sizes), np.repeat(np.arange(len(sizes)), sizes)
        self.image_keys = np.concatenate([dataset.image_keys for dataset in datasets.values()])
        self.coco_ids = np.concatenate([dataset.coco_ids for dataset in datasets.values()])
        self.content_keys = np.concatenate([dataset.content_keys for dataset in datasets.values()])
        without_masks = [name for name, dataset in datasets.items() if not dataset.has_masks]
        self.has_masks = not without_masks
        self.has_objects = any(dataset.has_objects for dataset in datasets.values())
        self.names_nothing = any(dataset.names_nothing for dataset in datasets.values())
        if 0 < len(without_masks) < len(datasets):
            raise ValueError(
                f"--data_mixture: {', '.join(without_masks)} has boxes and points without masks, "
                "the others have masks, and one run cannot reward both"
            )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def report(self) -> dict:
        """Return the sums of the data sets' counts, and in "of_each" those of each by its name."""
        of_each = {name: dataset.report() for name, dataset in self.datasets.items()}
        reports = list(of_each.values())
        first_skipped = defaultdict(list)
        for name, report in of_each.items():
            for reason, places in report.get("first_skipped", {}).items():
                first_skipped[reason] += [f"{name}: {place}" for place in places]
        return dict(
            kept=sum(report["kept"] for report in reports),
            rows=sum(report["rows"] for report in reports),
            skipped=dict(sum((Counter(report["skipped"]) for report in reports), Counter())),
            resized_masks=sum(report["resized_masks"] for report in reports),
            first_skipped=dict(first_skipped),
            of_each=of_each,
        )

    def image_id(self, i: int) -> str:
        name, dataset, local = self._locate(i)
        return f"{name}:{dataset.image_id(local)}"

    def __getitem__(self, i: int) -> dict:
        _, dataset, local = self._locate(i)
        sample = dataset[local] | dict(image_id=self.image_id(i))
        if self.has_objects:  # the other data sets' captions name the one region of their mask
            sample.setdefault("objects", sample["mask"][None])
        return sample

    def caption(self, i: int) -> str:
        _, dataset, local = self._locate(i)
        return dataset.caption(local)

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        _, dataset, local = self._locate(i)
        return dataset.mask(local, size)

    def encoded_image(self, i: int) -> Encoded:
        _, dataset, local = self._locate(i)
        return dataset.encoded_image(local)

    def _locate(self, i: int) -> tuple[str, RegionDataset, int]:
        """Return (name, data set, index in it) of sample i."""
        source = self.sources[i]
        name, dataset = list(self.datasets.items())[source]
        return name, dataset, int(i - (self.ends[source] - len(dataset)))


class MixtureSampler:
    """Chooses the samples of each step: every data set by its weight, each in its own order.

    Among the first prompts of a run, however many, each data set has its fraction to within a few.
    Every pass over a data set is a fresh permutation from (seed, pass, data set), so a step's
    samples depend on its number alone.

    Args:
        dataset: a `MixtureDataset`, or a Subset of one.

    Raises:
        ValueError: a data set has no sample left; names it.
    """

    def __init__(self, dataset: MixtureDataset | Subset, seed: int):
        dataset, indices = unwrap_subset(dataset)
        self.names, self.seed = list(dataset.datasets), seed
        self.sources = dataset.sources[indices]  # (n,)
        self.members = [np.flatnonzero(self.sources == k) for k in range(len(self.names))]
        self.weights = np.array(dataset.weights) / sum(dataset.weights)  # (K,)
        for name, members in zip(self.names, self.members):
            if not len(members):
                raise ValueError(f"--data_mixture: no region of {name} is left to train on")

    def step(self, step: int, size: int) -> np.ndarray:
        """Return (P,) indices of a step's prompts, P = size; all steps must have as many."""
        sources, num_before = mixture_schedule(self.weights, step * size, size)
        indices = np.zeros(size, int)
        for k, members in enumerate(self.members):
            slots = np.flatnonzero(sources == k)  # positions in the step
            # Prompts before this step tell the pass, and the position in its permutation.
            passes, within = divmod(num_before[k] + np.arange(len(slots)), len(members))
            for number in np.unique(passes):
                order = np.random.default_rng([self.seed, number, k]).permutation(len(members))
                in_pass = passes == number
                indices[slots[in_pass]] = members[order[within[in_pass]]]
        # Mixed over the step, so that no rank gets one data set alone.
        return np.random.default_rng([self.seed, step, len(self.members)]).permutation(indices)

    def count(self, indices: list[int]) -> dict[str, int]:
        """Return {data set: how many of the samples come from it}."""
        counts = np.bincount(self.sources[indices], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist()))

    def describe(self, size: int, num_steps: int) -> str:
        """Return a line per data set: what a run of steps of `size` prompts takes from it."""
        lines = []
        for name, members, weight in zip(self.names, self.members, self.weights):
            passes = weight * size * num_steps / len(members)
            lines.append(
                f"{name}: {counted(len(members), 'region')}, {weight:.1%} of all prompts: "
                f"{weight * size:.1f} of a step's {size}, {passes:.2f} passes in {num_steps} steps"
            )
        return "\n".join(lines)


def mixture_schedule(weights: np.ndarray, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the data set of each prompt from number `start` on, and how many of each came before.

    The next prompt always comes from the data set with the least (prompts so far + 1/2) / weight,
    the first of several (Webster's rule for seats). The schedule is computed from a time shortly
    before `start`, not from a run's first prompt.

    Args:
        weights: (K,), sum to 1.

    Returns:
        (count,) numbers of data sets and (K,) counts.
    """
    # Prompt j of a data set is due at time (j + 1/2) / weight, and by time start - K no more than
    # `start` prompts are. One fewer of each, so that rounding cannot count one that is due later.
    num_early = np.floor((start - len(weights)) * weights - 0.5).clip(min=0).astype(int)  # (K,)
    missing = start - num_early.sum()
    due = [(k + np.arange(missing + count) + 0.5) / w for k, w in zip(num_early, weights)]
    sources = np.repeat(np.arange(len(weights)), missing + count)
    upcoming = sources[np.lexsort((sources, np.concatenate(due)))[: missing + count]]
    num_before = num_early + np.bincount(upcoming[:missing], minlength=len(weights))
    return upcoming[missing:], num_before
