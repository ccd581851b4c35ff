"""The drawn scenes: masks, and captions of which no single attribute tells objects apart."""

from functools import partial
from itertools import combinations, permutations, product

import numpy as np
import pytest

from rl_train.rewards.meteor import meteor
from tools.demo.scenes import (
    ATTRIBUTES,
    COLORS,
    DIAMETERS,
    GAP,
    HELDOUT,
    IMAGE_SIZES,
    NUM_OBJECTS,
    TRAIN,
    WARM_START,
    caption,
    draw_scene,
    in_order,
    is_heldout,
    make_scene,
)


@pytest.fixture(scope="module")
def scenes():
    return [make_scene(seed=7, split=HELDOUT, index=i) for i in range(60)]


@pytest.fixture(scope="module")
def training_scenes():
    return [make_scene(7, split, i) for split in (TRAIN, WARM_START) for i in range(30)]


def each_object(scenes):
    return [(obj, scene) for scene in scenes for obj in scene.objects]


def test_meteor_tells_all_values_of_an_attribute_apart():
    """No value is another's exact word, stem or WordNet synonym."""
    for values in ATTRIBUTES.values():
        for one, other in permutations(values, 2):
            true, wrong = f"a {one} red cross", f"a {other} red cross"
            assert meteor([true], [wrong]) < meteor([true], [true]), (one, other)


def test_scene_follows_from_its_three_numbers(scenes):
    again = make_scene(7, HELDOUT, 3)
    assert np.array_equal(again.image, scenes[3].image)
    assert len(again.objects) == len(scenes[3].objects)
    assert all(np.array_equal(a.mask, b.mask) for a, b in zip(again.objects, scenes[3].objects))
    drawn = draw_scene(np.random.default_rng([7, HELDOUT, 3]), heldout=True)
    assert np.array_equal(drawn.image, again.image)
    for other in (make_scene(8, 1, 3), make_scene(7, 0, 3), make_scene(7, 1, 4)):
        assert other.image.size != again.image.size or not np.array_equal(other.image, again.image)


def test_images_and_masks(scenes):
    assert {scene.image.size for scene in scenes} <= set(IMAGE_SIZES)
    assert {len(scene.objects) for scene in scenes} == set(NUM_OBJECTS)
    for scene in scenes:
        assert scene.image.mode == "RGB"
        masks = np.stack([obj.mask for obj in scene.objects])  # (objects, H, W)
        assert masks.dtype == bool and masks.shape[1:] == scene.image.size[::-1]
        grown = sum(np.roll(masks, (dy, dx), (1, 2)) for dy in (0, GAP - 1) for dx in (0, GAP - 1))
        assert (grown > 0).sum(0).max() == 1 and masks.any((1, 2)).all()  # no two touch


def test_mask_pixels_are_the_object(scenes):
    """It changes tone from row to row, from column to column, or is of its colour's mean."""
    for obj, scene in each_object(scenes):
        pixels = np.asarray(scene.image, dtype=float)
        rows, cols = np.nonzero(obj.mask)
        inner = pixels[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1]
        inside = obj.mask[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1]
        down = np.abs(np.diff(inner, axis=0)).max(-1)[inside[1:] & inside[:-1]]
        across = np.abs(np.diff(inner, axis=1)).max(-1)[inside[:, 1:] & inside[:, :-1]]
        ruled, striped = (np.mean(steps > 25) > 0.1 for steps in (down, across))
        assert ruled == (obj.pattern in ("ruled", "checked"))
        assert striped == (obj.pattern in ("striped", "checked"))
        if obj.pattern == "plain":
            mean = inner[inside].mean(0)
            assert (
                min(ATTRIBUTES["color"], key=lambda name: np.abs(mean - COLORS[name]).sum())
                == obj.color
            )


def test_sizes_are_one_to_four(scenes):
    """Of a mask's longer side; small objects are as frequent as large ones."""
    sizes = []
    for obj, scene in each_object(scenes):
        rows, cols = np.nonzero(obj.mask)
        sizes.append((max(np.ptp(rows), np.ptp(cols)) + 1) / min(scene.image.size))
    smallest, largest = DIAMETERS
    assert largest == pytest.approx(4 * smallest)
    assert 0.85 * smallest < min(sizes) < 1.15 * smallest
    assert 0.85 * largest < max(sizes) < 1.15 * largest
    assert 0.8 < np.median(sizes) / np.sqrt(smallest * largest) < 1.1


def test_a_share_of_the_combinations_is_held_out_and_every_value_is_seen():
    combinations = list(product(*ATTRIBUTES.values()))
    assert 0.2 < np.mean([is_heldout(values) for values in combinations]) < 0.33
    for k, values in enumerate(ATTRIBUTES.values()):
        for value in values:
            kept = [is_heldout(each) for each in combinations if each[k] == value]
            assert 0 < np.mean(kept) < 0.6, value


def test_held_out_combinations_are_in_held_out_scenes_alone(scenes, training_scenes):
    assert not any(is_heldout(obj.attributes) for obj, _ in each_object(training_scenes))
    shares = [np.mean([is_heldout(obj.attributes) for obj in scene.objects]) for scene in scenes]
    assert min(shares) == 0.5 and max(shares) > 0.5


def test_no_attribute_alone_tells_an_object_apart_but_all_do(scenes):
    two = []
    for obj, scene in each_object(scenes):
        others = [o.attributes for o in scene.objects if o is not obj]
        assert obj.attributes not in others
        for k, value in enumerate(obj.attributes):
            assert any(other[k] == value for other in others)
        two += [
            all((other[a], other[b]) != (obj.attributes[a], obj.attributes[b]) for other in others)
            for a, b in combinations(range(len(ATTRIBUTES)), 2)
        ]
    assert 0.5 < np.mean(two) < 0.9  # two often do, not always


def test_every_value_occurs(scenes, training_scenes):
    for drawn in (scenes, training_scenes):
        for k, values in enumerate(ATTRIBUTES.values()):
            assert {obj.attributes[k] for obj, _ in each_object(drawn)} == set(values)


def test_captions_are_of_one_kind_and_length(scenes):
    assert caption("striped", "red", "cross") == "A striped red cross."
    for obj, _ in each_object(scenes):
        assert obj.caption == caption(obj.pattern, obj.color, obj.shape)
        assert len(obj.caption.split()) == 4


def test_other_processes_draw_the_same(scenes):
    drawn = list(in_order(partial(make_scene, 7, HELDOUT), 8, workers=2))
    assert np.array_equal(drawn[5].image, scenes[5].image)
    assert [o.caption for o in drawn[5].objects] == [o.caption for o in scenes[5].objects]
