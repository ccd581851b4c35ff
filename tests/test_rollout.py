"""The random numbers of a rollout, the sampled prompt embeddings, their spread, and the likelihood of a caption."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train import parts, rollout
from rl_train.engine import Completions
from rl_train.rewards import mask_iou
from rl_train.roles import Roles
from rl_train.rollout import (
    SIGMA_IOU,
    answer,
    calibrate_sigma,
    caption_likelihood,
    noise,
    sample,
    segment,
    segment_sampled,
)
from rl_train.tasks import CaptionMaskCaption, MaskCaptionMask
from sa2va_hf.processing_sa2va import region_grid
from tools.demo_scenes import make_scene

STEPS = 14


# Random numbers


def test_every_row_and_token_has_numbers_of_its_own():
    uniforms, normals = noise(0, 3, 1, list(range(100)), 5, 6, 16)
    assert uniforms.shape == (500, 6) and normals.shape == (500, 6, 16)
    assert len(uniforms.unique()) == uniforms.numel() and 0 <= uniforms.min() and uniforms.max() < 1
    assert (
        abs(uniforms.mean() - 0.5) < 0.02
        and abs(normals.mean()) < 0.02
        and abs(normals.std() - 1) < 0.02
    )
    for numbers in (
        uniforms.view(100, 5, -1),
        normals.view(100, 5, -1),
    ):  # of generations, over samples
        correlation = torch.corrcoef(numbers.transpose(0, 1).flatten(1).double())
        assert (correlation - torch.eye(5)).abs().max() < 0.15


def test_a_rows_numbers_are_its_own():
    """Whatever else is in the batch, and however many generations follow."""
    together, alone = noise(0, 3, 1, [7, 2, 9], 4, 6, 16), noise(0, 3, 1, [2], 4, 6, 16)
    for many, one in zip(together, alone):
        assert torch.equal(many[4:8], one)
    for many, few in zip(alone, noise(0, 3, 1, [2], 3, 6, 16)):
        assert torch.equal(many[:3], few)
    for seed, step, task, sample_index in ((1, 3, 1, 2), (0, 4, 1, 2), (0, 3, 0, 2), (0, 3, 1, 3)):
        other = noise(seed, step, task, [sample_index], 4, 6, 16)
        assert not any(torch.equal(a, b) for a, b in zip(alone, other))
    assert (
        torch.equal(noise(0, 3, 1, [2], 4, 6, 0)[0], alone[0])
        and noise(0, 3, 1, [2], 4, 6, 0)[1] is None
    )


def test_a_row_uses_its_normals_by_ordinal(model, images, batch, monkeypatch):
    """The k-th [SEG] of a row its k-th normals, wherever the row's words put it."""
    seg, word = model.model.seg_id, 5
    rows = [
        [seg, word, word, seg, word],
        [word, seg, seg, word, word],
        [word, word, word, word, seg],
        [word, word, word, seg, word],
    ]
    ids = torch.tensor(rows)
    hidden = torch.randn(
        4, 5, model.model.config.llm.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    every = torch.ones(4, 5, dtype=torch.bool)
    monkeypatch.setattr(
        model.engine,
        "generate",
        lambda *_, **__: Completions(ids, torch.zeros(4, 5), every, every[:, 0], hidden),
    )
    random = noise(0, 0, 1, [0, 1], 2, 5, model.model.config.prompt_size)
    drawn = sample(
        model,
        batch,
        images,
        model.segment_prompts(images, [0, 1], batch.captions[:2]),
        2,
        5,
        random,
        0.5,
    )
    assert drawn.seg_rows.tolist() == [
        0,
        0,
        1,
        1,
        3,
    ]  # row 2's [SEG] is its last token and has no hidden state
    normals = random[1]
    expected = torch.stack(
        [normals[0, 0], normals[0, 1], normals[1, 0], normals[1, 1], normals[3, 0]]
    )
    torch.testing.assert_close(drawn.latent.offset, 0.5 * expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.latent.z, drawn.seg_means + 0.5 * expected)
    assert drawn.latent.sigma == 0.5


# The teacher's mask, by a forced and by its own answer


def all_equal(masks, others) -> bool:
    return len(masks) == len(others) > 0 and all(map(torch.equal, masks, others))


def silenced(policy):
    """A policy that does not come to say [SEG]."""
    model = policy()
    model.model.language_model.lm_head.weight.data[model.model.seg_id] = 0
    return model


def test_a_teacher_that_says_what_is_forced_finds_the_same(model, images, batch, monkeypatch):
    """In chunks of rows, which meet neither an image's end nor the end of the list; the same when asked again."""
    monkeypatch.setattr(rollout, "TEACHER_ROWS", 3)
    image = [0, 1, 1, 2, 3, 0, 3]
    captions = [
        *(batch.captions[i] for i in image[:5]),
        "a dog",
        "the largest object of all on this picture",
    ]
    assert set(answer(model, batch, images, image, captions, STEPS).texts) == {"Sure, [SEG]."}
    found = segment_sampled(model, batch, images, image, captions, STEPS)
    assert [mask.shape for mask in found] == [images.sizes[i] for i in image] and all(
        mask.any() for mask in found
    )
    assert all_equal(found, segment(model, images, image, captions))
    assert all_equal(found, segment_sampled(model, batch, images, image, captions, STEPS))
    assert not torch.equal(found[0], found[5])  # one image, two captions
    assert segment_sampled(model, batch, images, [], [], STEPS) == []


def test_a_mask_is_the_union_of_what_the_teacher_says(model, images, batch, monkeypatch):
    """Its own tokens decide, not the forced ones: two [SEG] in row 0, one in row 1, none in row 2."""
    seg, word = model.model.seg_id, 5
    ids = torch.tensor([[word, seg, seg, word], [word, word, seg, word], [word] * 4])
    hidden = 3 * torch.randn(
        3, 4, model.model.config.llm.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    every = torch.ones(3, 4, dtype=torch.bool)
    monkeypatch.setattr(
        model.engine,
        "generate",
        lambda *_, **__: Completions(ids, torch.zeros(3, 4), every, every[:, 0], hidden),
    )
    found = segment_sampled(model, batch, images, [0, 0, 0], batch.captions[:3], 4)
    with torch.no_grad():
        prompts = model.model.text_hidden_fcs(
            torch.stack([hidden[0, 1], hidden[0, 2], hidden[1, 2]])
        )
    first, second, third = rollout.row_masks(model, images, [0, 0, 0], [0, 1, 2], prompts)
    assert all_equal(found, [first | second, third, first & False]) and not all_equal(
        [first], [second]
    )


@pytest.mark.parametrize("how", ["forced", "sampled"])
def test_loop_1_asks_the_teacher_as_the_flag_says(policy, batch, how):
    """With other weights in the teacher's bank the masks are those weights'; where nobody says [SEG], only a forced answer finds."""

    def drawn_by(model, scale):
        args = SimpleNamespace(
            use_llm_judge=False,
            mask_to_caption_weight=1.0,
            max_completion_length=STEPS,
            teacher_answer=how,
        )
        roles = Roles(model.trainable)
        task = MaskCaptionMask(model, roles, args)
        images = model.encode_images(
            batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes
        )
        drawn = sample(
            model,
            batch,
            images,
            task.prompts(batch, images),
            2,
            STEPS,
            noise(0, 0, 0, [0, 1, 2, 3], 2, STEPS, 0),
        )
        drawn.texts[3] = " "  # is not asked about
        for tensor in roles.banks["teacher"].values():
            tensor.mul_(scale)
        return drawn, roles, task.rewards(drawn)["iou"]

    model = policy()
    drawn, roles, rewards = drawn_by(model, 1.2)
    rows = [row for row in range(8) if row != 3]
    inputs = drawn.images, [row // 2 for row in rows], [drawn.texts[row] for row in rows]
    policys = segment(model, *inputs)
    with roles.use("teacher"):
        teachers = (
            segment(model, *inputs)
            if how == "forced"
            else segment_sampled(model, batch, *inputs, STEPS)
        )
    assert all_equal([drawn.masks[row] for row in rows], teachers) and not all_equal(
        teachers, policys
    )
    assert not drawn.masks[3].any() and rewards[3] == 0 and rewards.max() > 0
    _, _, rewards = drawn_by(silenced(policy), 1)
    assert (rewards.max() > 0) == (how == "forced")


# The likelihood of a caption


@torch.no_grad()
def by_hand(model, images, image: int, mask, caption: str) -> float:
    """exp of the mean log-prob of one caption, by a forward of its own without padding."""
    grid = region_grid(
        mask[None], model.processor.grid_size, model.processor.image_size, model.processor.rule
    )[0]
    ids = torch.tensor([model.tokenizer.encode(caption + "<|end|>", add_special_tokens=False)])
    logp = model.score(
        images,
        model.describe_prompts(images, [image], [grid]),
        ids,
        torch.ones_like(ids, dtype=torch.bool),
    ).logp
    return logp.mean().exp().item()


@pytest.mark.parametrize("kernels", [False, True])
def test_likelihood_by_hand(model, images, batch, kernels, monkeypatch):
    """Ragged captions and prompts, an empty mask between them, an image twice; however many rows a forward holds."""
    if kernels:  # as on a GPU, where neighbours share their image's forward
        monkeypatch.setattr(model.engine, "fast_on", ("cpu",))
    image, captions = (
        [0, 1, 1, 2, 3],
        [
            "Dog.",
            *batch.captions[1:2] * 2,
            batch.captions[2] + " It has no stripes.",
            batch.captions[3],
        ],
    )
    masks = [batch.masks[i] for i in image]
    masks[2] = torch.zeros_like(masks[2])
    expected = [
        by_hand(model, images, i, m, c) if m.any() else 0.0
        for i, m, c in zip(image, masks, captions)
    ]
    for size in (1, 2, 32):
        monkeypatch.setattr(rollout, "TEACHER_ROWS", size)
        found = caption_likelihood(model, images, image, masks, captions, 64)
        assert found.dtype == torch.float32 and found.tolist() == pytest.approx(
            expected, abs=1e-5
        ), size
    assert found[2] == 0 and all(0 < p < 1 for p in found[[0, 1, 3, 4]].tolist())


def test_masks_of_one_grid_are_exactly_equally_likely(policy, batch):
    """In bfloat16, where a forward's rounding depends on its rows: it must not look like a reward."""
    model = policy(dtype=torch.bfloat16)
    images = model.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    image = [0, 0, 0, 1, 1, 0, 1, 0]
    found = caption_likelihood(
        model,
        images,
        image,
        [batch.masks[i] for i in image],
        [batch.captions[i] for i in image],
        64,
    )
    assert (
        len({p.item() for p, i in zip(found, image) if i == 0})
        == len({p.item() for p, i in zip(found, image) if i == 1})
        == 1
    )
    other = caption_likelihood(
        model, images, [0, 0], [batch.masks[0], ~batch.masks[0]], [batch.captions[0]] * 2, 64
    )
    assert other[0] != other[1]


def test_only_the_first_tokens_of_a_long_caption_count(model, images, batch):
    ids = model.tokenizer.encode(batch.captions[0], add_special_tokens=False)
    cut, longer = (
        caption_likelihood(model, images, [0], batch.masks[:1], [caption], 5).item()
        for caption in (batch.captions[0], batch.captions[0] + " And more." * 500)
    )
    grid = region_grid(
        batch.masks[0][None],
        model.processor.grid_size,
        model.processor.image_size,
        model.processor.rule,
    )[0]
    with torch.no_grad():
        prompts, first = model.describe_prompts(images, [0], [grid]), torch.tensor([ids[:5]])
        logp = model.score(images, prompts, first, torch.ones_like(first, dtype=torch.bool)).logp
    assert cut == longer == pytest.approx(logp.mean().exp().item(), abs=1e-5)


def test_an_empty_mask_is_not_asked_about(model, images, batch, monkeypatch):
    monkeypatch.setattr(model, "read", None)
    empty = [torch.zeros_like(mask) for mask in batch.masks[:2]]
    assert caption_likelihood(model, images, [0, 1], empty, batch.captions[:2], 64).tolist() == [
        0,
        0,
    ]


def test_the_true_region_explains_its_caption_best(model, images, batch):
    """On average over the scenes, against the masks of the other objects of each."""
    true = caption_likelihood(model, images, [0, 1, 2, 3], batch.masks, batch.captions, 64)
    for i in range(4):
        scene = make_scene(0, 7, i)  # as the fixture `scenes` draws it
        masks = [torch.from_numpy(scene.objects[t].mask) for t in scene.targets]
        others = [mask for mask in masks if not torch.equal(mask, batch.masks[i])]
        assert 0 < len(others) == len(masks) - 1
        false = caption_likelihood(
            model, images, [i] * len(others), others, [batch.captions[i]] * len(others), 64
        ).mean()
        print(
            f"scene {i}: likelihood of the caption by its region {true[i]:.3f}, by others {false:.3f}"
        )
        true[i] -= false
    assert true.mean() > 0.05


def loop2_args(**changes):
    return SimpleNamespace(
        **dict(
            use_llm_judge_loop2=False,
            likelihood_share=0.5,
            caption_to_mask_weight=1.0,
            mask_sigma=0.5,
            max_completion_length=STEPS,
        )
        | changes
    )


def test_loop_2_asks_the_teacher(policy, batch):
    """Not the policy: with other weights in the teacher's bank the likelihood is those weights'."""
    model = policy()
    roles = Roles(model.trainable)
    task = CaptionMaskCaption(model, roles, loop2_args(max_completion_length=64))
    images = model.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    random = noise(0, 0, 1, [0, 1, 2, 3], 2, STEPS, model.model.config.prompt_size)
    drawn = sample(model, batch, images, task.prompts(batch, images), 2, STEPS, random, 0.5)

    def likelihoods():
        rows = [
            (drawn.prompts.image[row], mask, batch.captions[row // 2])
            for row, mask in enumerate(drawn.masks)
        ]
        return [by_hand(model, images, *row) if row[1].any() else 0.0 for row in rows]

    policys = likelihoods()
    for tensor in roles.banks["teacher"].values():
        tensor.mul_(1.2)
    with roles.use("teacher"):
        teachers = likelihoods()
    found = task.rewards(drawn)["likelihood"].tolist()
    assert (
        found == pytest.approx(teachers, abs=1e-5)
        and max(abs(a - b) for a, b in zip(found, policys)) > 1e-3
    )


@pytest.mark.parametrize(
    "share, alone, judged",
    [
        (0.0, {"meteor": 1.0}, {"meteor": 0.25, "judge": 0.75}),
        (
            0.5,
            {"meteor": 0.5, "likelihood": 0.5},
            {"meteor": 0.125, "judge": 0.375, "likelihood": 0.5},
        ),
        (1.0, {"likelihood": 1.0}, {"likelihood": 1.0}),
    ],
)
def test_weights_of_loop_2(share, alone, judged):
    for judge, expected in ((None, alone), (object(), judged)):
        args = loop2_args(likelihood_share=share, use_llm_judge_loop2=bool(judge))
        assert CaptionMaskCaption(None, None, args, judge).weights == expected


# --mask_sigma auto


def test_calibrated_masks_agree_as_they_should(model, images, batch):
    """At that sigma, under other noise, the mean IoU with the mask of the mean is .8. The scenes several times, with noise each time."""
    sigma = calibrate_sigma(
        model, [replace(batch, index=list(range(4 * k, 4 * k + 4))) for k in range(10)], STEPS
    )
    answers = sample(
        model,
        batch,
        images,
        model.segment_prompts(images, [0, 1, 2, 3], batch.captions),
        1,
        STEPS,
        None,
        0.0,
    )
    mean, image = answers.seg_means, answers.seg_rows.tolist()

    def agreement(sigma, samples=64):
        generator = torch.Generator().manual_seed(123)
        plain = model.decode_masks(images, image, mean) > 0
        return (
            torch.cat(
                [
                    mask_iou(
                        model.decode_masks(
                            images,
                            image,
                            mean + sigma * torch.randn(mean.shape, generator=generator),
                        )
                        > 0,
                        plain,
                        1.0,
                    )
                    for _ in range(samples)
                ]
            )
            .mean()
            .item()
        )

    found = agreement(sigma)
    print(
        f"sigma {sigma:.3f}: IoU {found:.3f}; of half and twice of it {agreement(sigma / 2):.3f}, {agreement(2 * sigma):.3f}"
    )
    assert found == pytest.approx(SIGMA_IOU, abs=0.05)
    assert (
        agreement(sigma / 2) > 0.85 and agreement(2 * sigma) < 0.75
    )  # so that .8 is said about this sigma


def test_calibration_needs_a_mask(model, batch, monkeypatch):
    monkeypatch.setattr(model, "seg_tokens", lambda ids, valid: torch.zeros_like(valid))
    with pytest.raises(ValueError, match="--mask_sigma auto"):
        calibrate_sigma(model, [batch], STEPS)


def test_sigma_is_the_same_number_whatever_the_batch(policy, scenes):
    def found(seed=0, **changes):
        flags = dict(
            mask_sigma="auto",
            tasks=["caption_mask_caption"],
            caption_to_mask_weight=1.0,
            batch_size=2,
            max_completion_length=STEPS,
        )
        return parts.mask_sigma(policy(seed=seed), scenes, Namespace(**flags | changes))

    first = found()
    assert 0 < first < 100
    assert found(seed=1) == first  # a fresh LoRA adds nothing
    assert (
        found(batch_size=1) == pytest.approx(first, rel=0.02) == found(batch_size=4)
    )  # of ranks: one step of the bisection
    assert found(mask_sigma=0.3) == 0.3
    assert (
        found(tasks=["mask_caption_mask"]) is found(caption_to_mask_weight=0.0) is None
    )  # nothing to draw


def test_a_resumed_run_keeps_its_sigma(tmp_path):
    """Whatever the base would give on this machine: neither model nor data are asked."""
    (tmp_path / "config.json").write_text('{"calibrated_mask_sigma": 1.25}')
    args = Namespace(mask_sigma="auto", tasks=["caption_mask_caption"], caption_to_mask_weight=1.0)
    assert parts.mask_sigma(None, None, args, tmp_path) == 1.25


def test_masks_that_sigma_does_not_move_cannot_calibrate_it(model, batch, monkeypatch):
    """Two empty masks agree: without a complaint the largest sigma would pass for the right one."""
    monkeypatch.setattr(
        model, "decode_masks", lambda images, image, z: torch.full((len(z), 8, 8), -1.0)
    )
    with pytest.raises(
        ValueError, match="--mask_sigma auto: sampled masks have an IoU of 1.00 to 1.00"
    ):
        calibrate_sigma(model, [batch], STEPS)
