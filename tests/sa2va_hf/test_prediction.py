"""`predict_forward` of the demo model: the trainer's answers, videos, and every kind of input."""

import numpy as np
import pytest
import torch
from PIL import Image

from rl_train.engine import hf_backend
from rl_train.policies.sa2va_queries import describe, segment_by_own_answer
from sa2va_hf import Sa2VAModel
from sa2va_hf.prediction import StopWords
from sa2va_hf.processing_sa2va import normalise_tiles
from sa2va_hf.tokenizer import load_tokenizer
from sa2va_hf.video import track
from tools.demo.make_demo import SHIPPED_CHECKPOINT

SEGMENT = "<image>\nPlease segment {x} in this image."


@pytest.fixture(scope="module")
def built(policy):
    """A policy whose LoRA adds nothing: its model is the demo's."""
    return policy()


@pytest.fixture
def force(built):
    """Function of an answer: makes the next generation say it, whatever the model thinks."""
    hooks = []

    def build(text):
        ids = iter(built.tokenizer.encode(text, add_special_tokens=False))
        size = built.model.config.llm.vocab_size
        hooks.append(
            built.model.language_model.lm_head.register_forward_hook(
                lambda module, args, logits: (
                    torch.nn.functional.one_hot(torch.tensor(next(ids)), size)
                    .float()
                    .expand_as(logits)
                )
            )
        )

    yield build
    for hook in hooks:
        hook.remove()


def predict(built, **changes):
    return built.model.predict_forward(**dict(tokenizer=built.tokenizer) | changes)


def test_masks_are_those_of_the_batched_form(built, scenes, batch):
    images = built.encode(batch)
    prompts = built.segment_prompts(images, [0, 1, 2, 3], batch.captions)
    texts = built.complete(images, prompts, 1, 16)[1]
    segmented, _, _ = segment_by_own_answer(built, images, [0, 1, 2, 3], batch.captions, 16)
    for scene, text, mask in zip(scenes, texts, segmented.masks):
        result = predict(
            built, image=scene["image"], text=SEGMENT.format(x=scene["caption"].lower().rstrip("."))
        )
        assert result["prediction"] == text + "<|end|>"
        (predicted,) = result["prediction_masks"]
        assert predicted.dtype == bool and predicted.shape == (1, *mask.shape) and mask.any()
        assert np.array_equal(predicted[0], mask.numpy())


def test_captions_are_those_of_the_batched_form(built, scenes, batch):
    images = built.encode(batch)
    captions = describe(built, images, [0, 1, 2, 3], batch.masks, 24)
    for scene, caption, grid in zip(scenes, captions, batch.inputs.prompt_masks):
        # Of whole cells, where both grid rules agree.
        whole = np.kron(grid.numpy(), np.ones((32, 32))).astype(bool)
        result = predict(
            built,
            image=scene["image"],
            mask_prompts=[whole[None]],
            text="<image>Please generate a detailed description for the given image region.",
        )
        assert result == {"prediction": caption + "<|end|>", "prediction_masks": []}


def test_scripts_of_the_original_run(built, scenes, policy):
    """The tokenizer is kept, `processor` ignored, <image> without an image removed, and an answer's
    length can be set."""
    model = policy().model
    fresh = type(model)(model.config)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        fresh.predict_forward(text="Go")
    text = SEGMENT.format(x=scenes[0]["caption"])
    model.preparing_for_generation(built.tokenizer, max_new_tokens=2, torch_dtype=torch.bfloat16)
    short = model.predict_forward(scenes[0]["image"], None, text, processor=None)["prediction"]
    assert len(built.tokenizer.encode(short)) == 2
    model.preparing_for_generation(built.tokenizer)
    assert model.predict_forward(image=scenes[0]["image"], text=text)["prediction"].startswith(
        short
    )
    model.max_new_tokens = 8
    assert model.predict_forward(
        text="<image>Who?", tokenizer=built.tokenizer
    ) == model.predict_forward(text="Who?")


def test_ids_come_from_the_models_folder_or_by_hand(batch):
    ids = torch.tensor([[460, 461]])
    model = Sa2VAModel.from_pretrained(SHIPPED_CHECKPOINT)
    features = model.extract_feature(normalise_tiles(batch.inputs.tiles[0]))
    with pytest.raises(
        ValueError, match="0 <IMG_CONTEXT> tokens"
    ):  # known, though nobody bound a tokenizer
        model.embed(torch.tensor([[1, 2]]), features)
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    assert (model.img_context_token_id, model.seg_token_idx) == tuple(
        tokenizer.convert_tokens_to_ids(["<IMG_CONTEXT>", "[SEG]"])
    )
    bare = Sa2VAModel(model.config)
    with pytest.raises(ValueError, match="call bind_tokenizer"):
        bare.embed(ids, features)
    bare.img_context_token_id, bare.seg_token_idx = 461, 5
    assert (bare.img_context_id, bare.seg_id) == (461, 5)
    assert bare.embed(ids, features[:, :1]).shape == (1, 2, model.config.llm.hidden_size)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
def test_region_masks_of_any_dtype(built, batch, dtype):
    images = built.encode(batch)
    prompts = built.describe_prompts(images, [0], list(batch.inputs.prompt_masks[:1]))
    ids, features = (
        torch.tensor(prompts.ids),
        built.model.extract_feature(normalise_tiles(batch.inputs.tiles[0])),
    )

    def embed(masks):
        return built.model.embed(ids, features, [masks], torch.tensor([True]))

    assert torch.equal(
        embed(batch.inputs.prompt_masks[:1].to(dtype)), embed(batch.inputs.prompt_masks[:1])
    )


def test_text_alone_and_past_text(built, force):
    answer = "It is [SEG].<|end|>"
    force(2 * answer)  # one after the other
    first = predict(built, text="Please segment a dog in this image.")
    assert first == {
        "prediction": answer,
        "prediction_masks": [],
    }  # without an image there is nothing to segment
    past = "<|user|>\nPlease segment a cat in this image.<|end|>\n<|assistant|>\n"
    past += f"{first['prediction']}\n"
    prompts = []
    embed = built.model.embed
    built.model.embed = lambda ids, *rest: (
        prompts.append(built.tokenizer.decode(ids[0].tolist())) or embed(ids, *rest)
    )
    try:
        predict(built, text="And a dog?", past_text=past)
    finally:
        del built.model.embed
    assert prompts == [past + "<|user|>\nAnd a dog?<|end|>\n<|assistant|>\n"]


@pytest.mark.parametrize(
    "answer, masks",
    [
        ("Nothing there.<|end|>", 0),
        ("It is [SEG].<|end|>", 1),
        ("It is [SEG] and [SEG].<|end|>", 2),
    ],
)
def test_seg_never_once_and_twice(built, scenes, force, answer, masks):
    force(answer)
    result = predict(built, image=scenes[0]["image"], text="<image>\nWhat is there?")
    assert result["prediction"] == answer and len(result["prediction_masks"]) == masks


def test_seg_as_the_very_last_token_is_dropped(built, scenes, force, monkeypatch):
    monkeypatch.setattr(built.model, "max_new_tokens", len(built.tokenizer.encode("It is [SEG]")))
    force("It is [SEG]")
    assert predict(built, image=scenes[0]["image"], text="<image>\nGo.") == {
        "prediction": "It is [SEG]",
        "prediction_masks": [],
    }


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "1"])
def test_image_modes(built, scenes, mode):
    image = scenes[0]["image"].convert(mode)
    text = SEGMENT.format(x=scenes[0]["caption"])
    found = predict(built, image=image, text=text)
    expected = predict(built, image=image.convert("RGB"), text=text)
    assert found["prediction"] == expected["prediction"]
    assert all(
        np.array_equal(a, b)
        for a, b in zip(found["prediction_masks"], expected["prediction_masks"], strict=True)
    )


@pytest.mark.parametrize("size", [(1, 1), (10000, 50), (50, 10000)])
def test_extreme_sizes(built, force, size):
    force("It is [SEG].<|end|>")
    masks = predict(built, image=Image.new("RGB", size, "red"), text="<image>\nGo.")[
        "prediction_masks"
    ]
    assert [mask.shape for mask in masks] == [(1, size[1], size[0])]


def test_a_region_of_one_pixel_is_seen(built, scenes):
    """It covers no cell by the rule of the original, which would then ask about nothing."""
    mask = np.zeros((1, 256, 256))
    mask[0, 133, 77] = 255
    found = {}
    embed = built.model.embed
    built.model.embed = lambda ids, features, grids, flags: (
        found.update(grid=grids[0]) or embed(ids, features, grids, flags)
    )
    try:
        predict(built, image=scenes[0]["image"], text="<image>What is it?", mask_prompts=[mask])
    finally:
        del built.model.embed
    assert found["grid"].nonzero().tolist() == [[0, 4, 2]]


IMAGE, REGION = Image.new("RGB", (64, 64)), np.ones((1, 64, 64))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(image=IMAGE), "needs text"),
        (dict(image=IMAGE, video=[IMAGE], text="<image>Go"), "not both"),
        (dict(image=IMAGE, text="Go"), "text has no <image>"),
        (dict(image=IMAGE, text="<image><image>Go"), "<IMG_CONTEXT> tokens"),
        (dict(video=[], text="<image>Go"), "one size, got"),
        (dict(video=[IMAGE, Image.new("RGB", (64, 65))], text="<image>Go"), "one size, got"),
        (
            dict(video=[IMAGE], text="<image>Go", mask_prompts=[REGION]),
            "mask_prompts need an image",
        ),
        (dict(image=IMAGE, text="<image>Go", past_text="x"), "first turn"),
        (
            dict(image=IMAGE, text="Go", past_text="<IMG_CONTEXT>", mask_prompts=[REGION]),
            "no past_text",
        ),
        (dict(image=IMAGE, text="<image>Go", mask_prompts=[REGION, REGION]), "list of one"),
        (dict(image=IMAGE, text="<image>Go", mask_prompts=[REGION[0]]), "must be"),
        (
            dict(
                image=IMAGE, text="<image>Go", mask_prompts=[np.concatenate([REGION, 0 * REGION])]
            ),
            "region2 has no pixel",
        ),
        (
            dict(image=Image.new("1", (20000, 20000)), text="<image>Go"),
            "20000x20000 pixels is larger",
        ),
    ],
)
def test_bad_input(built, arguments, message):
    with pytest.raises(ValueError, match=message):
        predict(built, **arguments)


def test_video(built, scenes, force):
    """Prompted frames are what each is as an image; later ones are tracked, object by object."""
    frames = [scenes[i % 4]["image"].resize((300, 200)) for i in range(7)]
    force("Sure, [SEG] and [SEG].<|end|>")
    text = f"<image>Please segment {scenes[0]['caption']}"
    masks = predict(built, video=frames, text=text)["prediction_masks"]
    assert [mask.shape for mask in masks] == [(7, 200, 300)] * 2 and masks[0].dtype == bool
    assert not np.array_equal(masks[0], masks[1])


def test_prompted_frames_are_single_images(built, scenes):
    model = built.model
    features = [
        model.sam_features(built.processor.sam_image(scenes[i]["image"])[None]) for i in (0, 1, 0)
    ]
    prompts = torch.randn(2, model.config.prompt_size, generator=torch.Generator().manual_seed(0))
    tracked = track(model, features, prompts, num_prompted=2)
    first = torch.zeros(2, dtype=torch.long)
    for frame in (0, 1):
        assert torch.allclose(
            tracked[:, frame], model.decode_masks(features[frame], first, prompts), atol=1e-4
        )
    assert not torch.allclose(
        tracked[:, 2], tracked[:, 0], atol=1e-2
    )  # the same image, now without the prompt
    alone = track(model, features, prompts[1:], num_prompted=2)
    assert torch.allclose(alone[0], tracked[1], atol=1e-4)


@pytest.mark.parametrize(
    "said, ended",
    [
        ("a dog.<|end|>\n and", "a dog.<|end|>"),
        ("a dog.<|e\nnd|> and", "a dog.<|e\nnd|>"),
        ("a <|end", "a <|end"),
    ],
)
def test_an_odd_end_is_the_batched_forms(built, force, batch, monkeypatch, said, ended):
    """Training, too, goes on behind a stop text inside a token, but not behind one split."""
    ids = built.tokenizer.encode(said, add_special_tokens=False)
    monkeypatch.setattr(built.model, "max_new_tokens", len(ids))
    force(said)
    assert predict(built, text="Who?")["prediction"] == ended
    logits = iter(torch.nn.functional.one_hot(torch.tensor(ids), 570).float()[:, None])
    monkeypatch.setattr(hf_backend, "product", lambda hidden, head: next(logits))
    images = built.encode(batch)
    done, texts = built.complete(images, built.segment_prompts(images, [0], ["it"]), 1, len(ids))
    assert built.tokenizer.decode(done.ids[0][done.valid[0]].tolist()).strip() == ended
    assert texts == [ended.split("<|e")[0].strip() if "d|>" in ended else ended]


def test_stop_words_end_each_row(built):
    stop = StopWords(built.tokenizer, ["<|end|>"])

    def encode(text):
        return built.tokenizer.encode(text, add_special_tokens=False)

    rows = [
        encode("a dog.<|end|>"),
        encode("a <|end|> dog"),
        encode("a dog"),
        encode("dog<|end|>\n"),
    ]
    length = max(map(len, rows))
    ids = torch.tensor([[built.pad_id] * (length - len(row)) + row for row in rows])
    assert stop(ids, None).tolist() == [True, False, False, True]
    assert not StopWords(built.tokenizer, [])(ids, None).any()
