"""The evaluation split: whole pictures or a sample over them, and none that is trained on."""

import numpy as np
import pytest
from torch.utils.data import Subset

from rl_train.data import DescribeAnythingDataset, GraspAnyRegionDataset
from rl_train.data.images import NOT_COCO, coco_id
from rl_train.data.split import picture_keys, sample_regions, split_dataset
from tests.data.dam_splits import PNGS, region
from tests.data.dam_splits import write as write_dam
from tests.runs import REGIONS
from tools.demo.make_demo import TRAIN, write_split

SHARED = 22  # regions of the first five training scenes


def pictures(dataset) -> set[bytes]:
    return {dataset[i]["image"].tobytes() for i in range(len(dataset))}


def test_regions_of_one_image_stay_on_one_side():
    """Whole images are held out; what of the last one is too many is not trained on either."""

    class Regions:
        image_keys = np.array([7, 7, -3, 2, 2, 2, 9, 9, 4])
        coco_ids = np.full(9, NOT_COCO)

        def __init__(self, data_dir):
            pass

        def __len__(self):
            return len(self.image_keys)

        def report(self):
            return dict(rows=5, kept=9, skipped={}, resized_masks=0)

    for eval_samples in range(1, 6):
        training, heldout, _ = split_dataset(Regions, "x", None, eval_samples, 0)
        images = [
            {int(Regions.image_keys[i]) for i in part.indices} for part in (training, heldout)
        ]
        assert (
            len(heldout) == eval_samples
            and images[0].isdisjoint(images[1])
            and len(images[0] | images[1]) == 5
        )
        assert sorted(i for i in range(9) if Regions.image_keys[i] in images[0]) == training.indices


def test_a_sample_of_training_data_is_of_as_many_images_as_it_may_be():
    """Images have 20 regions each; none of theirs is trained on, measured or not."""

    class Many:
        image_keys = np.repeat(np.random.default_rng(0).permutation(50), 20)
        coco_ids = np.full(1000, NOT_COCO)

        def __init__(self, data_dir):
            pass

        def __len__(self):
            return len(self.image_keys)

        def report(self):
            return dict(rows=1000, kept=1000, skipped={}, resized_masks=0)

    keys = Many.image_keys
    for eval_samples, num_images in ((1, 1), (3, 3), (5, 5), (40, 5), (100, 5), (101, 6)):
        training, heldout, _ = split_dataset(Many, "x", None, eval_samples, 0)
        aside = set(keys[heldout.indices])
        assert (len(heldout), len(aside)) == (eval_samples, num_images)
        assert training.indices == [i for i in range(1000) if keys[i] not in aside]
        again = split_dataset(Many, "x", None, eval_samples, 0)
        assert again[1].indices == heldout.indices == sorted(set(heldout.indices))


def test_held_out_regions_may_be_of_another_format():
    class Two:
        image_keys = np.array([1, 2])
        coco_ids = np.full(2, NOT_COCO)

        def __init__(self, data_dir):
            self.where = data_dir

        def __len__(self):
            return 2

        def report(self):
            return dict(rows=2, kept=2, skipped={}, resized_masks=0)

    class Other(Two):
        image_keys = np.array([3, 4])

    training, heldout, _ = split_dataset(Two, "x", "y", 2, 0, eval_opener=Other)
    assert type(training) is Two and type(heldout.dataset) is Other
    assert (training.where, heldout.dataset.where) == ("x", "y")


def test_pictures_are_held_out_whole(data):
    """Though each of their regions is a row of its own, as `write_gar` writes them."""
    training, heldout, _ = split_dataset(GraspAnyRegionDataset, data / "train", None, 10, 0)
    sides = pictures(training), pictures(heldout)
    assert len(heldout) == 10 and sides[0].isdisjoint(sides[1]) and len(sides[0] | sides[1]) == 20


# --eval_data_dir and --num_samples


def test_every_image_comes_before_the_second_region_of_any():
    sizes = np.arange(30) + 1
    keys = np.repeat(1000 - np.arange(30) ** 2, sizes)  # of 465 regions
    for count in (10, 30, 31, 59):
        images, times = np.unique(keys[sample_regions(keys, count)], return_counts=True)
        assert len(images) == min(count, 30) and times.max() == (1 if count <= 30 else 2)
    assert sorted(sample_regions(keys, 1000)) == list(range(465))


def test_a_sample_is_the_same_each_time_and_begins_larger_ones():
    keys = np.random.default_rng(0).integers(0, 40, 200)
    larger = sample_regions(keys, 150)
    assert all(sample_regions(keys, count) == larger[:count] for count in (1, 7, 64, 150))
    assert min(larger[:20]) < 60 and max(larger[:20]) > 140  # and not the first ones


def test_an_image_of_many_regions_is_as_likely_as_any():
    """Here one of 50 regions, first of the others; of whose regions any may be taken."""
    found = [
        [i for i in sample_regions(np.arange(50 + n).clip(49), n // 4) if i < 50]
        for n in range(20, 220)
    ]
    assert max(map(len, found)) == 1 and 30 < sum(map(len, found)) < 70  # a quarter of 200
    assert len({i for one in found for i in one}) > 5


def test_the_held_out_folder_is_sampled(data):
    training, heldout, _ = split_dataset(
        GraspAnyRegionDataset, data / "train", data / "heldout", 4, 0
    )
    assert len(training) == REGIONS and len(heldout) == 4 == len(pictures(heldout))


# Images on both sides


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """A folder of the first five of the twenty training scenes."""
    folder = tmp_path_factory.mktemp("shared")
    write_split(folder, seed=0, split=TRAIN, num_scenes=5)
    return folder


def test_shared_images_are_refused(data, sharing):
    with pytest.raises(
        ValueError, match=f"^--data_dir .* share images, of {SHARED} of {REGIONS} "
    ) as refused:
        split_dataset(GraspAnyRegionDataset, data / "train", sharing, 4, 0)
    name = GraspAnyRegionDataset(data / "train").image_id(0)
    assert name in str(refused.value) and "--train_eval_overlap drop" in str(refused.value)


def test_shared_images_are_dropped_from_training(data, sharing):
    training, heldout, _ = split_dataset(
        GraspAnyRegionDataset, data / "train", sharing, SHARED, 0, "drop"
    )
    assert (len(training), len(heldout)) == (REGIONS - SHARED, SHARED)
    assert pictures(training).isdisjoint(pictures(heldout))


def test_where_all_images_are_shared_nothing_is_left(sharing):
    with pytest.raises(
        ValueError, match=f"--data_dir .*: of {SHARED} regions nothing is left to train on"
    ):
        split_dataset(GraspAnyRegionDataset, sharing, sharing, 4, 0, "drop")


def test_shared_images_are_kept_in_training_and_counted(data, sharing):
    said = []
    how = (GraspAnyRegionDataset, data / "train", sharing, 4, 0)
    training, _, _ = split_dataset(*how, "keep", log=said.append)
    assert len(training) == REGIONS and said == [
        f"images: 20 to train on, 5 to evaluate on, 5 in both ({SHARED} of {REGIONS} training "
        "regions) (--train_eval_overlap keep)"
    ]
    split_dataset(GraspAnyRegionDataset, data / "train", data / "heldout", 4, 0, log=said.append)
    assert said[1] == ("images: 20 to train on, 4 to evaluate on, none in both")


def test_images_of_coco_are_alike_under_any_encoding():
    """The second set has COCO's 5 anew encoded; the third the first one's bytes under no name."""

    class Named:
        def __init__(self, keys, ids):
            self.image_keys, self.coco_ids = np.array(keys), np.array(ids)

        def __len__(self):
            return len(self.coco_ids)

    first, second = Named([71, 72, 73, 71], [5, 6, -1, 5]), Named([81, 82], [5, -1])
    third = Named([71, 82], [-1, -1])
    one, two, three = (keys.tolist() for keys in picture_keys(first, second, third))
    assert one[0] == one[3] == two[0] == three[0] and two[1] == three[1]
    assert len({*one, *two, *three}) == 4
    assert [keys.tolist() for keys in picture_keys(third)] == [[71, 82]]
    part = Subset(Subset(first, [3, 1, 0]), [1, 2])
    assert [keys.tolist() for keys in picture_keys(part, second)] == [[6, 5], [5, 82]]
    assert coco_id("COCO_train2014_000000581857_16.jpg") == coco_id("a/000000581857.png") == 581857
    for other in ("sa_000000581857000.jpg", "581857.jpg", "100000581857.jpg", "", None):
        assert coco_id(other) == NOT_COCO


@pytest.mark.parametrize("num_pictures", [20, 21, 22, 23, 24, 25])
def test_a_picture_in_two_encodings_is_measured_once_before_others_twice(num_pictures):
    class Twice:
        image_keys = np.arange(2 * num_pictures)
        coco_ids = np.arange(2 * num_pictures) // 2

        def __len__(self):
            return 2 * num_pictures

        def report(self):
            return dict(kept=len(self), skipped={})

    _, heldout, _ = split_dataset(lambda _: Twice(), "D", None, 2, 0)
    one, other = Twice.coco_ids[heldout.indices]
    assert one != other


def test_describe_anything_too(tmp_path):
    names = [f"{k}.png" for k in "abc"]
    members = list(zip(names, PNGS))
    write_dam(tmp_path / "train" / "LVIS", dict.fromkeys("abc", region()), members)
    write_dam(tmp_path / "heldout" / "PACO", {"x": region()}, [("x.png", PNGS[1])])
    where = (DescribeAnythingDataset, tmp_path / "train", tmp_path / "heldout", 4, 0)
    with pytest.raises(ValueError, match="1 of 3 training regions, such as LVIS/b/0; "):
        split_dataset(*where)
    training, _, _ = split_dataset(*where, "drop")
    assert [training[i]["image_id"] for i in range(2)] == ["LVIS/a/0", "LVIS/c/0"]
