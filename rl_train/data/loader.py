"""From dataset to batches: preprocessing in workers, the same batches whatever the number of ranks or workers."""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from rl_train.data.errors import BadData, DamagedSample
from sa2va_hf.processing_sa2va import IMAGENET_MEAN, IMAGENET_STD, to_rgb

MAX_ATTEMPTS = 10  # samples that may stand in for a damaged one
PREFETCH = 2  # batches that each worker is ahead


@dataclass
class Batch:
    """B samples, as tensors."""

    index: list[int]  # position of each sample in the dataset (of the stand-in, for a damaged one)
    pixel_values: list[torch.Tensor]  # (t, 3, S, S) float32 tiles of each
    sam_pixels: torch.Tensor  # (B, 3, 1024, 1024) uint8
    grids: torch.Tensor  # (B, g, g) bool region cells
    masks: list[torch.Tensor]  # (H, W) bool, at the image's own size
    captions: list[str]
    image_ids: list[str]
    damaged: list[
        str
    ]  # "image_id: reason" of each sample that did not decode or fit and was replaced

    def __len__(self):
        return len(self.index)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [tuple(mask.shape) for mask in self.masks]


@dataclass
class Sample:
    """One sample after the costly work; images are still pillow's, as three bands of bytes each, so that they are copied but once."""

    index: int
    tiles: list[tuple]  # t times 3 bands (S, S)
    sam_bands: tuple  # 3 bands (1024, 1024)
    grid: torch.Tensor  # (g, g) bool
    mask: np.ndarray  # (H, W) bool
    caption: str
    image_id: str
    damaged: list[str]

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the arrays of bytes that `fill` writes: tiles (t, 3, S, S), SAM image (3, 1024, 1024), bits of the mask."""
        return [
            (len(self.tiles), 3, *self.tiles[0][0].size[::-1]),
            (3, *self.sam_bands[0].size[::-1]),
            (-(-self.mask.size // 8),),
        ]

    def fill(self, tiles: np.ndarray, sam_pixels: np.ndarray, bits: np.ndarray):
        for planes, bands in zip([*tiles, sam_pixels], [*self.tiles, self.sam_bands]):
            for plane, band in zip(planes, bands):
                plane[...] = band
        bits[...] = np.packbits(self.mask)


class Fitting(Dataset):
    """A region dataset as it is, but that a sample whose caption does not fit the model's context is a damaged one.

    A caption fits if its segmentation prompt, about an image of the most tiles, leaves room for an answer: of all prompts only this
    one holds a whole caption. What fits does not depend on the sample's image.

    Args:
        policy: whose prompts, tiles and context count; max_new_tokens: of an answer.
    """

    def __init__(self, dataset, policy, max_new_tokens: int):
        self.dataset, self.prompts, self.max_tiles = (
            dataset,
            policy.prompts,
            policy.processor.max_tiles,
        )
        self.max_new_tokens, self.context = (
            max_new_tokens,
            policy.model.config.llm.max_position_embeddings,
        )

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict:
        sample = self.dataset[i]
        length = len(self.prompts.segment(sample["caption"], self.max_tiles + (self.max_tiles > 1)))
        if length + self.max_new_tokens > self.context:
            raise DamagedSample(
                sample["image_id"],
                f"caption of {len(sample['caption'])} characters: its prompt of {length} tokens "
                f"(--max_tiles {self.max_tiles}) and --max_completion_length {self.max_new_tokens} exceed the context of "
                f"{self.context}",
            )
        return sample


class Prepared(Dataset):
    """A region dataset with Sa2VA's preprocessing, run in DataLoader workers: [i] is a Sample, of which `collate` makes a Batch.

    In place of a damaged sample comes another one, drawn from (index, attempt) alone, so that a batch does not depend on
    the number of workers. Raises BadData after MAX_ATTEMPTS damaged ones in a row.
    """

    def __init__(self, dataset, processor):
        self.dataset, self.processor = dataset, processor

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        index, sample, damaged = self._undamaged(i)
        image, mask, side = (
            to_rgb(sample["image"]),
            torch.from_numpy(sample["mask"]).contiguous().numpy(),
            self.processor.sam_size,
        )
        return Sample(
            index,
            [tile.split() for tile in self.processor.tile_images(image)],
            image.resize((side, side)).split(),  # as Sa2VAProcessor.sam_image
            self.processor.region_grid(mask),
            mask,
            sample["caption"],
            sample["image_id"],
            damaged,
        )

    def _undamaged(self, i: int) -> tuple[int, dict, list[str]]:
        """(index, sample, damaged ones before it) of sample i or its first undamaged stand-in."""
        damaged = []
        for attempt in range(MAX_ATTEMPTS + 1):
            index = (
                i
                if attempt == 0
                else int(np.random.default_rng([i, attempt]).integers(len(self.dataset)))
            )
            try:
                return index, self.dataset[index], damaged
            except DamagedSample as error:
                damaged.append(str(error))
        raise BadData(
            f"{'; '.join(damaged)}; and {MAX_ATTEMPTS} other samples in their place were damaged too"
        )


def collate(samples: list[Sample]) -> Batch:
    """The Batch of several samples."""
    arrays = [[np.empty(shape, dtype=np.uint8) for shape in sample.shapes()] for sample in samples]
    for sample, mine in zip(samples, arrays):
        sample.fill(*mine)
    return to_batch([_Header(sample) for sample in samples], arrays)


class _Header:
    """A Sample without its pixels, and the shapes of the arrays that hold them."""

    def __init__(self, sample: Sample):
        self.index, self.grid, self.caption, self.image_id = (
            sample.index,
            sample.grid,
            sample.caption,
            sample.image_id,
        )
        self.damaged, self.size, self.shapes = sample.damaged, sample.mask.shape, sample.shapes()


def to_batch(headers: list[_Header], arrays: list[list[np.ndarray]]) -> Batch:
    """The Batch of samples whose bytes are in `arrays` (see `Sample.shapes`); it shares no memory with them."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    tiles, sam_pixels, bits = (list(map(torch.from_numpy, column)) for column in zip(*arrays))
    masks = [
        torch.from_numpy(
            np.unpackbits(packed.numpy(), count=prod(header.size)).view(bool).reshape(header.size)
        )
        for packed, header in zip(bits, headers)
    ]
    return Batch(
        [header.index for header in headers],
        [pixels.float().div_(255).sub_(mean).div_(std) for pixels in tiles],
        torch.stack(sam_pixels),
        torch.stack([header.grid for header in headers]),
        masks,
        [header.caption for header in headers],
        [header.image_id for header in headers],
        [named for header in headers for named in header.damaged],
    )


class SharedCollate:
    """A worker's half of `collate`: bytes go into shared memory that the worker fills again and again.

    Fresh shared memory costs more than the copy, since the system hands it out page by page. A worker is at most PREFETCH
    batches ahead of the one that the trainer is copying out, so that with PREFETCH + 2 buffers none is filled while it is read.
    """

    def __init__(self):
        self.buffers, self.turn = [torch.empty(0, dtype=torch.uint8)] * (PREFETCH + 2), 0

    def __call__(self, samples: list[Sample]) -> tuple[list[_Header], torch.Tensor]:
        headers = [_Header(sample) for sample in samples]
        size = sum(prod(shape) for header in headers for shape in header.shapes)
        self.turn = (self.turn + 1) % len(self.buffers)
        if len(self.buffers[self.turn]) < size:
            self.buffers[self.turn] = torch.empty(size, dtype=torch.uint8).share_memory_()
        for sample, mine in zip(samples, views(headers, self.buffers[self.turn])):
            sample.fill(*mine)
        return headers, self.buffers[self.turn]


def views(headers: list[_Header], buffer: torch.Tensor) -> list[list[np.ndarray]]:
    """Each sample's arrays, one behind the other in `buffer`."""
    flat, start, found = buffer.numpy(), 0, []
    for header in headers:
        found.append([])
        for shape in header.shapes:
            found[-1].append(flat[start : start + prod(shape)].reshape(shape))
            start += prod(shape)
    return found


class Loader:
    """Iterates over the Batches of a batch sampler, prepared by `num_workers` processes (0: in this one)."""

    def __init__(self, dataset, processor, batch_sampler, num_workers: int):
        how = (
            dict(collate_fn=SharedCollate(), persistent_workers=True, prefetch_factor=PREFETCH)
            if num_workers
            else dict(collate_fn=collate)
        )
        self.loader = DataLoader(
            Prepared(dataset, processor),
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            **how,
        )

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for item in self.loader:
            yield item if isinstance(item, Batch) else to_batch(item[0], views(*item))


class StepSampler:
    """Index lists of one rank from step `start` on, endlessly: `accumulation` lists of `batch_size` for each step.

    Every epoch is a fresh permutation of the dataset from (seed, epoch); its last incomplete step is dropped. The
    samples of a step do not depend on the number of ranks that share it, only on how many prompts it holds in all.

    Raises:
        ValueError: the dataset is smaller than one step.
    """

    def __init__(self, length, batch_size, accumulation, seed, rank=0, world_size=1, start=0):
        self.length, self.batch_size, self.accumulation, self.seed = (
            length,
            batch_size,
            accumulation,
            seed,
        )
        self.rank, self.world_size, self.start = rank, world_size, start
        self.prompts_per_step = batch_size * accumulation * world_size
        self.steps_per_epoch = length // self.prompts_per_step
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"--data_dir holds {length} samples, fewer than the {self.prompts_per_step} of one step "
                f"(--batch_size {batch_size} x --gradient_accumulation_steps {accumulation} x {world_size} ranks)"
            )

    def __iter__(self):
        step = self.start
        while True:
            epoch, within = divmod(step, self.steps_per_epoch)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.length)
            chunk = order[within * self.prompts_per_step : (within + 1) * self.prompts_per_step]
            for part in chunk.reshape(self.accumulation, self.world_size, self.batch_size):
                yield part[self.rank].tolist()
            step += 1


def train_loader(dataset, processor, sampler: StepSampler, num_workers: int) -> Loader:
    """Endless loader of Batches; `accumulation` of them make a step (see `steps`)."""
    return Loader(dataset, processor, sampler, num_workers)


def steps(loader: Loader, accumulation: int):
    """Lists of `accumulation` consecutive batches: what one optimizer step sees."""
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == accumulation:
            yield batches
            batches = []


def eval_loader(
    dataset, processor, batch_size: int, num_workers: int, rank=0, world_size=1
) -> Loader:
    """Every `world_size`-th sample from `rank` on, in order, each once."""
    mine = list(range(rank, len(dataset), world_size))
    return Loader(
        dataset,
        processor,
        [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)],
        num_workers,
    )
