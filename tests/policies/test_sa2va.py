"""Scored log-probs of Sa2VA: their dependence on the input, and wrong input."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from rl_train import grpo
from rl_train.engine.hf_backend import append_token_embeds
from rl_train.policies.sa2va_queries import describe
from rl_train.roles import Roles
from rl_train.tasks import MaskCaptionMask
from rl_train.tasks.base import TaskContext
from sa2va_hf.batches import ImageFeatures
from sa2va_hf.processing_sa2va import normalise_tiles
from sa2va_hf.templates import IMG_CONTEXT_TOKEN
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo.make_demo import SHIPPED_CHECKPOINT


@pytest.fixture(scope="module")
def prompts(model, images, batch):
    """Three regions of different size: ragged prompts."""
    image = [0, 1, 3]
    prompts = model.describe_prompts(images, image, [batch.inputs.prompt_masks[i] for i in image])
    assert len({len(ids) for ids in prompts.ids}) == 3
    return prompts


@pytest.fixture(scope="module")
def answers(model):
    """ids, valid (3, T) of three answers of different length, padded on the right."""
    rows = [
        model.tokenizer.encode(text + "<|end|>", add_special_tokens=False)
        for text in (
            "A red circle.",
            "There is a large blue square in the center of the picture.",
            "Sure, [SEG].",
        )
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [model.pad_id] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[t < len(row) for t in range(longest)] for row in rows])


@torch.no_grad()
def score(model, images, prompts, answers, rows=(0, 1, 2)):
    ids, valid = answers
    rows = list(rows)
    return model.score_answers(images, prompts.select(rows), ids[rows], valid[rows])


def embeddings(model, scores, ids, valid):
    """(M, D) prompt embeddings of the [SEG] in scored rows."""
    with torch.no_grad():
        return model.scored_mask_embeddings(scores, ids, valid)


def test_scores_have_a_column_for_each_token(model, images, prompts, answers):
    ids, valid = answers
    scores = score(model, images, prompts, answers)
    assert scores.logp.shape == scores.entropy.shape == ids.shape
    assert (scores.logp[valid] < 0).all() and (scores.entropy >= 0).all()
    prompt = embeddings(model, scores, ids, valid)
    assert prompt.shape == (1, model.model.config.prompt_size)  # the one [SEG]
    assert scores.logp.dtype == prompt.dtype == torch.float32


def test_column_t_is_the_token_t(model, images, prompts, answers):
    """A change of token t changes column t and what follows, nothing before it."""
    ids, valid = answers
    before = score(model, images, prompts, answers).logp[1]
    changed = ids.clone()
    changed[1, 5] = (changed[1, 5] + 1) % model.model.config.llm.vocab_size
    after = score(model, images, prompts, (changed, valid)).logp[1]
    difference = (before - after).abs()
    assert (difference[:5] < 1e-5).all() and difference[5] > 1e-3 and difference[6:].max() > 1e-3


def test_the_image_matters(model, images, prompts, answers, batch):
    blank = [torch.zeros_like(p) for p in batch.inputs.tiles]
    blanked = model.encode(replace(batch, inputs=replace(batch.inputs, tiles=blank)))
    valid = answers[1]
    assert (
        score(model, images, prompts, answers).logp - score(model, blanked, prompts, answers).logp
    )[valid].abs().max() > 0.1


def test_the_region_matters(model, images, prompts, answers):
    """The same number of cells elsewhere: the same prompt ids, other log-probs."""
    moved = replace(prompts, prompt_masks=[grid.flip(1).flip(2) for grid in prompts.prompt_masks])
    assert not torch.equal(moved.prompt_masks[0], prompts.prompt_masks[0])
    difference = (
        score(model, images, prompts, answers).logp - score(model, images, moved, answers).logp
    )[answers[1]]
    assert difference.abs().max() > 0.1


def test_the_prompt_matters(model, images, answers, batch):
    one, other = (
        model.segment_prompts(images, [0, 1, 2], texts)
        for texts in (batch.captions[:3], ["a thing"] * 3)
    )
    assert (score(model, images, one, answers).logp - score(model, images, other, answers).logp)[
        answers[1]
    ].abs().max() > 1e-3


def test_a_row_scores_the_same_in_any_company(model, images, prompts, answers):
    ids, valid = answers
    together = score(model, images, prompts, answers).logp
    turned = score(model, images, prompts, answers, rows=(2, 0, 1)).logp
    for row in range(3):
        alone = score(model, images, prompts, answers, rows=(row,)).logp[0]
        torch.testing.assert_close(alone[valid[row]], together[row][valid[row]], atol=1e-4, rtol=0)
        torch.testing.assert_close(
            turned[(row + 1) % 3][valid[row]], together[row][valid[row]], atol=1e-4, rtol=0
        )


def test_padding_behind_the_answer_is_not_read(model, images, prompts, answers):
    ids, valid = answers
    longer = (
        torch.cat([ids, torch.full((3, 4), 7)], 1),
        torch.cat([valid, torch.zeros(3, 4, dtype=torch.bool)], 1),
    )
    one, other = score(model, images, prompts, answers), score(model, images, prompts, longer)
    torch.testing.assert_close(
        other.logp[:, : ids.shape[1]][valid], one.logp[valid], atol=1e-4, rtol=0
    )
    of_one, of_other = (
        embeddings(model, found, *given) for found, given in ((one, answers), (other, longer))
    )
    torch.testing.assert_close(of_other, of_one, atol=1e-4, rtol=0)


def test_score_is_the_models_own_forward(model, images, prompts, answers, batch):
    """`Sa2VAModel.forward` on pixels gives the same, one row without any padding."""
    ids, valid = answers
    ids = ids[1:2, valid[1]]
    full = torch.cat([torch.tensor([prompts.ids[1]]), ids], dim=1)
    with torch.no_grad():
        out = model.model(
            full,
            torch.ones_like(full),
            normalise_tiles(batch.inputs.tiles[1]),
            [prompts.prompt_masks[1]],
            torch.tensor([True]),
        )
    expected = grpo.token_logps_from_logits(out.logits[:, len(prompts.ids[1]) - 1 : -1], ids, 1.0)
    torch.testing.assert_close(
        score(model, images, prompts, answers).logp[1, valid[1]], expected[0], atol=1e-4, rtol=0
    )


def test_temperature_divides_the_logits(policy, images, prompts, answers):
    flat = score(policy(temperature=1e6), images, prompts, answers).logp[answers[1]]
    uniform = -torch.tensor(471.0).log().item()  # of the demo's words
    torch.testing.assert_close(flat, torch.full_like(flat, uniform), atol=1e-3, rtol=0)


def test_a_sampled_image_token_is_a_plain_token(model, images, prompts, answers):
    """Image features go to the prompt's places alone; the answer's <IMG_CONTEXT> is a word."""
    ids, valid = answers[0].clone(), answers[1]
    ids[1, 3] = model.model.img_context_id
    scores = score(model, images, prompts, (ids, valid))
    assert scores.logp.isfinite().all()
    with torch.no_grad():
        embeds, mask, _ = model.embed(images, prompts, ids.shape[1])
        embeds = append_token_embeds(model.model.language_model, embeds, ids)
    own = model.model.language_model.get_input_embeddings().weight[model.model.img_context_id]
    assert torch.equal(embeds[1, mask.shape[1] + 3], own)
    kept = score(model, images, prompts, answers)
    torch.testing.assert_close(
        scores.logp[[0, 2]], kept.logp[[0, 2]], atol=1e-4, rtol=0
    )  # rows beside it are untouched
    torch.testing.assert_close(scores.logp[1, :3], kept.logp[1, :3], atol=1e-4, rtol=0)


def test_seg_tokens_that_were_fed(model):
    seg, x = model.model.seg_id, 5
    ids = torch.tensor([[seg, x, x, x], [x, seg, x, seg], [x, x, seg, x], [seg, seg, x, x]])
    valid = torch.tensor(
        [[True] * 4, [True] * 4, [True, True, True, False], [True, True, True, False]]
    )
    assert model.seg_tokens(ids, valid).tolist() == [
        [True, False, False, False],
        [False, True, False, False],  # the last token of a row was never an input
        [False, False, False, False],  # nor was the last before the padding
        [True, True, False, False],
    ]


# Wrong input


@pytest.mark.parametrize("change", [1, -1])
def test_region_cells_must_fit_the_prompt(model, images, prompts, answers, change):
    grid = prompts.prompt_masks[0].clone().flatten()
    grid[(~grid if change > 0 else grid).nonzero()[0]] = change > 0
    wrong = replace(
        prompts, prompt_masks=[grid.view_as(prompts.prompt_masks[0]), *prompts.prompt_masks[1:]]
    )
    with pytest.raises(ValueError, match=re.escape(IMG_CONTEXT_TOKEN)):
        score(model, images, wrong, answers)


def test_a_prompt_beyond_the_context_names_its_tiles(model):
    width = 4 * model.model.config.vision.hidden_size
    tiles = 40  # 40 x 64 image tokens in a context of 2048
    large = ImageFeatures(
        torch.zeros(tiles, model.model.config.tokens_per_tile, width), [tiles], [], [(8, 8)], None
    )
    with pytest.raises(ValueError, match="2048: use fewer tiles"), torch.no_grad():
        model.embed(large, model.segment_prompts(large, [0], ["a circle"]))


def test_a_prompt_beyond_the_context_names_its_caption(model, images):
    with pytest.raises(
        ValueError,
        match=r"^a prompt of 64 tokens of image and region and 27\d\d of text, "
        r".*5 behind it.* 2048: its caption is",
    ):
        model.embed(
            images, model.segment_prompts(images, [0, 0], ["a circle", "a red cross " * 900]), 5
        )


def test_a_tokenizer_without_seg_is_refused(model, tmp_path):
    rules = json.loads((SHIPPED_CHECKPOINT / "tokenizer.json").read_text())
    rules["added_tokens"] = [
        token for token in rules["added_tokens"] if token["content"] != "[SEG]"
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    shutil.copy(SHIPPED_CHECKPOINT / "tokenizer_config.json", tmp_path)
    before = model.model.seg_id
    with pytest.raises(ValueError, match=rf"{tmp_path}.*no single token \[SEG\]"):
        model.model.bind_tokenizer(load_tokenizer(tmp_path))
    assert model.model.seg_id == before


# One view of image and region for all roles


@pytest.mark.parametrize("max_tiles", [1, 6])
def test_teacher_sees_the_policys_tiles_and_region(policy, prepare, scenes, monkeypatch, max_tiles):
    """A region of 3 x 3 pixels has its cell, in grid and text, in policy's prompt and teacher's."""
    model = policy(max_tiles=max_tiles)
    mask = scenes[0]["mask"] & False
    mask[101:104, 65:68] = True
    wide = scenes[2]  # 320 x 240, which is tiled where a square is not
    batch = prepare([scenes[0] | dict(mask=mask), wide], model.processor)
    assert batch.inputs.prompt_masks.flatten(1).sum(1)[0] == 1
    images = model.encode(batch)
    seen, embed = [], model.embed

    def noted(images, prompts, num_tokens=0):
        seen.append((images, prompts))
        return embed(images, prompts, num_tokens)

    monkeypatch.setattr(model, "embed", noted)
    context = TaskContext(model, Roles(model.trainable), max_reply_tokens=2)
    task = MaskCaptionMask(MaskCaptionMask.Options(), context)
    own = task.prompts(batch, images)
    describe(model, images, [0, 1], batch.masks, 2)
    ((teacher_images, teachers),) = seen
    assert (
        teacher_images is images
        and teachers.ids == own.ids
        and teachers.image_index == own.image_index
    )
    assert all(map(torch.equal, teachers.prompt_masks, own.prompt_masks))
    for ids, grid, tiles in zip(own.ids, own.prompt_masks, images.tiles):
        assert ids.count(model.model.img_context_id) == 64 * tiles + int(grid.sum()) and grid.any()
    assert images.tiles == [len(tiles) for tiles in batch.inputs.tiles] and (
        max(images.tiles) > 1
    ) == (max_tiles > 1)


def test_a_caption_in_a_prompt_is_a_phrase(model, images):
    """A sampled caption may shout special tokens, which would be image or [SEG]; they go."""
    loud, plain = (
        model.segment_prompts(images, [0], [text]) for text in ("A Dog <IMG> [seg].", "a dog")
    )
    assert loud.ids == plain.ids
