"""The other regions of a sample's image: all of the data set's, each once, none that is damaged."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Subset

from rl_train.data import DamagedSample, DescribeAnythingDataset, distractors
from rl_train.data.distractors import DistractorMasks
from rl_train.data.loader import Batches, eval_loader
from tests.data import dam_splits, gar_rows
from tests.data import test_refcoco as refcoco
from tests.data.gar_rows import MASK
from tests.data.test_loader import Pixels
from tools.gar_writer import encode_mask


def pixel(place: int) -> np.ndarray:
    """(2, 3) bool, one pixel set."""
    return (np.arange(6) == place).reshape(2, 3)


class Regions:
    """Sample i of image images[i] is the pixel pixels[i]; those in `bad` do not decode any more."""

    def __init__(self, images, pixels, bad=()):
        self.image_keys, self.pixels, self.bad = np.array(images), pixels, bad

    def __len__(self):
        return len(self.pixels)

    def mask(self, i, size):
        if i in self.bad:
            raise DamagedSample(f"id{i}", "bad mask RLE")
        assert size == (2, 3)
        return pixel(self.pixels[i])

    def __getitem__(self, i):
        return dict(mask=self.mask(i, (2, 3)), caption=str(i), image_id=f"id{i}", image=pixel(i))


def pixels_of(masks) -> list[int]:
    assert masks.dtype in (bool, torch.bool) and masks.shape[1:] == (2, 3)
    return [np.flatnonzero(one).item() for one in masks]


def test_they_are_those_of_the_image_each_once():
    """Region 4 is region 0 with another caption, regions 2 and 5 are one too."""
    dataset = Regions([7, 3, 7, 7, 7, 7], [0, 1, 2, 3, 0, 2])
    others = DistractorMasks(dataset)
    found = [pixels_of(others(i, dataset[i]["mask"])) for i in range(6)]
    assert found == [[2, 3], [], [0, 3], [0, 2], [2, 3], [0, 3]]


def test_those_of_a_subset_are_the_whole_data_sets():
    dataset = Regions([7, 3, 7, 7], [0, 1, 2, 3])
    some = Subset(Subset(dataset, [3, 1, 0]), [2, 0])  # regions 0 and 3
    others = DistractorMasks(some)
    assert [pixels_of(others(i, some[i]["mask"])) for i in range(2)] == [[2, 3], [0, 2]]


def test_a_damaged_one_is_left_out_and_what_is_too_much(monkeypatch):
    dataset = Regions([7] * 4, [0, 1, 2, 3], bad=[1])
    assert pixels_of(DistractorMasks(dataset)(0, pixel(0))) == [2, 3]
    monkeypatch.setattr(distractors, "MAX_DISTRACTOR_PIXELS", 6)
    assert pixels_of(DistractorMasks(dataset)(0, pixel(0))) == [2]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_has_them_if_asked(num_workers):
    dataset = Regions([7, 3, 7, 7], [0, 1, 2, 3])
    how = (Subset(dataset, [0, 1, 3]), Pixels(), 2, num_workers)
    batches = list(eval_loader(*how, distractors=True))
    found = [pixels_of(masks) for batch in batches for masks in batch.distractors]
    assert found == [[2, 3], [], [0, 2]]
    assert len({masks.untyped_storage().data_ptr() for masks in batches[0].distractors}) == 1
    assert next(iter(eval_loader(*how[:3], 0))).distractors is None


def test_of_a_damaged_sample_they_are_its_stand_ins():
    dataset = Regions([7, 7, 3, 3], [0, 1, 2, 3], bad=[0])
    batch = Batches(dataset, Pixels(), distractors=True)[[0, 1]]
    assert batch.index[0] != 0 and batch.damaged
    expected = {1: [], 2: [3], 3: [2]}  # region 0 is damaged as a neighbour too
    assert [pixels_of(m) for m in batch.distractors] == [expected[i] for i in batch.index]


def test_every_reader_reads_a_mask_without_its_image(tmp_path):
    rows = [gar_rows.row(mask_rle=[encode_mask(MASK), encode_mask(~MASK)]), gar_rows.row()]
    place, field = (gar_rows.SCHEMA.get_field_index("mask_rle"), gar_rows.SCHEMA.field("mask_rle"))
    schema = gar_rows.SCHEMA.set(place, field.with_type(pa.list_(field.type)))
    rows[1]["mask_rle"] = [encode_mask(MASK)]
    gar = gar_rows.read(tmp_path / "gar", *rows, schema=schema)
    regions = [dam_splits.region(), dam_splits.region(mask=~MASK)]
    dam_splits.write(tmp_path / "dam" / "SAM", {"a": regions}, [("a.png", dam_splits.PNGS[0])])
    dam = DescribeAnythingDataset(tmp_path / "dam")
    coco = refcoco.read(tmp_path / "coco", [refcoco.BOX, refcoco.OVERLAP])
    for dataset, others in ((gar, [1, 1, 1]), (dam, [1, 1]), (coco, [0, 0])):
        assert len(dataset) == len(others)
        of_image = DistractorMasks(dataset)
        for i, count in enumerate(others):
            sample = dataset[i]
            mask = sample["mask"]
            assert np.array_equal(dataset.mask(i, mask.shape), mask)
            double = dataset.mask(i, (2 * mask.shape[0], 2 * mask.shape[1]))
            assert np.array_equal(double[::2, 1::2], mask)
            assert len(of_image(i, mask)) == count
