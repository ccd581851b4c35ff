"""From dataset to batches: the same ones whatever the number of ranks or workers."""

from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from rl_train.data.errors import BadData, DamagedSample
from rl_train.data.mix import Shares
from rl_train.data.neighbours import OtherRegions
from rl_train.data.workers import PREFETCHED, Loader, share, small_shm
from rl_train.stops import leave_to_the_trainer
from rl_train.types import Batch, Inputs

MAX_ATTEMPTS = 10  # samples that may stand in for a damaged one


class Batches(Dataset):
    """A region dataset by batches: [list of indices] is the Batch of these samples.

    In place of a damaged sample comes another one, drawn from (index, attempt) alone, so that a
    batch does not depend on the number of workers.

    Args:
        other_regions: whether a batch has `others`; regions_per_image: as a batch has it.

    Raises:
        BadData: on access, MAX_ATTEMPTS stand-ins in a row were damaged too.
    """

    def __init__(
        self, dataset, inputs: Inputs, other_regions: bool = False, regions_per_image: int = 1
    ):
        self.dataset, self.inputs, self.regions_per_image = dataset, inputs, regions_per_image
        self.others = OtherRegions(dataset) if other_regions else None

    def __getitem__(self, indices: list[int]) -> Batch:
        index, samples, damaged = zip(*map(self._undamaged, indices))
        batch = Batch(
            list(index),
            pack([torch.from_numpy(sample["mask"]) for sample in samples]),
            [sample["caption"] for sample in samples],
            [sample["image_id"] for sample in samples],
            sum(damaged, []),
            self.inputs.collate([self.inputs.prepare(sample) for sample in samples]),
            regions_per_image=self.regions_per_image,
        )
        if self.others:
            found = [self.others(i, sample["mask"]) for i, sample in zip(index, samples)]
            batch.others = pack([torch.from_numpy(masks) for masks in found])
        return share(batch) if get_worker_info() else batch

    def _undamaged(self, i: int) -> tuple[int, dict, list[str]]:
        """(index, sample, damaged ones before it) of sample i or its first undamaged stand-in."""
        damaged = []
        for attempt in range(MAX_ATTEMPTS + 1):
            index = i
            if attempt > 0:
                index = int(np.random.default_rng([i, attempt]).integers(len(self.dataset)))
            try:
                sample = self.dataset[index]
                self.inputs.check(sample)
                return index, sample, damaged
            except DamagedSample as error:
                damaged.append(str(error))
        raise BadData(
            f"{'; '.join(damaged)}; and {MAX_ATTEMPTS} other samples in their place were damaged "
            "too"
        )


def pack(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, contiguous, in one storage.

    What a worker sends costs the trainer an open file for each storage as long as it is held, and
    a step holds all its batches.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


class StepSampler:
    """Index lists of one rank from step `start` on, endlessly: `accumulation` of them a step.

    Every epoch is a fresh permutation of the dataset from (seed, epoch); its last incomplete step
    is dropped. The samples of a step do not depend on the number of ranks that share it, only on
    how many prompts it holds in all.

    Args:
        together: (regions of an image that follow each other, (length,) keys of the images); None:
            each sample for itself.
        order: (epoch, random generator of (seed, epoch)) -> the epoch's indices, in place of a
            permutation: as many, any of them several times or not at all.
        shares: of a mix, which then says what a step's samples are; its epoch has as many steps.

    Raises:
        ValueError: the dataset is smaller than one step.
    """

    def __init__(
        self,
        length,
        batch_size,
        accumulation,
        seed,
        rank=0,
        world_size=1,
        start=0,
        together=None,
        order: Callable | None = None,
        shares: Shares | None = None,
    ):
        self.order, self.known = order, (None, None)  # (epoch, its indices)
        self.length, self.batch_size, self.accumulation = length, batch_size, accumulation
        self.seed, self.rank, self.world_size, self.start = seed, rank, world_size, start
        self.together, self.shares = together, shares
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
        while True:
            chunk = self.step_indices(step)
            for part in chunk.reshape(self.accumulation, self.world_size, self.batch_size):
                yield part[self.rank].tolist()
            step += 1

    def step_indices(self, step: int) -> np.ndarray:
        """(prompts_per_step,) indices of a step's samples, of all ranks."""
        if self.shares:
            return self.shares.step(step, self.prompts_per_step)
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.prompts_per_step
        return self.indices(epoch)[start : start + self.prompts_per_step]

    def indices(self, epoch: int) -> np.ndarray:
        """(length,) what an epoch holds, in its order.

        Raises:
            ValueError: it is of the user's own, and not that; names --order.
        """
        if self.known[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            if self.order is None:
                order = generator.permutation(self.length)
            else:
                order = self.checked(np.asarray(self.order(epoch, generator)))
            if self.together:
                order = side_by_side(order, *self.together, generator)
            self.known = epoch, order
        return self.known[1]

    def checked(self, order: np.ndarray) -> np.ndarray:
        if order.shape != (self.length,) or order.dtype.kind not in "iu":
            raise ValueError(
                f"--order: gave {order.dtype} {order.shape} for an epoch of {self.length} samples, "
                "not an index each"
            )
        if not 0 <= order.min() <= order.max() < self.length:
            raise ValueError(f"--order: gave an index outside of 0 .. {self.length - 1}")
        return order


def side_by_side(order: np.ndarray, number: int, keys: np.ndarray, rng) -> np.ndarray:
    """The permutation `order` in runs of `number` with one key each; left ones fill runs, too."""
    runs, open_runs = [], {}
    for i in order.tolist():
        mine = open_runs.setdefault(keys[i], [])
        mine.append(i)
        if len(mine) == number:
            runs.append(open_runs.pop(keys[i]))
    left = sum(open_runs.values(), [])
    runs += [left[start : start + number] for start in range(0, len(left), number)]
    return np.array([i for run in rng.permutation(len(runs)) for i in runs[run]])


def train_loader(
    dataset, inputs: Inputs, sampler: StepSampler, num_workers: int, other_regions=False
) -> DataLoader:
    """Endless loader of Batches; `accumulation` of them make a step (see `steps`)."""
    per_image = sampler.together[0] if sampler.together else 1
    return _loader(Batches(dataset, inputs, other_regions, per_image), sampler, num_workers)


def eval_loader(
    dataset,
    inputs: Inputs,
    batch_size: int,
    num_workers: int,
    rank=0,
    world_size=1,
    other_regions=False,
) -> DataLoader:
    """Loader of every `world_size`-th sample from `rank` on, in order, each once."""
    mine = list(range(rank, len(dataset), world_size))
    parts = [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]
    return _loader(Batches(dataset, inputs, other_regions), parts, num_workers)


def _loader(batches: Batches, sampler, num_workers: int) -> DataLoader:
    how = dict(num_workers=num_workers, worker_init_fn=leave_to_the_trainer)
    return Loader(batches, batch_size=None, sampler=sampler, **how)


def shared_memory_warning(loader: DataLoader, num_held: int, heldout_batch: int) -> str | None:
    """A sentence if /dev/shm may be too small for what the workers of a training loader send.

    There are the `num_held` batches of a step, those that workers made ahead, and as much again
    for an evaluation in batches of `heldout_batch`.
    """
    workers, size = loader.num_workers, loader.sampler.batch_size
    if not workers:
        return None
    ahead = PREFETCHED * workers
    num_samples = (ahead + num_held) * size + (ahead + 1) * heldout_batch
    return small_shm(loader.dataset[[0]], num_samples, workers)


def steps(loader: DataLoader, accumulation: int):
    """Lists of `accumulation` consecutive batches: what one optimizer step sees."""
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == accumulation:
            yield batches
            batches = []
