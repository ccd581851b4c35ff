"""Queries to a role of Sa2VA: masks by a forced or its own answer, captions, likelihoods."""

from dataclasses import replace

import pytest
import torch

from rl_train.engine import Completions
from rl_train.policies import sa2va_queries
from rl_train.policies.sa2va_queries import (
    CAPTION_TOKENS_FACTOR,
    caption_likelihood,
    describe,
    region_grids,
    row_masks,
    segment,
    segment_by_own_answer,
    segment_generated,
    segment_model_captions,
    truncate_captions,
)
from sa2va_hf.processing_sa2va import region_grid, upsample_masks
from tests.engine.tiny import fast, slow
from tools.demo.scenes import make_scene

STEPS = 14
OTHER = "A striped green circle."  # an object of the first scene that is not its region


def all_equal(masks, others) -> bool:
    return len(masks) == len(others) > 0 and all(map(torch.equal, masks, others))


def test_a_teacher_that_says_what_is_forced_finds_the_same(model, images, batch, monkeypatch):
    """Chunks of rows end where neither image nor list does; it is asked twice."""
    monkeypatch.setattr(sa2va_queries, "ROWS_AT_ONCE", 3)
    image = [0, 1, 1, 2, 3, 0, 3]
    captions = [batch.captions[0], *batch.captions[1:2] * 2, *batch.captions[2:], OTHER]
    captions += ["the checked red circle beside the white one in the picture"]
    prompts = model.segment_prompts(images, image, captions)
    assert set(model.complete(images, prompts, 1, STEPS)[1]) == {"Sure, [SEG]."}
    masks = segment_generated(model, images, image, captions, STEPS).masks
    assert [mask.shape for mask in masks] == [images.sizes[i] for i in image]
    assert sum(bool(mask.any()) for mask in masks) > 4
    assert all_equal(masks, segment(model, images, image, captions).masks)
    assert all_equal(masks, segment_generated(model, images, image, captions, STEPS).masks)
    assert not torch.equal(masks[0], masks[5])  # one image, two captions
    assert segment_generated(model, images, [], [], STEPS).masks == []


def test_grids_of_masks_of_several_sizes(model, batch):
    """Each as alone, by the position of its mask; a single pixel has a cell, an empty mask none."""
    point, empty = (torch.zeros(batch.masks[2].shape, dtype=torch.bool) for _ in range(2))
    point[3, 5] = True
    masks = [batch.masks[2], point, batch.masks[0], empty, batch.masks[1]]
    assert len({mask.shape for mask in masks}) > 1
    grids = region_grids(model, masks)
    assert list(grids) == [0, 1, 2, 4] and grids[1].sum() == 1
    for p, grid in grids.items():
        assert torch.equal(grid, model.processor.region_grid(masks[p]))
    assert region_grids(model, []) == {}


def test_a_question_about_junk_is_bounded(model, images):
    """Bytes that are no letters decode to text of more tokens; words stay as they are."""
    generator, limit = torch.Generator().manual_seed(0), CAPTION_TOKENS_FACTOR * 8
    length = len(model.prompts.segment("", images.tiles[0])) + limit
    for vocabulary in (256, len(model.tokenizer)):
        ids = torch.randint(vocabulary, (50, 32), generator=generator)
        texts = [model.prompts.completion_text(row.tolist()) for row in ids]
        asked = model.segment_prompts(images, [0] * 50, truncate_captions(model, texts, 8))
        longest = max(map(len, asked.ids))
        uncut = model.segment_prompts(images, [0] * 50, texts)
        assert longest <= length + 4 < max(map(len, uncut.ids))  # one character cut in two
    words = ["The little RED circle.", "", "a dog"]
    assert truncate_captions(model, words, 8) == words


@pytest.mark.parametrize("forced", [True, False])
def test_a_caption_without_words_has_an_empty_mask(model, images, batch, forced):
    """It is not asked about; a caption that is beyond the context is cut."""
    captions = [batch.captions[0], " ", batch.captions[1], ".", "zebra " * 3000]
    image = [0, 2, 1, 0, 3]
    found = segment_model_captions(model, images, image, captions, STEPS, forced)
    spoken = truncate_captions(model, [captions[p] for p in (0, 2, 4)], STEPS)
    ask, tokens = (segment, ()) if forced else (segment_generated, (STEPS,))
    alone = ask(model, images, [0, 1, 3], spoken, *tokens)
    assert all_equal([found.masks[p] for p in (0, 2, 4)], alone.masks)
    assert [found.confidence[p] for p in (0, 2, 4)] == alone.confidence
    for p in (1, 3):
        assert not found.masks[p].any() and found.masks[p].shape == images.sizes[image[p]]
        assert found.confidence[p] == 0


def test_a_mask_is_the_union_of_what_the_teacher_says(model, images, batch, monkeypatch):
    """Its own tokens decide, not forced ones: two [SEG] in row 0, one in row 1, none in row 2."""
    seg, word = model.model.seg_id, 5
    ids = torch.tensor([[word, seg, seg, word], [word, word, seg, word], [word] * 4])
    width, generator = model.model.config.llm.hidden_size, torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(3, 4, width, generator=generator)
    # Of [SEG], states that find something: the region, another object, the region again.
    asked = model.segment_prompts(images, [0] * 3, [batch.captions[0], OTHER, batch.captions[0]])
    forced = asked.followed_by([model.prompts.forced_answer] * 3)
    hidden[[0, 0, 1], [1, 2, 2]] = model.last_hidden_states(images, forced)[:, 0]
    every = torch.ones(3, 4, dtype=torch.bool)
    said = Completions(ids, torch.zeros(3, 4), every, every[:, 0], hidden)
    monkeypatch.setattr(model.engine, "generate", lambda *_, **__: said)
    segmented = segment_generated(model, images, [0, 0, 0], batch.captions[:3], 4)
    masks, sure = segmented.masks, segmented.confidence
    same, rows, means = segment_by_own_answer(model, images, [0, 0, 0], batch.captions[:3], 4)
    assert all_equal(masks, same.masks) and rows.tolist() == [0, 0, 1]
    with torch.no_grad():
        of_seg = torch.stack([hidden[0, 1], hidden[0, 2], hidden[1, 2]])
        prompts = model.model.text_hidden_fcs(of_seg)
    torch.testing.assert_close(means, prompts)
    first, second, third = row_masks(model, images, [0, 0, 0], [0, 1, 2], prompts).masks
    assert all_equal(masks, [first | second, third, first & False])
    assert not all_equal([first], [second])
    with torch.no_grad():
        logits = model.decode_masks(images, [0, 0, 0], prompts)
    for row, union in ((0, logits[:2].amax(0)), (1, logits[2])):
        assert sure[row] == pytest.approx(union[union > 0].sigmoid().mean().item(), abs=1e-5)
    assert sure[2] == 0 and len(sure) == 3


@pytest.mark.parametrize("at_once", [1, 2**21 + 2**18, 2**26])
def test_masks_of_rows_together_are_those_of_each_alone(model, images, monkeypatch, at_once):
    """Whatever rows are upsampled together: images of several sizes, rows of 0 to 3 [SEG].

    Logits are given in place of prompt embeddings, so that the decoder rounds nothing.
    """
    monkeypatch.setattr(sa2va_queries, "UPSAMPLED_PIXELS_AT_ONCE", at_once)
    monkeypatch.setattr(model, "decode_masks", lambda images, image_index, logits: logits)
    image, segs = [2, 0, 1, 3, 0, 2, 1, 1], [1, 2, 0, 3, 1, 1, 0, 2]
    assert len({images.sizes[i] for i in image}) > 1
    rows = [row for row, count in enumerate(segs) for _ in range(count)]
    coarse = torch.randn(len(rows), 1, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = torch.nn.functional.interpolate(coarse, (256, 256), mode="bilinear")[:, 0]
    found = row_masks(model, images, image, rows, logits, one_by_one=True)
    for row, (i, own) in enumerate(zip(image, logits.split(segs))):
        height, width = images.sizes[i]
        each = [upsample_masks(x[None], model.processor.sam_size, (height, width)) > 0 for x in own]
        union = sum(each, torch.zeros(1, height, width, dtype=torch.bool))[0]
        assert torch.equal(found.masks[row], union) and union.any() == (segs[row] > 0)
        assert found.seg_masks[row].shape == (segs[row], height, width)
        assert all(map(torch.equal, found.seg_masks[row], (mask[0] for mask in each)))
        alone = row_masks(model, images, [i], [0] * segs[row], own)
        assert torch.equal(alone.masks[0], union) and alone.seg_masks is None
        assert found.confidence[row] == pytest.approx(alone.confidence[0], abs=1e-6)
        assert (found.confidence[row] > 0) == (segs[row] > 0)
    assert len(set(found.confidence)) == 1 + 6  # one of rows without [SEG], the others differ


def test_descriptions_are_greedy_answers_in_any_company(model, images, batch, monkeypatch):
    """Chunks of rows hold an empty mask too, which is not asked about."""
    image, masks = [0, 1, 1, 2, 3], [batch.masks[i] for i in (0, 1, 1, 2, 3)]
    masks[2] = masks[2] & False
    once = describe(model, images, image, masks, STEPS)
    grids = [images.prompt_masks[i] for i in (0, 1, 2, 3)]
    prompts = model.describe_prompts(images, [0, 1, 2, 3], grids)
    said = model.complete(images, prompts, 1, STEPS)[1]
    assert once == [said[0], said[1], "", said[2], said[3]] and all(said)
    monkeypatch.setattr(sa2va_queries, "ROWS_AT_ONCE", 3)
    assert describe(model, images, image, masks, STEPS) == once


def test_an_empty_mask_is_not_described(model, images, batch, monkeypatch):
    monkeypatch.setattr(model, "complete", None)
    assert describe(model, images, [0], [batch.masks[0] & False], 4) == [""]


# The likelihood of a caption


def grid_of(model, mask) -> torch.Tensor:
    """(g, g) bool cells of a mask."""
    processor = model.processor
    return region_grid(mask[None], processor.grid_size, processor.image_size, processor.rule)[0]


@torch.no_grad()
def by_hand(model, images, image: int, mask, caption: str) -> float:
    """exp of the mean log-prob of one caption, by a forward of its own without padding."""
    ids = torch.tensor([model.tokenizer.encode(caption + "<|end|>", add_special_tokens=False)])
    return likelihood_of(model, images, image, mask, ids)


@torch.no_grad()
def likelihood_of(model, images, image: int, mask, ids) -> float:
    prompts = model.describe_prompts(images, [image], [grid_of(model, mask)])
    scores = model.score_answers(images, prompts, ids, torch.ones_like(ids, dtype=torch.bool))
    return scores.logp.mean().exp().item()


@pytest.mark.parametrize("path", [slow, fast])
def test_likelihood_by_hand(policy, batch, path, monkeypatch):
    """Ragged captions, an empty mask between, an image twice; whatever a forward's rows.

    By the model's modules and as on a GPU, where neighbours share their image's forward.
    """
    model, image, true = policy(), [0, 1, 1, 2, 3], batch.captions
    images = model.encode(batch)
    captions = ["Dog.", true[1], true[1], true[2] + " It has no stripes.", true[3]]
    masks = [batch.masks[i] for i in image]
    masks[2] = torch.zeros_like(masks[2])
    questions = list(zip(image, masks, captions))
    expected = [by_hand(model, images, *q) if q[1].any() else 0.0 for q in questions]
    for size in (1, 2, 32):
        monkeypatch.setattr(sa2va_queries, "ROWS_AT_ONCE", size)
        with path(model.engine):
            likelihoods = caption_likelihood(model, images, image, masks, captions, 64)
        assert likelihoods.dtype == torch.float32
        assert likelihoods.tolist() == pytest.approx(expected, abs=1e-5), size
    assert likelihoods[2] == 0 and all(0 < p < 1 for p in likelihoods[[0, 1, 3, 4]].tolist())


def test_masks_of_one_grid_are_exactly_equally_likely(policy, batch):
    """Rounding in bfloat16 depends on a forward's rows: it must not look like a reward."""
    model = policy(dtype=torch.bfloat16)
    images, image = model.encode(batch), [0, 0, 0, 1, 1, 0, 1, 0]
    masks, captions = ([of[i] for i in image] for of in (batch.masks, batch.captions))
    likelihoods = caption_likelihood(model, images, image, masks, captions, 64)
    for i in (0, 1):
        assert len({p.item() for p, j in zip(likelihoods, image) if j == i}) == 1
    two = [batch.masks[0], ~batch.masks[0]]
    other = caption_likelihood(model, images, [0, 0], two, [batch.captions[0]] * 2, 64)
    assert other[0] != other[1]


def test_only_the_first_tokens_of_a_long_caption_count(model, images, batch):
    ids = model.tokenizer.encode(batch.captions[0], add_special_tokens=False)
    cut, longer = (
        caption_likelihood(model, images, [0], batch.masks[:1], [caption], 4).item()
        for caption in (batch.captions[0], batch.captions[0] + " And more." * 500)
    )
    expected = likelihood_of(model, images, 0, batch.masks[0], torch.tensor([ids[:4]]))
    assert cut == longer == pytest.approx(expected, abs=1e-5)


def test_an_empty_mask_is_not_asked_about(model, images, batch, monkeypatch):
    monkeypatch.setattr(model, "last_hidden_states", None)
    empty = [torch.zeros_like(mask) for mask in batch.masks[:2]]
    likelihoods = caption_likelihood(model, images, [0, 1], empty, batch.captions[:2], 64)
    assert likelihoods.tolist() == [0, 0]


def test_the_true_region_explains_its_caption_best(model, images, batch):
    """It does on average over the scenes, against the masks of the other objects of each."""
    true = caption_likelihood(model, images, [0, 1, 2, 3], batch.masks, batch.captions, 64)
    for i, name in enumerate(batch.image_ids):
        scene = make_scene(0, 7, int(name.removeprefix("scene")))  # as the fixture `scenes` does
        masks = [torch.from_numpy(obj.mask) for obj in scene.objects]
        others = [mask for mask in masks if not torch.equal(mask, batch.masks[i])]
        assert 0 < len(others) == len(masks) - 1
        n = len(others)
        false = caption_likelihood(model, images, [i] * n, others, [batch.captions[i]] * n, 64)
        print(f"scene {i}: likelihood by its region {true[i]:.3f}, by others {false.mean():.3f}")
        true[i] -= false.mean()
    assert true.mean() > 0.05


def test_features_of_part_of_a_batch_are_those_of_the_whole(model, images, batch):
    """An image's features do not depend on the images beside it."""
    alone = replace(
        batch,
        masks=batch.masks[:1],
        inputs=replace(
            batch.inputs,
            tiles=batch.inputs.tiles[:1],
            sam_pixels=batch.inputs.sam_pixels[:1],
            prompt_masks=batch.inputs.prompt_masks[:1],
        ),
    )
    mask = segment(model, model.encode(alone), [0], batch.captions[:1]).masks[0]
    together = segment(model, images, [0, 1], batch.captions[:2]).masks[0]
    assert (mask != together).float().mean() < 1e-3 and mask.any()
