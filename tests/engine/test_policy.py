"""Sa2VA through the engine, by modules and by the kernels' twins: the same answers and scores."""

import pytest
import torch

from rl_train.policies import sa2va_queries
from sa2va_hf import Sa2VAModel
from sa2va_hf.batches import shared_prefix_lengths
from tests.engine.tiny import fast, slow

STEPS = 20


@pytest.fixture(scope="module")
def model(policy):
    """A policy with a LoRA that does something."""
    return randomised(policy())


def randomised(policy):
    for name, parameter in policy.trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return policy


@pytest.mark.parametrize("task", ["describe", "segment"])
@pytest.mark.parametrize("way", [slow, fast])
def test_what_is_sampled_is_what_is_scored(model, images, batch, way, task):
    """Both loops, ragged prompts of one image or another: log-probs and [SEG] embeddings."""
    image = [0, 0, 1]
    if task == "describe":
        prompts = model.describe_prompts(
            images, image, [batch.inputs.prompt_masks[i] for i in (0, 2, 1)]
        )
    else:
        captions = ["A cross.", *batch.captions[:2]]  # those of scenes are of one length
        prompts = model.segment_prompts(images, image, captions)
    uniforms = torch.rand(6, STEPS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with way(model.engine), torch.no_grad():
        drawn, texts = model.complete(images, prompts, 2, STEPS, uniforms)
        scores = model.score_answers(images, prompts.repeat(2), drawn.ids, drawn.valid)
        again = model.scored_mask_embeddings(scores, drawn.ids, drawn.valid)
    assert len(texts) == 6 and len(set(map(len, prompts.ids))) > 1
    torch.testing.assert_close(scores.logp, drawn.logp, atol=1e-4, rtol=0)
    rows, embeddings = model.mask_embeddings(drawn)
    assert (len(rows) > 0) == (task == "segment")
    torch.testing.assert_close(again, embeddings, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_tiles", [1, 6])
def test_the_teacher_shares_images_and_says_the_same(
    policy, prepare, scenes, monkeypatch, num_tiles
):
    """Masks of captions, captions of masks and their likelihood.

    In two chunks, the second of which begins inside an image's prompts.
    """
    model = randomised(policy(max_tiles=num_tiles))
    wide = scenes[2]  # 320 x 240, which is tiled where a square is not
    batch = prepare([scenes[0], wide], model.processor)
    images = model.encode(batch)
    assert max(images.tiles) > 1 or num_tiles == 1
    monkeypatch.setattr(sa2va_queries, "ROWS_AT_ONCE", 4)
    image = [0, 0, 0, 1, 1, 0]
    captions = ["a cup", "the checked red circle in the top right", "a cup"]
    captions += [batch.captions[1], "one more", "it"]
    masks = [batch.masks[i].roll(20 * row, 1) for row, i in enumerate(image)]
    found = {}
    for way in (slow, fast):
        with way(model.engine):
            found[way] = (
                sa2va_queries.segment(model, images, image, captions).masks,
                sa2va_queries.describe(model, images, image, masks, STEPS),
                sa2va_queries.caption_likelihood(model, images, image, masks, captions, STEPS),
            )
    (masks, texts, likely), (fast_masks, fast_texts, fast_likely) = found.values()
    assert all(map(torch.equal, masks, fast_masks)) and any(mask.any() for mask in masks)
    assert texts == fast_texts and len(set(texts)) > 1
    torch.testing.assert_close(likely, fast_likely, atol=1e-5, rtol=0)


def test_what_prompts_have_in_common_ends_with_their_image(model, images):
    """The same caption twice: equal prompts, but each needs a token of its own; another image."""
    prompts = model.segment_prompts(images, [1, 1, 3], ["a cup", "a cup", "a cup"])
    first, common, other = shared_prefix_lengths(model.model, images, prompts)
    ids, token = prompts.ids[1], model.model.img_context_id
    assert first == other == 0 and ids[common - 1] == token != ids[common]
    assert ids[:common].count(token) == model.model.config.tokens_per_tile


def test_rows_of_other_prompts(model, images, batch):
    """Prompts that differ in image or region alone are not one; rows need not be together."""
    grids = [batch.inputs.prompt_masks[i] for i in (0, 0, 1, 0)]
    grids[1] = grids[1].flip(0)
    prompts = model.describe_prompts(images, [0, 0, 1, 0], grids)
    assert prompts.ids[0] == prompts.ids[1] and prompts.distinct()[1] == [0, 1, 2, 3]
    same = model.segment_prompts(images, [0, 1], ["a circle"] * 2)
    assert same.ids[0] == same.ids[1] and same.distinct()[1] == [0, 1]
    assert same.repeat(2).distinct()[1] == [0, 0, 1, 1]


def test_answers_may_together_be_longer_than_the_context(model, images, monkeypatch):
    """Positions count within a row: only a prompt and one answer have to fit."""
    prompts = model.segment_prompts(images, [0], ["a circle"])
    ids = torch.ones(8, 4, dtype=torch.long)
    monkeypatch.setattr(model.model.config.llm, "max_position_embeddings", len(prompts.ids[0]) + 4)
    with torch.no_grad():
        model.score_answers(images, prompts.repeat(8), ids, ids > 0)
        longer = torch.ones(8, 5, dtype=torch.long)
        with pytest.raises(ValueError, match="does not fit"):
            model.score_answers(images, prompts.repeat(8), longer, longer > 0)


def test_a_released_model_is_saved_as_it_was(policy, images, tmp_path):
    """A fused one is refused; the file of a released one is not larger than its numbers."""
    model = policy()
    prompts = model.segment_prompts(images, [0], ["a circle"])
    with fast(model.engine):
        model.last_hidden_states(images, prompts)
    model.peft.unload()
    with pytest.raises(RuntimeError, match="entire storage"):
        model.model.save_pretrained(tmp_path / "fused")
    model.engine.release()
    model.model.save_pretrained(tmp_path / "model")
    again = Sa2VAModel.from_pretrained(tmp_path / "model").state_dict()
    state = model.model.state_dict()
    assert again.keys() == state.keys() and all(torch.equal(v, state[k]) for k, v in again.items())
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert size < 1.05 * sum(v.nbytes for v in state.values())
