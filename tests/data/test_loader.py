"""Batches: the same whatever the number of workers, each epoch a permutation, too little data an error."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_train.data import BadData, DamagedSample, GraspAnyRegionDataset
from rl_train.data.loader import Fitting, StepSampler, eval_loader, steps, train_loader
from sa2va_hf import Sa2VAConfig, Sa2VAProcessor
from tools.make_demo import SHIPPED_CHECKPOINT, TRAIN, write_split


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_split(folder, seed=0, split=TRAIN, num_scenes=3)
    return GraspAnyRegionDataset(folder)


@pytest.fixture(scope="module")
def processor():
    return Sa2VAProcessor(Sa2VAConfig.from_pretrained(SHIPPED_CHECKPOINT), 1)


def first(sampler, count):
    return list(itertools.islice(sampler, count))


def assert_same(a, b):
    assert (a.index, a.captions, a.image_ids, a.sizes) == (
        b.index,
        b.captions,
        b.image_ids,
        b.sizes,
    )
    assert torch.equal(a.sam_pixels, b.sam_pixels) and torch.equal(a.grids, b.grids)
    assert all(map(torch.equal, a.pixel_values, b.pixel_values)) and all(
        map(torch.equal, a.masks, b.masks)
    )


def test_workers_do_not_change_the_batches(dataset, processor):
    def batches(num_workers):
        return first(
            iter(
                train_loader(
                    dataset, processor, StepSampler(len(dataset), 2, 1, seed=3), num_workers
                )
            ),
            6,
        )

    alone, shared = batches(0), batches(2)
    assert [b.index for b in alone] == first(StepSampler(len(dataset), 2, 1, seed=3), 6)
    for a, b in zip(alone, shared, strict=True):
        assert_same(a, b)


def test_a_batch_holds_its_samples(dataset, processor):
    batch = next(iter(train_loader(dataset, processor, StepSampler(len(dataset), 3, 1, seed=0), 0)))
    assert len(batch) == 3
    for k, i in enumerate(batch.index):
        sample = dataset[i]
        assert (batch.captions[k], batch.image_ids[k]) == (sample["caption"], sample["image_id"])
        assert (
            batch.masks[k].dtype == torch.bool
            and batch.masks[k].numpy().tolist() == sample["mask"].tolist()
        )
        assert batch.sizes[k] == (sample["image"].height, sample["image"].width)
    assert (
        batch.sam_pixels.dtype == torch.uint8
        and batch.grids.dtype == torch.bool
        and batch.grids.any((1, 2)).all()
    )


def test_every_epoch_is_another_permutation():
    epochs = first(StepSampler(12, 3, 1, seed=0), 8)
    one, two = sum(epochs[:4], []), sum(epochs[4:], [])
    assert sorted(one) == sorted(two) == list(range(12))
    assert one != two


def test_last_incomplete_step_is_dropped():
    sampler = StepSampler(11, 2, 2, seed=0)
    assert sampler.steps_per_epoch == 2
    for epoch in range(3):
        seen = sum(first(StepSampler(11, 2, 2, seed=0, start=2 * epoch), 4), [])
        assert len(seen) == len(set(seen)) == 8


def test_the_seed_decides():
    assert first(StepSampler(50, 4, 1, seed=1), 5) == first(StepSampler(50, 4, 1, seed=1), 5)
    assert first(StepSampler(50, 4, 1, seed=1), 5) != first(StepSampler(50, 4, 1, seed=2), 5)


def test_start_skips_whole_steps():
    assert (
        first(StepSampler(13, 2, 3, seed=5, start=7), 9)
        == first(StepSampler(13, 2, 3, seed=5), 30)[21:30]
    )


def test_steps_groups_batches():
    assert first(steps(iter(range(7)), 3), 5) == [[0, 1, 2], [3, 4, 5]]


def test_evaluation_sees_every_sample_once_over_all_ranks(dataset, processor):
    ranks = [
        sum((b.index for b in eval_loader(dataset, processor, 2, 0, rank, 2)), [])
        for rank in range(2)
    ]
    assert ranks == [list(range(0, len(dataset), 2)), list(range(1, len(dataset), 2))]


@pytest.mark.parametrize("accumulation, world_size", [(1, 2), (2, 1)])
def test_dataset_smaller_than_a_step_names_the_flag(accumulation, world_size):
    assert StepSampler(8, 4, accumulation, 0, world_size=world_size).steps_per_epoch == 1
    with pytest.raises(
        ValueError,
        match=r"7 samples, fewer than the 8 .*--batch_size 4 x --gradient_accumulation_steps",
    ):
        StepSampler(7, 4, accumulation, 0, world_size=world_size)


class Scratched:
    """A data set whose samples `bad` do not decode."""

    def __init__(self, dataset, bad):
        self.dataset, self.bad = dataset, set(bad)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        if i in self.bad:
            raise DamagedSample(f"id{i}", "damaged image")
        return self.dataset[i]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_sample_is_replaced_and_named(dataset, processor, num_workers):
    bad = range(0, len(dataset), 2)
    batches = list(eval_loader(Scratched(dataset, bad), processor, 3, num_workers))
    index = sum((b.index for b in batches), [])
    assert len(index) == len(dataset) and not set(index) & set(bad)
    assert [
        i for i in range(len(dataset)) if i % 2 and index[i] != i
    ] == []  # the others stay where they are
    for i in bad:  # the draw from (index, attempt) alone
        draws = [
            int(np.random.default_rng([i, attempt]).integers(len(dataset)))
            for attempt in range(1, 11)
        ]
        assert index[i] == next(draw for draw in draws if draw % 2)
    named = sum((b.damaged for b in batches), [])
    assert {f"id{i}: damaged image" for i in bad} == set(named)
    for b in batches:
        assert [dataset[i]["caption"] for i in b.index] == b.captions
    assert all(b.damaged == [] for b in eval_loader(dataset, processor, 3, 0))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_set_without_an_undamaged_sample_raises(dataset, processor, num_workers):
    with pytest.raises(
        BadData, match=r"id0: damaged image; .* 10 other samples in their place were damaged too"
    ):
        list(eval_loader(Scratched(dataset, range(len(dataset))), processor, 2, num_workers))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("max_tiles, num_image_tokens", [(1, 64), (3, 256)])
def test_a_caption_beyond_the_context_is_damaged(
    model, dataset, max_tiles, num_image_tokens, num_workers
):
    """To the token: the longest that fits stays, one more is replaced and named."""
    processor = Sa2VAProcessor(model.model.config, max_tiles)
    policy = SimpleNamespace(prompts=model.prompts, processor=processor, model=model.model)
    words = (
        2048 - 100 - num_image_tokens - (len(model.prompts.segment("red", 1)) - 65)
    )  # each is a token
    captions = {
        1: " ".join(["red"] * words),
        2: " ".join(["red"] * (words + 1)),
        3: " ".join(["red"] * 3000),
    }

    class Long(Scratched):
        def __getitem__(self, i):
            sample = self.dataset[i]
            return sample | {"caption": captions.get(i, sample["caption"]), "image_id": f"id{i}"}

    batches = list(eval_loader(Fitting(Long(dataset, []), policy, 100), processor, 3, num_workers))
    index, named = sum((b.index for b in batches), []), sum((b.damaged for b in batches), [])
    assert [i for i in range(len(dataset)) if index[i] != i] == [2, 3] and not {2, 3} & set(index)
    assert set(named) == {
        f"id{i}: caption of {len(captions[i])} characters: its prompt of {2048 - 100 + more} tokens (--max_tiles "
        f"{max_tiles}) and --max_completion_length 100 exceed the context of 2048"
        for i, more in ((2, 1), (3, 3000 - words))
    }
    assert batches[0].captions[1] == captions[1]


@pytest.mark.parametrize("max_tiles", [1, 6])
def test_batches_hold_what_the_processor_makes(dataset, max_tiles):
    """Though the loader takes its own, faster way to the same bits."""
    processor = Sa2VAProcessor(Sa2VAConfig.from_pretrained(SHIPPED_CHECKPOINT), max_tiles)
    for num_workers in (0, 1):
        for batch in eval_loader(dataset, processor, 3, num_workers):
            for k, i in enumerate(batch.index):
                sample = dataset[i]
                assert torch.equal(batch.pixel_values[k], processor.tiles(sample["image"]))
                assert torch.equal(batch.sam_pixels[k], processor.sam_image(sample["image"]))
                assert torch.equal(batch.grids[k], processor.region_grid(sample["mask"]))
                assert (
                    batch.masks[k].is_contiguous()
                    and batch.masks[k].numpy().tolist() == sample["mask"].tolist()
                )


def test_batches_that_are_kept_are_not_overwritten(dataset, processor):
    """Workers use their shared memory again; a trainer that holds many batches must not see that."""
    sampler = StepSampler(len(dataset), 1, 1, seed=1)
    kept = first(iter(train_loader(dataset, processor, sampler, 1)), 40)
    for batch in kept:
        sample = dataset[batch.index[0]]
        assert torch.equal(batch.sam_pixels[0], processor.sam_image(sample["image"]))
        assert torch.equal(batch.pixel_values[0], processor.tiles(sample["image"]))
        assert batch.masks[0].numpy().tolist() == sample["mask"].tolist()
