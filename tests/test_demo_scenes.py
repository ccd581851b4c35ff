"""The drawn scenes: masks, distractors and captions that tell objects apart."""

import re

import numpy as np
import pytest

from tools.demo_scenes import (
    COLORS,
    IMAGE_SIZES,
    POSITIONS,
    SHAPES,
    SIZE_WORDS,
    SIZES,
    Object,
    Scene,
    caption,
    draw_scene,
    make_scene,
    position_of,
)

NUM_SCENES = 60


@pytest.fixture(scope="module")
def scenes():
    return [make_scene(seed=7, split=1, index=i) for i in range(NUM_SCENES)]


def each_object(scenes):
    return [(obj, scene) for scene in scenes for obj in scene.objects]


def words(text):
    return re.findall(r"[a-z]+", text.lower())


def test_scene_follows_from_its_three_numbers(scenes):
    again = make_scene(7, 1, 3)
    assert np.array_equal(again.image, scenes[3].image) and len(again.objects) == len(
        scenes[3].objects
    )
    assert all(np.array_equal(a.mask, b.mask) for a, b in zip(again.objects, scenes[3].objects))
    drawn = draw_scene(np.random.default_rng([7, 1, 3]))
    assert np.array_equal(drawn.image, again.image)
    for other in (make_scene(8, 1, 3), make_scene(7, 2, 3), make_scene(7, 1, 4)):
        assert other.image.size != again.image.size or not np.array_equal(other.image, again.image)


def test_images_and_masks(scenes):
    assert {scene.image.size for scene in scenes} == set(IMAGE_SIZES)
    assert {len(scene.objects) for scene in scenes} == {3, 4, 5, 6}
    for scene in scenes:
        assert scene.image.mode == "RGB"
        masks = np.stack([obj.mask for obj in scene.objects])  # (objects, H, W)
        assert masks.dtype == bool and masks.shape[1:] == scene.image.size[::-1]
        assert masks.sum(0).max() == 1  # visible pixels belong to one object
        assert masks.any((1, 2)).all()


def test_mask_pixels_have_the_colour_of_the_object(scenes):
    for obj, scene in each_object(scenes):
        mean = np.asarray(scene.image, dtype=float)[obj.mask].mean(0)
        nearest = min(COLORS, key=lambda name: np.abs(mean - COLORS[name]).sum())
        assert nearest == obj.color
    names = {
        getattr(obj, key) for obj, _ in each_object(scenes) for key in ("color", "shape", "size")
    }
    assert names == set(COLORS) | set(SHAPES) | set(SIZES)


def test_size_word_is_the_extent(scenes):
    order = list(SIZES)
    extent = {size: [] for size in order}
    for obj, scene in each_object(scenes):
        if obj.shape in ("circle", "ring", "cross"):
            rows, cols = np.nonzero(obj.mask)
            extent[obj.size].append(max(np.ptp(rows), np.ptp(cols)) / min(scene.image.size))
    for size in order:
        low, high = SIZES[size]
        assert (
            low - 0.02 < np.median(extent[size]) < high + 0.02
            and max(extent[size]) < high * 1.15 + 0.02
        )


def test_position_by_thirds_of_the_image():
    mask = np.zeros((30, 60), dtype=bool)
    mask[0:2, 58:60] = True
    assert position_of(mask) == "top right"
    mask[:] = False
    mask[14, 5] = True
    assert position_of(mask) == "left"
    mask[:] = True
    assert position_of(mask) == "center"
    mask[:] = False
    mask[29, 25] = True
    assert position_of(mask) == "bottom"


def test_all_positions_occur(scenes):
    assert {obj.position for obj, _ in each_object(scenes)} == {
        name for row in POSITIONS for name in row
    }


def test_four_attributes_identify_and_distractors_share(scenes):
    for scene in scenes:
        attributes = [obj.attributes for obj in scene.objects]
        assert len(set(attributes)) == len(attributes)
        assert scene.targets
        for i in scene.targets:
            others = attributes[:i] + attributes[i + 1 :]
            assert any(
                other[0] == attributes[i][0] or other[1] == attributes[i][1] for other in others
            )
    same_color = np.mean(
        [len({obj.color for obj in scene.objects}) < len(scene.objects) for scene in scenes]
    )
    assert 0.2 < same_color < 0.5


def test_targets_by_hand():
    def scene(*pairs):
        return Scene(
            None,
            tuple(Object(color, shape, "small", "top", None) for color, shape in pairs),
            "grey",
        )

    assert scene(("red", "cross"), ("red", "circle"), ("blue", "square")).targets == (0, 1)
    assert scene(("red", "cross"), ("blue", "circle"), ("white", "cross")).targets == (0, 2)


def test_full_caption_states_all_four(scenes):
    rng = np.random.default_rng(0)
    places = {
        "top": ("top", "upper"),
        "bottom": ("bottom", "lower"),
        "left": ("left",),
        "right": ("right",),
        "center": ("center", "middle"),
    }
    for obj, scene in each_object(scenes):
        text = caption(obj, scene, rng)
        said = re.split(r" next to | close to | on a \w+ background", text)[0].lower()
        assert {obj.color, obj.shape} <= set(words(said)), text
        assert [name for name in COLORS if name in words(said)] == [obj.color], text
        assert any(word in said for word in SIZE_WORDS[obj.size]), text
        for name, synonyms in places.items():
            assert any(word in words(said) for word in synonyms) == (
                name in obj.position.split()
            ), text


def test_partial_caption_drops_some_but_not_all(scenes):
    rng = np.random.default_rng(0)
    place_words = {"top", "upper", "bottom", "lower", "left", "right", "center", "middle"}
    numbers = []
    for obj, scene in each_object(scenes):
        text = caption(obj, scene, rng, "partial")
        said = set(words(text.split(" background")[0]))
        num_said = (
            (obj.color in said)
            + (obj.shape in said)
            + bool(said & place_words)
            + any(word in text for word in SIZE_WORDS[obj.size])
        )
        numbers.append(num_said)
    assert set(numbers) == {1, 2, 3}


def test_vague_caption_states_nothing(scenes):
    rng = np.random.default_rng(0)
    telling = set(COLORS) | set(SHAPES) | set(" ".join(sum(SIZE_WORDS.values(), ())).split())
    telling |= {
        "top",
        "upper",
        "bottom",
        "lower",
        "left",
        "right",
        "center",
        "middle",
        "edge",
        "corner",
    }
    for obj, scene in each_object(scenes):
        text = caption(obj, scene, rng, "vague")
        assert not telling & set(words(text)), text


def test_lengths_vocabulary_and_full_stops(scenes):
    rng = np.random.default_rng(0)
    texts = {
        detail: [caption(obj, scene, rng, detail) for obj, scene in each_object(scenes)]
        for detail in ("full", "partial", "vague")
    }
    everything = sum(texts.values(), [])
    assert all(5 <= len(text.split()) <= 25 for text in everything)
    assert 11 <= np.median([len(text.split()) for text in texts["full"]]) <= 13
    assert len({word for text in everything for word in words(text)}) < 120
    assert 0.75 < np.mean([text.endswith(".") for text in everything]) < 0.95
    assert all(
        text[0].isupper()
        and not re.search(r"\b[Aa] orange|\b[Aa]n (?!orange|image|object)|  |\{", text)
        for text in everything
    )


def test_caption_follows_from_its_generator(scenes):
    obj = scenes[0].objects[0]
    assert caption(obj, scenes[0], np.random.default_rng(5)) == caption(
        obj, scenes[0], np.random.default_rng(5)
    )
    assert len({caption(obj, scenes[0], np.random.default_rng(s)) for s in range(20)}) > 10


def test_unknown_detail_is_refused(scenes):
    with pytest.raises(ValueError, match="detail"):
        caption(scenes[0].objects[0], scenes[0], np.random.default_rng(0), "short")
