"""What the scored log-probs depend on, what they must not depend on, and what trains."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train import grpo
from rl_train.engine.modules import follow
from rl_train.policies.sa2va import (
    TRAINABLE,
    Images,
    Prompts,
    load_tokenizer,
    pad_left,
    trainable_groups,
)
from rl_train.roles import Roles
from rl_train.rollout import describe
from rl_train.tasks import MaskCaptionMask
from sa2va_hf.modeling_sa2va import IMG_CONTEXT_TOKEN
from tools.make_demo import SHIPPED_CHECKPOINT


@pytest.fixture(scope="module")
def prompts(model, images, batch):
    """Three regions of different size: ragged prompts."""
    prompts = model.describe_prompts(images, [0, 1, 2], list(batch.inputs.grids[:3]))
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
    return model.score(images, prompts.select(rows), ids[list(rows)], valid[list(rows)])


def test_scores_have_a_column_for_each_token(model, images, prompts, answers):
    ids, valid = answers
    scores = score(model, images, prompts, answers)
    assert scores.logp.shape == scores.entropy.shape == ids.shape
    assert (scores.logp[valid] < 0).all() and (scores.entropy >= 0).all()
    assert scores.latent_mean.shape == (1, model.model.config.prompt_size)  # the one [SEG]
    assert scores.logp.dtype == scores.latent_mean.dtype == torch.float32


def test_column_t_is_the_token_t(model, images, prompts, answers):
    """A change of token t changes column t and what follows, nothing before it."""
    ids, valid = answers
    before = score(model, images, prompts, answers).logp[1]
    changed = ids.clone()
    changed[1, 5] = (changed[1, 5] + 1) % 500
    after = score(model, images, prompts, (changed, valid)).logp[1]
    difference = (before - after).abs()
    assert (difference[:5] < 1e-5).all() and difference[5] > 1e-3 and difference[6:].max() > 1e-3


def test_the_image_matters(model, images, prompts, answers, batch):
    blank = [torch.zeros_like(p) for p in batch.inputs.pixel_values]
    blanked = model.encode_images(blank, batch.inputs.sam_pixels, batch.sizes)
    valid = answers[1]
    assert (
        score(model, images, prompts, answers).logp - score(model, blanked, prompts, answers).logp
    )[valid].abs().max() > 0.1


def test_the_region_matters(model, images, prompts, answers):
    """The same number of cells elsewhere: the same prompt ids, other log-probs."""
    moved = replace(prompts, grids=[grid.flip(1).flip(2) for grid in prompts.grids])
    assert not torch.equal(moved.grids[0], prompts.grids[0])
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
    torch.testing.assert_close(other.latent_mean, one.latent_mean, atol=1e-4, rtol=0)


def test_score_is_the_models_own_forward(model, images, prompts, answers, batch):
    """Against `Sa2VAModel.forward` on pixels, one row without any padding."""
    ids, valid = answers
    ids = ids[1:2, valid[1]]
    full = torch.cat([torch.tensor([prompts.ids[1]]), ids], dim=1)
    with torch.no_grad():
        out = model.model(
            full,
            torch.ones_like(full),
            batch.inputs.pixel_values[1],
            [prompts.grids[1]],
            torch.tensor([True]),
        )
    expected = grpo.token_logps_from_logits(out.logits[:, len(prompts.ids[1]) - 1 : -1], ids, 1.0)
    torch.testing.assert_close(
        score(model, images, prompts, answers).logp[1, valid[1]], expected[0], atol=1e-4, rtol=0
    )


def test_temperature_divides_the_logits(policy, images, prompts, answers, model):
    flat = score(policy(temperature=1e6), images, prompts, answers).logp[answers[1]]
    torch.testing.assert_close(
        flat, torch.full_like(flat, -torch.tensor(570.0).log().item()), atol=1e-3, rtol=0
    )


def test_a_sampled_image_token_is_a_plain_token(model, images, prompts, answers):
    """Image features go to the prompt's places alone; the answer's <IMG_CONTEXT> keeps its own embedding."""
    ids, valid = answers[0].clone(), answers[1]
    ids[1, 3] = model.model.img_context_id
    scores = score(model, images, prompts, (ids, valid))
    assert scores.logp.isfinite().all()
    with torch.no_grad():
        embeds, mask = model.embed(images, prompts, ids.shape[1])
        embeds = follow(model.model.language_model, embeds, ids)
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
    grid = prompts.grids[0].clone().flatten()
    grid[(~grid if change > 0 else grid).nonzero()[0]] = change > 0
    wrong = replace(prompts, grids=[grid.view_as(prompts.grids[0]), *prompts.grids[1:]])
    with pytest.raises(ValueError, match=re.escape(IMG_CONTEXT_TOKEN)):
        score(model, images, wrong, answers)


def test_a_prompt_beyond_the_context_names_the_flag(model, answers):
    width = 4 * model.model.config.vision.hidden_size
    tiles = 40  # 40 x 64 image tokens in a context of 2048
    large = Images(
        torch.zeros(tiles, model.model.config.tokens_per_tile, width), [tiles], [], [(8, 8)]
    )
    with pytest.raises(ValueError, match="2048.*--max_tiles"), torch.no_grad():
        model.embed(large, model.segment_prompts(large, [0], ["a circle"]))


def test_a_prompt_beyond_the_context_names_its_caption(model, images):
    with pytest.raises(
        ValueError,
        match=r"^a prompt of 64 tokens of image and region and 27\d\d of text, with 5 .* 2048: its caption is",
    ):
        model.embed(
            images, model.segment_prompts(images, [0, 0], ["a circle", "a red thing " * 900]), 5
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


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"--model_path {tmp_path}"):
        load_tokenizer(tmp_path)


# What trains

NOT_REACHED = ("output_hypernetworks_mlps.0.", "iou_prediction_head.", "pred_obj_score_head.")


def expected_group(name):
    """The group of a parameter by a rule written without regular expressions, or None if it must stay frozen."""
    if ".lora_A." in name or ".lora_B." in name:
        return "lora"
    if name.startswith(("mlp1.", "text_hidden_fcs.")):
        return name.split(".")[0]
    if name.startswith("grounding_encoder.mask_decoder."):
        return None if any(part in name for part in NOT_REACHED) else "sam2"
    if name.startswith(
        (
            "grounding_encoder.prompt_encoder.not_a_point_embed.",
            "grounding_encoder.prompt_encoder.no_mask_embed.",
        )
    ):
        return "sam2"
    return None


def test_trainable_set_is_the_allow_list(model):
    expected = {name: expected_group(name) for name, _ in model.model.named_parameters()}
    trains = {
        name: model.group_of(name) for name, p in model.model.named_parameters() if p.requires_grad
    }
    assert trains == {name: group for name, group in expected.items() if group}
    assert set(trains) == set(model.trainable) and set(trains.values()) == set(TRAINABLE)
    assert all(p.dtype == torch.float32 for p in model.trainable.values())
    for part in (
        *NOT_REACHED,
        "prompt_encoder.point_embed",
        "prompt_encoder.mask_embed",
        "vision_encoder",
        "vision_model",
        "embed_tokens",
        "lm_head",
        "base_layer",
    ):
        frozen = [n for n, p in model.model.named_parameters() if part in n]
        assert frozen and not any(n in trains for n in frozen), part
    # 4 layers x 7 projections x (A, B)
    assert sum(group == "lora" for group in trains.values()) == 4 * 7 * 2


def test_a_group_left_out_is_frozen(policy):
    model = policy(groups=("lora", "mlp1"))
    assert {model.group_of(name) for name in model.trainable} == {"lora", "mlp1"}
    assert not any(
        p.requires_grad
        for n, p in model.model.named_parameters()
        if n.startswith(("text_hidden", "grounding"))
    )
    with pytest.raises(AssertionError, match="vision"):
        policy(groups=("lora", "vision"))


def test_trainables_are_float32_over_a_bf16_base(policy):
    model = policy(dtype=torch.bfloat16)
    assert {p.dtype for p in model.trainable.values()} == {torch.float32}
    assert model.model.language_model.lm_head.weight.dtype == torch.bfloat16
    Roles(model.trainable)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_frozen_encoders_need_no_autocast(policy, batch, device):
    """They are nearly as near to float32 without it; only on a GPU does autocast take layer norms to float32."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    features = []
    for dtype, autocast in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        model = policy(dtype=dtype)
        model.model.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            images = model.encode_images(
                batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes
            )
        assert images.vision.dtype == images.sam[0].dtype == dtype
        features.append([images.vision, *images.sam])
    for exact, without, within in zip(*features, strict=True):
        errors = [(found.float() - exact).norm() / exact.norm() for found in (without, within)]
        print(f"relative error without autocast {errors[0]:.5f}, with it {errors[1]:.5f}")
        assert 0 < errors[0] < 1.25 * errors[1] < 0.01


def test_no_dropout_is_on(model):
    """Sampling and scoring are one distribution: lora_dropout is recorded in the adapter but never drops."""
    assert not any(
        module.training for module in model.model.modules() if isinstance(module, torch.nn.Dropout)
    )


BOTH = ["mask_caption_mask", "caption_mask_caption"]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "lora mlp1 text_hidden_fcs sam2"),
        (dict(mask_loss_coef=0), "lora mlp1 text_hidden_fcs"),
        (dict(mask_sigma=0), "lora mlp1 text_hidden_fcs sam2"),
        (dict(mask_sigma=0, mask_loss_coef=0), "lora mlp1"),
        (dict(caption_to_mask_weight=0), "lora mlp1"),
        (dict(tasks=BOTH[:1]), "lora mlp1"),
        (dict(tasks=BOTH[1:]), "lora mlp1 text_hidden_fcs sam2"),
    ],
)
def test_groups_follow_the_flags(changes, expected):
    args = SimpleNamespace(
        **(
            dict(tasks=BOTH, mask_loss_coef=0.1, mask_sigma=0.3, caption_to_mask_weight=1.0)
            | changes
        )
    )
    assert trainable_groups(args) == tuple(expected.split())


# One view of image and region for all roles


@pytest.mark.parametrize("max_tiles", [1, 6])
def test_teacher_sees_the_policys_tiles_and_region(policy, prepare, scenes, monkeypatch, max_tiles):
    """A region of 3 x 3 pixels still has its cell, in grid and text, in the policy's prompt and in the teacher's."""
    model = policy(max_tiles=max_tiles)
    mask = scenes[0]["mask"] & False
    mask[101:104, 65:68] = True
    batch = prepare([scenes[0] | dict(mask=mask), scenes[1]], model.processor)
    assert batch.inputs.grids.flatten(1).sum(1)[0] == 1
    images = model.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    seen, embed = [], model.embed

    def noted(images, prompts, num_tokens=0):
        seen.append((images, prompts))
        return embed(images, prompts, num_tokens)

    monkeypatch.setattr(model, "embed", noted)
    task = MaskCaptionMask(
        model,
        Roles(model.trainable),
        SimpleNamespace(
            mask_to_caption_weight=1.0,
            max_completion_length=2,
            use_llm_judge=False,
            teacher_answer="forced",
        ),
    )
    own = task.prompts(batch, images)
    describe(model, batch, images, [0, 1], batch.masks, 2)
    ((teacher_images, teachers),) = seen
    assert teacher_images is images and teachers.ids == own.ids and teachers.image == own.image
    assert all(map(torch.equal, teachers.grids, own.grids))
    for ids, grid, tiles in zip(own.ids, own.grids, images.tiles):
        assert ids.count(model.model.img_context_id) == 64 * tiles + int(grid.sum()) and grid.any()
    assert images.tiles == [len(p) for p in batch.inputs.pixel_values] and (
        max(images.tiles) > 1
    ) == (max_tiles > 1)


def test_an_empty_mask_is_not_described(model, images, batch):
    assert describe(model, batch, images, [0], [batch.masks[0] & False], 4) == [""]


def test_pad_left():
    ids, mask = pad_left([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_prompts_repeat_by_row_index():
    prompts = Prompts([[1], [2]], [0, 1], None).repeat(3)
    assert prompts.ids == [[1], [1], [1], [2], [2], [2]] and prompts.image == [0, 0, 0, 1, 1, 1]
