"""From dataset to batches: preprocessing in workers, the same batches whatever the number of ranks or workers."""
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


@dataclass
class Batch:
    """B samples, as tensors."""
    index: list[int]                    # position of each sample in the dataset
    pixel_values: list[torch.Tensor]    # (t, 3, S, S) float32 tiles of each
    sam_pixels: torch.Tensor            # (B, 3, 1024, 1024) uint8
    grids: torch.Tensor                 # (B, g, g) bool region cells
    masks: list[torch.Tensor]           # (H, W) bool, at the image's own size
    captions: list[str]
    image_ids: list[str]

    def __len__(self):
        return len(self.index)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [tuple(mask.shape) for mask in self.masks]


class Prepared(Dataset):
    """A region dataset with Sa2VA's preprocessing, run in DataLoader workers."""

    def __init__(self, dataset, processor):
        self.dataset, self.processor = dataset, processor

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i: int) -> Batch:
        sample = self.dataset[i]
        mask = torch.from_numpy(np.ascontiguousarray(sample["mask"]))
        return Batch([i], [self.processor.tiles(sample["image"])], self.processor.sam_image(sample["image"])[None],
                     self.processor.region_grid(mask)[None], [mask], [sample["caption"]], [sample["image_id"]])


def collate(samples: list[Batch]) -> Batch:
    join = lambda name: [value for sample in samples for value in getattr(sample, name)]  # noqa: E731
    return Batch(join("index"), join("pixel_values"), torch.cat([s.sam_pixels for s in samples]),
                 torch.cat([s.grids for s in samples]), join("masks"), join("captions"), join("image_ids"))


class StepSampler:
    """Index lists of one rank from step `start` on, endlessly: `accumulation` lists of `batch_size` for each step.

    Every epoch is a fresh permutation of the dataset from (seed, epoch); its last incomplete step is dropped. The
    samples of a step do not depend on the number of ranks that share it, only on how many prompts it holds in all.

    Raises:
        ValueError: the dataset is smaller than one step.
    """

    def __init__(self, length, batch_size, accumulation, seed, rank=0, world_size=1, start=0):
        self.length, self.batch_size, self.accumulation, self.seed = length, batch_size, accumulation, seed
        self.rank, self.world_size, self.start = rank, world_size, start
        self.prompts_per_step = batch_size * accumulation * world_size
        self.steps_per_epoch = length // self.prompts_per_step
        if self.steps_per_epoch == 0:
            raise ValueError(f"--data_dir holds {length} samples, fewer than the {self.prompts_per_step} of one step "
                             f"(--batch_size {batch_size} x --gradient_accumulation_steps {accumulation} x {world_size} ranks)")

    def __iter__(self):
        step = self.start
        while True:
            epoch, within = divmod(step, self.steps_per_epoch)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.length)
            chunk = order[within * self.prompts_per_step:(within + 1) * self.prompts_per_step]
            for part in chunk.reshape(self.accumulation, self.world_size, self.batch_size):
                yield part[self.rank].tolist()
            step += 1


def train_loader(dataset, processor, sampler: StepSampler, num_workers: int) -> DataLoader:
    """Endless loader of Batches; `accumulation` of them make a step (see `steps`)."""
    return DataLoader(Prepared(dataset, processor), batch_sampler=sampler, num_workers=num_workers, collate_fn=collate,
                      persistent_workers=num_workers > 0)


def steps(loader: DataLoader, accumulation: int):
    """Lists of `accumulation` consecutive batches: what one optimizer step sees."""
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == accumulation:
            yield batches
            batches = []


def eval_loader(dataset, processor, batch_size: int, num_workers: int, rank=0, world_size=1) -> DataLoader:
    """Every `world_size`-th sample from `rank` on, in order, each once."""
    mine = list(range(rank, len(dataset), world_size))
    batches = [mine[i:i + batch_size] for i in range(0, len(mine), batch_size)]
    return DataLoader(Prepared(dataset, processor), batch_sampler=batches, num_workers=num_workers, collate_fn=collate)
