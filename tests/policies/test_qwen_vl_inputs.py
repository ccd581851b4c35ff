"""Qwen-VL's inputs equal those of its own processor, positions and chat template."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from rl_train.data.errors import DamagedSample
from rl_train.rollout import Batch
from sa2va_hf.processing_sa2va import planes
from sa2va_hf.qwen_images import ImagePreprocessing, patches
from tests.policies.tiny_points import (
    PREPROCESSOR,
    PREPROCESSOR3,
    SAM_SIDE,
    WRITERS,
    samples,
    tiny_policy,
    tiny_tokenizer,
)

FREE = ImagePreprocessing(
    patch=14,
    merge=2,
    min_pixels=3136,
    max_pixels=1280 * 28 * 28,
    side=0,
    mean=PREPROCESSOR["image_mean"],
    std=PREPROCESSOR["image_std"],
)
FREE3 = ImagePreprocessing(
    patch=16,
    merge=2,
    min_pixels=4096,
    max_pixels=1280 * 32 * 32,
    side=0,
    mean=PREPROCESSOR3["image_mean"],
    std=PREPROCESSOR3["image_std"],
)
PROCESSORS = dict(qwen2_5_vl=(FREE, PREPROCESSOR), qwen3_vl=(FREE3, PREPROCESSOR3))
# What the published tokenizer_config.json makes of messages, less what it does with videos.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3-VL's has no system prompt of its own.
TEMPLATES = dict(qwen2_5_vl=TEMPLATE)
TEMPLATES["qwen3_vl"] = TEMPLATE.replace("system\nYou are a helpful assistant.", "").replace(
    "<|im_start|><|im_end|>\n", ""
)


@pytest.fixture(scope="module", params=WRITERS)
def version(request):
    """Value of model_type in config.json."""
    return request.param


@pytest.fixture(scope="module")
def of_version(qwens, sam, version):
    return tiny_policy(qwens[version], sam)


@pytest.mark.parametrize(
    "height, width",
    [(28, 28), (840, 840), (20, 31), (100, 37), (333, 500), (1200, 40), (1500, 2000)],
)
def test_patches_are_those_of_its_processor(of_version, version, height, width):
    """Also of images below the fewest and above the most pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    sample = dict(image=Image.fromarray(pixels))
    free, published = PROCESSORS[version]
    limits = dict(shortest_edge=free.min_pixels, longest_edge=free.max_pixels)
    settings = {name: value for name, value in published.items() if not name.endswith("_pixels")}
    processor = Qwen2VLImageProcessorPil(**settings | dict(size=limits))
    expected = processor(images=[sample["image"]], return_tensors="pt")
    inputs = of_version.preprocessor(8)
    inputs.preprocessing = free
    seen, of_sam = inputs.prepare(sample)
    assert seen.dtype == of_sam.dtype == torch.uint8 and of_sam.shape == (3, 128, 128)
    grid = [1, seen.shape[1] // free.patch, seen.shape[2] // free.patch]
    assert expected["image_grid_thw"].tolist() == [grid]
    found = patches(seen, free)
    torch.testing.assert_close(found, expected["pixel_values"], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "size, expected",
    [
        ((480, 640), (476, 644)),  # within the limits: the nearest multiples of 28
        ((1000, 1500), (812, 1204)),  # reduced to at most 1280 tokens
        ((20, 20), (56, 56)),  # enlarged to at least 4
    ],
)
def test_resized(size, expected):
    assert FREE.resized(*size) == expected
    assert expected[0] * expected[1] // 28**2 <= FREE.max_tokens


def test_one_side_for_all_images():
    square = replace(FREE, max_pixels=12845056, side=840)
    assert square.resized(10, 999) == (840, 840) and square.max_tokens == 900


def test_an_image_that_was_stored_square_is_resized_once(of_version):
    """SAM2 takes the stored square; Qwen-VL too where --image_size asks for one."""
    rng = np.random.default_rng(0)
    stored = Image.fromarray(rng.integers(0, 256, (56, 56, 3), dtype=np.uint8))
    sample = dict(image=stored.resize((90, 60), Image.Resampling.BICUBIC), stored_image=stored)
    inputs, sam_size = of_version.preprocessor(8), (SAM_SIDE, SAM_SIDE)
    for side in (0, 112):
        inputs.preprocessing = replace(FREE, side=side)
        seen, of_sam = inputs.prepare(sample)
        source = stored if side else sample["image"]
        resized = source.resize(seen.shape[:0:-1], inputs.preprocessing.resampling)
        assert torch.equal(seen, planes(resized))
        assert torch.equal(of_sam, planes(stored.resize(sam_size, Image.Resampling.BILINEAR)))


def test_positions_of_text_and_images(of_version):
    """Text counts up by one; an image's tokens stand in rows and columns; padding is constant."""
    points = of_version
    inputs = points.preprocessor(8)
    shown = [inputs.prepare(sample) for sample in samples([(60, 90), (200, 60)])]
    images = points.encode(Batch([], [], [], [], [], inputs.collate(shown)))
    prompts = points.point_questions(images, [1, 0], ["a", "a longer question"])
    _, mask, placed = points.embed(images, prompts)
    for p, (ids, (rows, columns)) in enumerate(zip(prompts.ids, images.grids[::-1])):
        start = len(points.chat_start)
        steps = torch.arange(rows * columns)
        image = start + torch.stack([0 * steps, steps // columns, steps % columns])
        behind = start + max(rows, columns)
        rest = torch.arange(behind, behind + len(ids) - start - len(steps)).expand(3, -1)
        expected = torch.cat([torch.arange(start).expand(3, -1), image, rest], 1)
        assert torch.equal(placed[:, p, mask[p] == 1], expected)
        assert len(placed[:, p, mask[p] == 0].unique()) < 2  # padding is 0 or 1


def test_a_prompt_is_that_of_the_published_chat_template(of_version, version):
    points = of_version
    batch = points.preprocessor(8)
    batch = batch.collate([batch.prepare(sample) for sample in samples([(60, 90)])])
    content = [dict(type="image"), dict(type="text", text="Where is it?\nSay it.")]
    messages = [dict(role="user", content=content)]
    tokenizer = tiny_tokenizer()
    how = dict(chat_template=TEMPLATES[version], add_generation_prompt=True, tokenize=False)
    text = tokenizer.apply_chat_template(messages, **how)
    text = text.replace("<|image_pad|>", "<|image_pad|>" * 6)
    images = type("Images", (), dict(grids=[(2, 3)]))
    prompts = points.point_questions(images, [0], ["Where is it?\nSay it."])
    assert prompts.ids == [tokenizer.encode(text, add_special_tokens=False)]
    unit = points.preprocessing.factor
    assert batch.pixels[0].shape == (3, 2 * unit, 3 * unit)


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(caption="a" * 11), "caption of 11 characters: 11 text tokens exceed the 10"),
        (dict(caption="a <loc1>"), "special token <loc1>"),
        (dict(image=Image.new("RGB", (603, 3))), "603x3 pixels, narrower than 1 to 200"),
    ],
)
def test_what_fits_no_prompt_is_refused(points, changes, fault):
    sample = samples([(30, 30)])[0] | dict(caption="a" * 10)
    inputs = points.preprocessor(8, max_prompt_length=10)
    inputs.tokenizer = tiny_tokenizer()
    inputs.tokenizer.add_tokens(["<loc1>"], special_tokens=True)  # Qwen's own are cleaned away
    inputs.tokenizer.add_tokens(["zebra"])  # a word that somebody added is text
    inputs.check(sample | dict(caption="a zebra"))
    inputs.check(sample)
    with pytest.raises(DamagedSample, match=fault):
        inputs.check(sample | changes)
