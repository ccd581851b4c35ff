"""A worker's inputs for Sa2VA: the processor's bits, and no caption too long."""

import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from transformers import AddedToken

from rl_train.data import DamagedSample, GraspAnyRegionDataset
from rl_train.data.loader import StepSampler, batch_loader, eval_loader
from rl_train.policies.sa2va_inputs import Sa2VAPreprocessor
from sa2va_hf import Sa2VAProcessor
from sa2va_hf.processing_sa2va import normalise_tiles
from tests.updates import equal
from tools.demo.make_demo import TRAIN, write_split


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_split(folder, seed=0, split=TRAIN, num_scenes=3)
    return GraspAnyRegionDataset(folder)


@pytest.fixture
def inputs_of(model):
    """Factory of inputs for a number of tiles and of tokens in an answer, of the demo's context."""

    def build(max_tiles, max_new_tokens=100):
        processor = Sa2VAProcessor(model.model.config, max_tiles)
        context = model.preprocessor(max_new_tokens).context
        return Sa2VAPreprocessor(processor, model.prompts, context, max_new_tokens)

    return build


def assert_holds(batch, dataset, processor):
    for k, i in enumerate(batch.index):
        sample = dataset[i]
        tiles = normalise_tiles(batch.inputs.tiles[k])
        assert torch.equal(tiles, processor.tiles(sample["image"]))
        assert torch.equal(batch.inputs.sam_pixels[k], processor.sam_image(sample["image"]))
        assert torch.equal(batch.inputs.prompt_masks[k], processor.region_grid(sample["mask"]))
        assert batch.masks[k].numpy().tolist() == sample["mask"].tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("max_tiles", [1, 6])
def test_batches_hold_what_the_processor_makes(dataset, inputs_of, max_tiles, num_workers):
    inputs = inputs_of(max_tiles)
    for batch in eval_loader(dataset, inputs, 3, num_workers):
        assert_holds(batch, dataset, inputs.processor)
        assert batch.inputs.sam_pixels.dtype == torch.uint8
        assert (
            batch.inputs.prompt_masks.dtype == torch.bool
            and batch.inputs.prompt_masks.any((1, 2)).all()
        )


def test_batches_that_are_kept_are_not_overwritten(dataset, inputs_of):
    """A trainer holds all batches of a step, whose tensors lie in memory shared with a worker."""
    inputs, sampler = inputs_of(1), StepSampler(len(dataset), 1, 1, seed=1)
    for batch in list(itertools.islice(batch_loader(dataset, inputs, sampler, 1), 40)):
        assert_holds(batch, dataset, inputs.processor)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("max_tiles, num_image_tokens", [(1, 64), (3, 256)])
def test_a_caption_beyond_the_context_is_damaged(
    model, dataset, inputs_of, max_tiles, num_image_tokens, num_workers
):
    """The longest that fits stays; with one token more it is replaced and named."""
    around = len(model.prompts.segment("red", 1)) - 65  # tokens of the prompt's own words
    words = 2048 - 100 - num_image_tokens - around  # each is a token
    lengths = {1: words, 2: words + 1, 3: 3000}
    samples = [dataset[i] | dict(image_id=f"id{i}") for i in range(len(dataset))]
    for i, length in lengths.items():
        samples[i]["caption"] = " ".join(["red"] * length)
    batches = list(eval_loader(samples, inputs_of(max_tiles), 3, num_workers))
    index, named = sum((b.index for b in batches), []), sum((b.damaged for b in batches), [])
    assert [i for i in range(len(samples)) if index[i] != i] == [2, 3] and not {2, 3} & set(index)
    assert set(named) == {
        f"id{i}: caption of {len(samples[i]['caption'])} characters: {around + lengths[i]} "
        f"text tokens exceed the {around + words} that --max_prompt_length and the model's "
        "context allow"
        for i in (2, 3)
    }
    assert batches[0].captions[1] == samples[1]["caption"]


def test_a_caption_beyond_max_caption_length_is_damaged(model, inputs_of):
    """The limit is on tokens of its prompt's text."""
    inputs = replace(inputs_of(6), max_prompt_length=100)
    around = len(model.prompts.segment("red", 1)) - 65
    sample = dict(image_id="id", caption=" ".join(["red"] * (100 - around)))
    inputs.check(sample)
    sample["caption"] += " red"
    reason = f"caption of {len(sample['caption'])} characters: 101 text tokens exceed the 100 that"
    with pytest.raises(DamagedSample, match=f"^id: {reason} --max_prompt_length"):
        inputs.check(sample)


def test_a_token_that_cleaning_does_not_know_is_refused(inputs_of, monkeypatch):
    """It may be in the caption as it stands, or in its prompt, of some other tokenizer."""
    inputs = inputs_of(1)
    for caption, place in (("a red", -1), ("Red", 0)):  # "Red" stands in no prompt
        token = inputs.prompts.tokenizer.encode(caption)[place]
        known = inputs.prompts.tokenizer.added_tokens_decoder
        tokenizer = type(inputs.prompts.tokenizer)
        # Special, or one of the markers that the model's prompts are made of.
        for new in (AddedToken("<new>", special=True), AddedToken("<IMG_CONTEXT>", special=False)):
            tokens = known | {token: new}
            monkeypatch.setattr(tokenizer, "added_tokens_decoder", property(lambda _: tokens))
            with pytest.raises(DamagedSample, match=f"^id: caption with the special token {new}$"):
                inputs.check(dict(image_id="id", caption=caption))
            monkeypatch.undo()
        tokens = known | {token: AddedToken("red", special=False)}  # a word is text
        monkeypatch.setattr(tokenizer, "added_tokens_decoder", property(lambda _: tokens))
        inputs.check(dict(image_id="id", caption=caption))
        monkeypatch.undo()


def test_inputs_can_be_sent_to_a_worker(dataset, inputs_of):
    inputs = inputs_of(1)
    copy = pickle.loads(pickle.dumps(inputs))
    assert copy.prompts.segment("a cup", 1) == inputs.prompts.segment("a cup", 1)
    assert equal(copy.prepare(dataset[0]), inputs.prepare(dataset[0]))
