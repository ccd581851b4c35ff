"""Make batches of a data set, the same ones whatever the number of ranks or workers."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from rl_train.data.base import RegionDataset
from rl_train.data.companions import CompanionRegions
from rl_train.data.distractors import DistractorMasks
from rl_train.data.errors import BadData, DamagedSample
from rl_train.data.mixture import MixtureSampler
from rl_train.data.workers import BatchLoader, to_shared_memory
from rl_train.rollout import Batch, Preprocessor
from rl_train.run.signals import ignore_signals_in_worker

MAX_ATTEMPTS = 10  # samples that may replace a damaged one
FURTHER = 2**32  # part of a seed: other random numbers than those of permutations


class Batches(Dataset):
    """A region data set by batches: [list of indices] returns the Batch of these samples.

    A damaged sample is replaced by another one, drawn from (index, attempt) alone, so that a batch
    does not depend on the number of workers.

    Args:
        distractors: fill `Batch.distractors`.
        turns: questions about an image; if there are several, fill `Batch.companion_captions` and
            `Batch.companion_masks`.

    Raises:
        BadData: on access, MAX_ATTEMPTS replacements in a row were damaged too.
    """

    def __init__(
        self,
        dataset: RegionDataset | Subset,
        preprocessor: Preprocessor,
        distractors: bool = False,
        turns: int = 1,
    ):
        self.dataset, self.preprocessor = dataset, preprocessor
        self.others = DistractorMasks(dataset) if distractors else None
        self.companions = None
        if turns > 1:
            self.companions = CompanionRegions(dataset, turns - 1, preprocessor.check)

    def __getitem__(self, indices: list[int]) -> Batch:
        index, samples, damaged = zip(*map(self._undamaged, indices))
        batch = Batch(
            index=list(index),
            masks=pack([torch.from_numpy(sample["mask"]) for sample in samples]),
            captions=[sample["caption"] for sample in samples],
            image_ids=[sample["image_id"] for sample in samples],
            damaged=sum(damaged, []),
            inputs=self.preprocessor.collate([self.preprocessor.prepare(s) for s in samples]),
        )
        if any("solution" in sample for sample in samples):
            batch.solutions = [sample.get("solution") for sample in samples]
        if "objects" in samples[0]:  # in all samples of a data set or in none
            batch.objects = pack([torch.from_numpy(sample["objects"]) for sample in samples])
        if any("question" in sample for sample in samples):
            batch.questions = [sample.get("question") for sample in samples]
            batch.answers = [sample.get("answer") for sample in samples]
        columns = [sample.get("columns", {}) for sample in samples]
        for name in dict.fromkeys(name for row in columns for name in row):
            batch.columns[name] = [row.get(name) for row in columns]
        if self.others:
            distractors = [self.others(i, sample["mask"]) for i, sample in zip(index, samples)]
            batch.distractors = pack([torch.from_numpy(masks) for masks in distractors])
        if self.companions:
            companions = [self.companions(i, sample) for i, sample in zip(index, samples)]
            batch.companion_captions = [regions.captions for regions in companions]
            batch.companion_masks = pack([torch.from_numpy(r.masks) for r in companions])
        return to_shared_memory(batch) if get_worker_info() else batch

    def _undamaged(self, i: int) -> tuple[int, dict, list[str]]:
        """Return sample i or its first undamaged replacement: (index, sample, the damaged ones)."""
        index, damaged = i, []
        for attempt in range(1, MAX_ATTEMPTS + 2):
            try:
                sample = self.dataset[index]
                self.preprocessor.check(sample)
                return index, sample, damaged
            except DamagedSample as error:
                damaged.append(str(error))
            # From the index alone: every rank, worker and resumed run picks the same one.
            index = int(np.random.default_rng([i, attempt]).integers(len(self.dataset)))
        raise BadData(
            f"{'; '.join(damaged)}; and {MAX_ATTEMPTS} other samples in their place were damaged "
            "too"
        )


def pack(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same tensors, contiguous, in one storage.

    Each storage that a worker sends costs the trainer an open file as long as it is held, and a
    step holds all its batches.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    chunks = flat.split([tensor.numel() for tensor in tensors])
    return [chunk.view(tensor.shape) for chunk, tensor in zip(chunks, tensors)]


class StepSampler:
    """Index lists of one rank from step `start` to `stop`: `accumulation` of them a step.

    Every epoch is a fresh permutation of the dataset from (seed, epoch); its last incomplete step
    is dropped. The samples of a step do not depend on the number of ranks, only on how many prompts
    the step holds in all.

    Args:
        stop: number of steps of the run; None: without end.
        order: maps (epoch, random generator of (seed, epoch)) to the epoch's indices, in place of a
            permutation: as many, any of them several times or not at all.
        mixture: chooses a step's samples in place of permutations; its epoch has as many steps.

    Raises:
        ValueError: the dataset is smaller than one step.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        accumulation: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        order: Callable[[int, np.random.Generator], np.ndarray] | None = None,
        mixture: MixtureSampler | None = None,
        stop: int | None = None,
    ):
        self.length, self.batch_size, self.accumulation = length, batch_size, accumulation
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.start, self.stop = start, stop
        self.order, self.mixture = order, mixture
        self.cached = (None, None)  # the latest epoch and its indices
        self.prompts_per_step = batch_size * accumulation * world_size
        self.steps_per_epoch = length // self.prompts_per_step
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"--data_dir holds {length} samples, fewer than the {self.prompts_per_step} of one "
                f"step (--batch_size {batch_size} x --gradient_accumulation_steps {accumulation} x "
                f"{world_size} ranks)"
            )

    def __iter__(self):
        step = self.start
        while self.stop is None or step < self.stop:
            indices = self.step_indices(step)  # (A * R * B,)
            for batches in indices.reshape(self.accumulation, self.world_size, self.batch_size):
                yield batches[self.rank].tolist()
            step += 1

    def step_indices(self, step: int) -> np.ndarray:
        """Return (prompts_per_step,) indices of a step's samples, of all ranks."""
        if self.mixture:
            return self.mixture.step(step, self.prompts_per_step)
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.prompts_per_step
        return self.indices(epoch)[start : start + self.prompts_per_step]

    def further_indices(self, step: int, num_rounds: int) -> np.ndarray:
        """Return (num_rounds, prompts_per_step) indices that may stand in for a step's samples.

        They follow from (seed, step) and from a sample's position in the step, whatever the number
        of ranks. Those of a mixture come from the same data set. Each is another sample, none of
        the step itself, as far as the data set has enough; where it has none, the index is -1.
        """
        in_step = self.step_indices(step)  # (P,)
        if self.mixture:
            pools = dict(enumerate(self.mixture.members))
            sources = self.mixture.sources[in_step]
        else:
            epoch = self.indices(step // self.steps_per_epoch)
            pools, sources = {0: np.unique(epoch) if self.order else epoch}, 0 * in_step
        rng = np.random.default_rng([self.seed, step, FURTHER])
        further = np.full((num_rounds, len(in_step)), -1)
        for source, pool in pools.items():
            positions = np.flatnonzero(sources == source)
            enough = min((num_rounds + 1) * len(positions), len(pool))
            chosen = rng.choice(pool, enough, replace=False)
            others = chosen[~np.isin(chosen, in_step)]
            if len(others):
                further[:, positions] = np.resize(others, (num_rounds, len(positions)))
        return further

    def indices(self, epoch: int) -> np.ndarray:
        """Return (length,) indices of an epoch, in its order.

        Raises:
            ValueError: the user's order returned something else; names --sampler.
        """
        if self.cached[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            if self.order is None:
                order = generator.permutation(self.length)
            else:
                order = np.asarray(self.order(epoch, generator))
            is_index_each = order.shape == (self.length,) and order.dtype.kind in "iu"
            if not is_index_each or order.min() < 0 or order.max() >= self.length:
                raise ValueError(
                    f"--sampler: gave {order.dtype} {order.shape} for an epoch of {self.length} "
                    f"samples, not an index from 0 to {self.length - 1} for each"
                )
            self.cached = epoch, order
        return self.cached[1]


def batch_loader(
    dataset: RegionDataset | Subset,
    preprocessor: Preprocessor,
    sampler: Iterable[list[int]],
    num_workers: int,
    distractors: bool = False,
    turns: int = 1,
) -> DataLoader:
    """Return a loader of a batch for each index list of `sampler`."""
    return BatchLoader(
        Batches(dataset, preprocessor, distractors, turns),
        # The sampler yields index lists, so the loader must not batch again.
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        worker_init_fn=ignore_signals_in_worker,
    )


def eval_loader(
    dataset: RegionDataset | Subset,
    preprocessor: Preprocessor,
    batch_size: int,
    num_workers: int,
    rank: int = 0,
    world_size: int = 1,
    distractors: bool = False,
) -> DataLoader:
    """Return a loader of every `world_size`-th sample from `rank` on, in order, each once."""
    indices = list(range(rank, len(dataset), world_size))
    lists = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    return batch_loader(dataset, preprocessor, lists, num_workers, distractors)


def steps(loader: DataLoader, accumulation: int) -> Iterator[list[Batch]]:
    """Yield lists of `accumulation` consecutive batches, one list for each step."""
    batches = iter(loader)
    while len(step := list(islice(batches, accumulation))) == accumulation:
        yield step
