"""Batches: the same whatever the number of workers, each epoch a permutation, too little data an
error."""

import itertools

import numpy as np
import pytest
import torch

from rl_train.data import BadData, DamagedSample, GraspAnyRegionDataset
from rl_train.data.loader import StepSampler, batch_loader, eval_loader, steps
from tools.demo.make_demo import TRAIN, write_split


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_split(folder, seed=0, split=TRAIN, num_scenes=3)
    return GraspAnyRegionDataset(folder)


class Pixels:
    """The inputs of a model that takes an image as it is and no caption of `too_long`."""

    def __init__(self, too_long=()):
        self.too_long = too_long

    def check(self, sample):
        if sample["caption"] in self.too_long:
            raise DamagedSample(sample["image_id"], "too long")

    def prepare(self, sample):
        return torch.from_numpy(np.array(sample["image"]))  # (H, W, 3)

    def collate(self, prepared):
        return prepared


def first(sampler, count):
    return list(itertools.islice(sampler, count))


def assert_same(a, b):
    assert (a.index, a.captions, a.image_ids) == (b.index, b.captions, b.image_ids)
    assert a.sizes == b.sizes and all(map(torch.equal, a.masks, b.masks))
    assert all(map(torch.equal, a.inputs, b.inputs))


def test_workers_do_not_change_the_batches(dataset):
    def batches(num_workers):
        sampler = StepSampler(len(dataset), 2, 1, seed=3)
        return first(batch_loader(dataset, Pixels(), sampler, num_workers), 6)

    alone, shared = batches(0), batches(2)
    assert [b.index for b in alone] == first(StepSampler(len(dataset), 2, 1, seed=3), 6)
    for a, b in zip(alone, shared, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_holds_its_samples(dataset, num_workers):
    sampler = StepSampler(len(dataset), 3, 1, seed=0)
    batch = next(iter(batch_loader(dataset, Pixels(), sampler, num_workers)))
    assert len(batch) == 3
    for k, i in enumerate(batch.index):
        sample, mask = dataset[i], batch.masks[k]
        assert (batch.captions[k], batch.image_ids[k]) == (sample["caption"], sample["image_id"])
        assert mask.dtype == torch.bool and mask.is_contiguous()
        assert mask.numpy().tolist() == sample["mask"].tolist()
        assert batch.sizes[k] == (sample["image"].height, sample["image"].width)
        assert batch.inputs[k].numpy().tolist() == np.array(sample["image"]).tolist()


def test_masks_of_several_sizes_share_one_storage(dataset):
    """A storage for each mask would be an open file for each, as long as a step holds it."""
    cut = [dataset[0], dataset[1] | dict(mask=dataset[1]["mask"][:7, :5])]
    batch = next(iter(eval_loader(cut, Pixels(), 2, 1)))
    assert batch.sizes == [cut[0]["mask"].shape, (7, 5)]
    for mask, sample in zip(batch.masks, cut):
        assert mask.numpy().tolist() == sample["mask"].tolist()
    assert len({mask.untyped_storage().data_ptr() for mask in batch.masks}) == 1


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


def test_an_order_of_one_s_own():
    """Each epoch's from its number and (seed, epoch), asked once; resumed or not."""
    asked = []

    def order(epoch, generator):
        asked.append(epoch)
        return [epoch] + list(generator.permutation(5))

    sampler = StepSampler(6, 2, 1, seed=4, order=order)
    found = first(sampler, 6)
    assert [found[0][0], found[3][0]] == [0, 1] and asked == [0, 1]
    drawn = np.random.default_rng([4, 1]).permutation(5).tolist()
    assert sum(found[3:], []) == [1, *drawn]
    assert first(StepSampler(6, 2, 1, seed=4, order=order, start=3), 3) == found[3:]
    for wrong, words in (
        (list(range(5)), r"--sampler: gave int64 \(5,\) for an epoch of 6 samples"),
        ([0.5] * 6, "--sampler: gave float64"),
        ([0, 1, 2, 3, 4, 6], "--sampler: gave int64 .* not an index from 0 to 5"),
        ([-1] * 6, "--sampler: gave int64 .* not an index from 0 to 5"),
        (None, "--sampler: gave object"),
    ):
        with pytest.raises(ValueError, match=words):
            first(StepSampler(6, 2, 1, seed=4, order=lambda *_: wrong), 1)


def test_the_seed_decides():
    assert first(StepSampler(50, 4, 1, seed=1), 5) == first(StepSampler(50, 4, 1, seed=1), 5)
    assert first(StepSampler(50, 4, 1, seed=1), 5) != first(StepSampler(50, 4, 1, seed=2), 5)


def test_start_skips_whole_steps():
    later = first(StepSampler(13, 2, 3, seed=5, start=7), 9)
    assert later == first(StepSampler(13, 2, 3, seed=5), 30)[21:30]


def test_steps_groups_batches():
    assert first(steps(iter(range(7)), 3), 5) == [[0, 1, 2], [3, 4, 5]]


def test_evaluation_sees_every_sample_once_over_all_ranks(dataset):
    loaders = [eval_loader(dataset, Pixels(), 2, 0, rank, 2) for rank in range(2)]
    ranks = [sum((batch.index for batch in loader), []) for loader in loaders]
    assert ranks == [list(range(0, len(dataset), 2)), list(range(1, len(dataset), 2))]
    assert [len(loader) for loader in loaders] == [-(-len(rank) // 2) for rank in ranks]


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
def test_a_damaged_sample_is_replaced_and_named(dataset, num_workers):
    bad = range(0, len(dataset), 2)
    batches = list(eval_loader(Scratched(dataset, bad), Pixels(), 3, num_workers))
    index = sum((b.index for b in batches), [])
    assert len(index) == len(dataset) and not set(index) & set(bad)
    assert all(index[i] == i for i in range(1, len(dataset), 2))  # the others stay where they are
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
        assert all(
            map(torch.equal, b.inputs, map(Pixels().prepare, map(dataset.__getitem__, b.index)))
        )
    assert all(b.damaged == [] for b in eval_loader(dataset, Pixels(), 3, 0))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_does_not_fit_the_model_is_replaced_and_named(dataset, num_workers):
    sample = dataset[1]
    inputs = Pixels(too_long=[sample["caption"]])
    unfit = {i for i in range(len(dataset)) if dataset[i]["caption"] == sample["caption"]}
    batches = list(eval_loader(dataset, inputs, 3, num_workers))
    index = sum((b.index for b in batches), [])
    assert {i for i in range(len(dataset)) if index[i] != i} == unfit and not unfit & set(index)
    named = sum((b.damaged for b in batches), [])
    assert f"{sample['image_id']}: too long" in named


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_set_without_an_undamaged_sample_raises(dataset, num_workers):
    with pytest.raises(
        BadData, match=r"id0: damaged image; .* 10 other samples in their place were damaged too"
    ):
        list(eval_loader(Scratched(dataset, range(len(dataset))), Pixels(), 2, num_workers))
