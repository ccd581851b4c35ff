"""A data set's facts change with its samples, and not with the place of its files."""

import shutil

import numpy as np
import pytest
from torch.utils.data import Subset

from rl_train.data import GraspAnyRegionDataset, SegZeroDataset
from rl_train.data.digest import NUM_WHOLE_IMAGES, changes, data_facts
from rl_train.data.images import image_key
from rl_train.data.mixture import MixtureDataset
from tests.data.test_segzero import GREY
from tests.data.test_segzero import write as write_segzero


class Regions:
    """Regions of images of 3,000 bytes, two an image."""

    def __init__(self, captions, masks, images):
        self.captions, self.masks, self.images = captions, masks, images
        self.image_keys = np.array([image_key(image) for image in images])
        self.content_keys = np.array([(hash(c), hash(m)) for c, m in zip(captions, masks)])
        self.coco_ids = self.image_keys

    def __len__(self):
        return len(self.images)

    def encoded_image(self, i):
        if self.images[i] is None:
            raise FileNotFoundError("gone")
        return self.images[i]


def regions(count=8, captions=(), masks=(), images=()):
    """`count` regions, some of whose {index: value} are others."""
    of = [f"caption {i}" for i in range(count)], [f"mask {i}" for i in range(count)]
    pictures = [bytes([i // 2]) * 3000 for i in range(count)]
    for values, others in zip((*of, pictures), map(dict, (captions, masks, images))):
        for i, value in others.items():
            values[i] = value
    return Regions(*of, pictures)


MIDDLE = bytes([1]) * 1500 + b"x" + bytes([1]) * 1499  # of image 2, of the same length


@pytest.mark.parametrize(
    "now, words",
    [
        (regions(), ""),
        (regions(6), "rows 8 -> 6, images 4 -> 3"),
        (regions(captions={3: "other"}), "8 rows as before, but other captions"),
        (regions(masks={7: "other"}), "8 rows as before, but other masks"),
        (regions(images={2: MIDDLE, 3: MIDDLE}), "8 rows as before, but other pictures"),
        (Subset(regions(), [1, 0, 2, 3, 4, 5, 6, 7]), "but other captions and masks"),
        (Subset(regions(10), range(8)), ""),
    ],
)
def test_what_changed_is_named(now, words):
    said = changes(data_facts(regions()), data_facts(now))
    assert said.endswith(words) and bool(said) == bool(words)


def test_a_change_in_the_middle_of_an_image_is_seen_in_some_images():
    """All bytes count of a few, evenly spread; the module says so."""
    many = dict(count=4 * NUM_WHOLE_IMAGES)
    before = data_facts(regions(**many))
    found = [
        changes(before, data_facts(regions(images={i: bytes([i // 2]) * 2000}, **many)))
        for i in range(8)
    ]
    assert all(found)  # its length differs
    image = bytes(1500) + b"x" + bytes(1499)
    assert changes(before, data_facts(regions(images={0: image}, **many)))
    assert not changes(before, data_facts(regions(images={1: image}, **many)))


def test_every_caption_and_mask_counts():
    """Also of samples between those whose images are read whole."""
    many = dict(count=4 * NUM_WHOLE_IMAGES)
    before = data_facts(regions(**many))
    for i in range(8):
        said = changes(before, data_facts(regions(captions={i: "other"}, **many)))
        assert said == f"{4 * NUM_WHOLE_IMAGES} rows as before, but other captions"
        said = changes(before, data_facts(regions(masks={i: "other"}, **many)))
        assert said == f"{4 * NUM_WHOLE_IMAGES} rows as before, but other masks"


def test_another_mask_file_of_the_same_size_counts(tmp_path):
    rows, other = [("7", "the cup"), ("8", "the dog")], 255 - GREY
    facts = [
        data_facts(SegZeroDataset(write_segzero(tmp_path / name, rows, {"7": GREY, "8": mask})))
        for name, mask in (("one", GREY), ("same", GREY), ("other", other))
    ]
    assert facts[0] == facts[1]
    assert changes(facts[0], facts[2]) == "2 rows as before, but other masks"


def test_a_moved_folder_has_the_same_facts(data, tmp_path):
    moved = shutil.copytree(data / "train", tmp_path / "elsewhere")
    one, two = (GraspAnyRegionDataset(folder) for folder in (data / "train", moved))
    facts = data_facts(one)
    assert facts == data_facts(two) and facts["rows"] == len(one) and facts["images"] == 20
    mixed = MixtureDataset(dict(a=one, b=two), [1, 1])
    assert data_facts(mixed)["rows"] == 2 * len(one) and data_facts(mixed)["images"] == 20
    assert data_facts(Subset(mixed, range(len(one), 2 * len(one)))) == facts
    assert changes(facts, data_facts(GraspAnyRegionDataset(data / "heldout")))
