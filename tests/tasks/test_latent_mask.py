"""The sampled mask of loop 2: what is drawn, its policy term and its supervised one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train.config.grpo_config import LossConfig
from rl_train.loss import ReferenceScores
from rl_train.rewards.iou import mask_spread
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks import latent_mask
from rl_train.tasks.latent_mask import LatentMaskAction, SampledLatents, latent_loss
from rl_train.tasks.latent_noise import covariance_factor
from rl_train.utils.rng import RowRNG
from sa2va_hf.losses import mask_loss
from tests.updates import (
    ADVANTAGES,
    SIGMA,
    backward,
    moved_policy,
    reached,
    roll,
    task_of,
    work_of,
)

model = pytest.fixture(scope="module")(moved_policy)


@pytest.fixture(scope="module")
def rollout(scenes, prepare, model):
    """4 rows about the first two scenes."""
    two = prepare(scenes[:2], model.processor)
    return roll(model, task_of(model, 2), two)


# What is drawn


def test_a_row_uses_its_normals_by_ordinal(model, images, batch):
    """The k-th [SEG] of a row its k-th normals, wherever the row's words put it."""
    seg, word, D = model.model.seg_id, 5, model.model.config.prompt_size
    words = [
        [seg, word, word, seg, word],
        [word, seg, seg, word, word],
        [word, word, word, word, seg],
        [word, word, word, seg, word],
    ]
    ids, every = torch.tensor(words), torch.ones(4, 5, dtype=torch.bool)
    width, generator = model.model.config.llm.hidden_size, torch.Generator().manual_seed(0)
    rollout = Rollout(
        batch,
        images,
        model.segment_prompts(images, [0, 1], batch.captions[:2]).repeat(2),
        texts=["said"] * 4,
        num_generations=2,
        ids=ids,
        logp=torch.zeros(4, 5),
        valid=every,
        stopped=every[:, 0],
        hidden=torch.randn(4, 5, width, generator=generator),
    )
    draws, same = (RowRNG(0, 0, 1, [0, 1], 2) for _ in range(2))
    for one in (draws, same):
        one.uniforms(5)
    drawn = LatentMaskAction(model, 0.5, 0.0).draw(rollout, draws)
    # Row 2's [SEG] is its last token and has no hidden state.
    assert drawn.rows.tolist() == [0, 0, 1, 1, 3]
    normals = {row: same.normals([row] * 2, D) for row in range(4)}
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)]
    expected = torch.stack([normals[row][k] for row, k in places])
    torch.testing.assert_close(drawn.noise, 0.5 * expected, atol=1e-5, rtol=0)
    rows, mean = model.mask_embeddings(rollout)
    assert torch.equal(rows, drawn.rows)
    torch.testing.assert_close(drawn.z, mean + 0.5 * expected)
    assert len(drawn.masks) == 4 and not drawn.masks[2].any()
    assert [mask.shape for mask in drawn.masks] == [images.sizes[i] for i in (0, 0, 1, 1)]


def test_without_sigma_the_mean_itself_is_drawn_and_no_number(model, rollout):
    draws = RowRNG(0, 0, 1, [0, 1], 2)
    drawn = LatentMaskAction(model, 0.0, 0.1).draw(rollout, draws)
    assert torch.equal(drawn.z, model.mask_embeddings(rollout)[1]) and drawn.logp is None
    assert not drawn.noise.any()
    assert torch.equal(draws.uniforms(1), RowRNG(0, 0, 1, [0, 1], 2).uniforms(1))


def test_spread_by_hand(model):
    """1 - IoU of pairs: of 4 and 2 of 4 pixels 1/2, with an empty one 1, of two empty ones 0."""
    whole, half, none = torch.ones(2, 2) > 0, torch.tensor([[1, 1], [0, 0]]) > 0, torch.zeros(2, 2)
    none = none > 0
    assert mask_spread(torch.stack([whole, half])) == pytest.approx(0.5)
    assert mask_spread(torch.stack([none, none])) == 0 == mask_spread(torch.stack([half, half]))
    assert mask_spread(torch.stack([whole, half, none])) == pytest.approx((0.5 + 1 + 1) / 3)
    drawn = SampledLatents(torch.tensor([0, 0, 3]), [], None, None, None)
    ids = torch.full((4, 12), 5)
    ids[2, :10] = model.model.seg_id  # of which 8 are decoded
    said = dict(ids=ids, logp=None, valid=ids > 0, stopped=None, hidden=None, latents=drawn)
    batch = Batch([0, 1], [half, half], [], [], [], None)
    rollout = Rollout(batch, *[None] * 2, ["a"] * 4, 2, **said)
    curves = LatentMaskAction(model, 0.5, 0.0).metrics(
        rollout, RewardOutput({}, [whole, half, none, none])
    )
    shares = dict(no_seg_frac=(2, 4), capped_frac=(1, 4))
    assert curves == dict(mask_spread=(0.5, 2), latent_std=(0.5, 1)) | shares
    # Of two objects the first group finds one twice, the second both, if none is no object.
    batch.distractors = [~half[None], ~half[None]]
    action = LatentMaskAction(model, 0.0, 0.0)
    for masks, differ in (([half, none, half, ~half], 1), ([half, ~half, ~half, half], 2)):
        assert action.metrics(rollout, RewardOutput({}, masks))["objects_frac"] == (differ, 2)


# The policy term


def test_the_latent_term_points_to_the_better_mask(rollout):
    """Its gradient by the mean of a [SEG] is -A (z - mean) / (sigma^2 D) / M.

    Good samples attract, bad ones repel.
    """
    drawn = rollout.latents
    mean = (drawn.z - drawn.noise).clone().requires_grad_()
    m, d = mean.shape
    a, every = ADVANTAGES[drawn.rows], torch.ones(m, dtype=torch.bool)

    def term(reference):
        how = dict(sigma=SIGMA, clip_range=0.2, kl_coef=0.5, num_actions=m)
        return latent_loss(mean, drawn.z, drawn.logp, reference, a, every, **how)

    loss, sums = term(mean.detach())
    loss.backward()
    expected = -a[:, None] * drawn.noise / (SIGMA**2 * d * m)
    torch.testing.assert_close(mean.grad, expected, atol=1e-6, rtol=1e-3)
    assert sums["latent_joint_kl"] == (0, m) and sums["latent_clip_frac"] == (0, m)
    # a reference 2 sigma off in every dimension: KL 4 / 2 for each dimension of each of the M
    far, sums = term(mean.detach() + 2 * SIGMA)
    assert sums["latent_joint_kl"][0].item() == pytest.approx(2 * d * m, rel=1e-4)
    assert far.item() == pytest.approx(loss.item() + 0.5 * 2, rel=1e-4)


def test_a_covariance_turns_the_noise_not_the_gradient_along_it(model, rollout):
    """z is mean + sigma L eps, its ratio 1 when drawn; the gradient is as above, along z - mean."""
    D, (draws, same) = (
        model.model.config.prompt_size,
        (RowRNG(0, 0, 1, [0, 1], 2) for _ in range(2)),
    )
    action = LatentMaskAction(model, SIGMA, 0.0)
    action.factor = covariance_factor(torch.randn(3, D, generator=torch.Generator().manual_seed(0)))
    drawn = action.draw(rollout, draws)
    noise = same.normals(drawn.rows.tolist(), D)
    torch.testing.assert_close(drawn.noise, SIGMA * noise @ action.factor.T, atol=1e-5, rtol=0)
    mean = model.mask_embeddings(rollout)[1].requires_grad_()
    m, a = len(mean), ADVANTAGES[drawn.rows]
    how = dict(sigma=SIGMA, factor=action.factor, clip_range=0.2, kl_coef=0.5, num_actions=m)
    reference = mean.detach() + SIGMA * action.factor.sum(1)  # 1 in each whitened dimension
    every = torch.ones(m, dtype=torch.bool)
    loss, sums = latent_loss(mean, drawn.z, drawn.logp, reference, a, every, **how)
    assert loss.item() == pytest.approx(-a.mean().item() + 0.5 * 0.5, rel=1e-4)
    assert sums["latent_joint_kl"][0].item() == pytest.approx(0.5 * D * m, rel=1e-3)
    loss.backward()
    pull = -a[:, None] * drawn.noise + 0.5 * (mean.detach() - reference)
    torch.testing.assert_close(mean.grad, pull / (SIGMA**2 * D * m), atol=1e-5, rtol=1e-2)


def test_the_latent_has_a_window_of_its_own(model, rollout, monkeypatch):
    """A ratio of exp(-.1), inside the text's window; a reference 1 sigma off, KL 1 / 2."""
    drawn = rollout.latents
    later = replace(rollout, latents=replace(drawn, logp=drawn.logp + 0.1))
    reference = ReferenceScores(rollout.logp, model.mask_embeddings(rollout)[1] + SIGMA)
    num_bad = int((ADVANTAGES[drawn.rows] < 0).sum())
    assert 0 < num_bad < len(drawn.rows)
    losses = {}
    for clip_range, kl_coef, clipped in ((0.2, 0.5, 0), (0.05, 0.5, num_bad), (0.2, 1.5, 0)):
        monkeypatch.setattr(latent_mask, "CLIP_RANGE", clip_range)
        work = work_of(model, task_of(model, 2), later, reference=reference)
        config = LossConfig(kl_coef=kl_coef, clip_range=0.01)
        _, sums, _ = backward(model, work, config)
        losses[clip_range, kl_coef] = sums["latent_loss"]
        assert sums["latent_clip_frac"] == (clipped, len(drawn.rows))
    more = losses[0.2, 1.5] - losses[0.2, 0.5]
    assert more == pytest.approx(1.0 * 0.5, rel=1e-2)


def test_rows_without_a_mask_have_no_mask_terms(model, rollout):
    """A micro-batch in which no row said [SEG] still gives a loss."""
    ids = rollout.ids.clone()
    ids[ids == model.model.seg_id] = 5
    empty = torch.zeros(0, model.model.config.prompt_size)
    action = SampledLatents(torch.zeros(0, dtype=torch.long), [], empty, empty, torch.zeros(0))
    silent = replace(rollout, ids=ids, latents=action)
    task = task_of(model, 2, mask_loss_coef=0.1)
    grads, sums, loss = backward(model, work_of(model, task, silent))
    assert sums["latent_loss"] == sums["mask_loss"] == 0 and sums["latent_joint_kl"] == (0, 0)
    assert loss == loss and sums["loss"] == sums["policy_loss"] == pytest.approx(loss, abs=1e-7)
    assert reached(model, grads) == {"lora", "mlp1"}


def test_what_the_reference_says_of_the_action(model, rollout):
    """The means under the weights in use, row by row: by micro-batches the same as at once."""
    task = task_of(model, 2)
    with torch.no_grad():
        rows = [slice(0, 1), slice(1, 4)]
        parts = [task.action.distribution_params(rollout, r, model.score(rollout, r)) for r in rows]
    sampled = model.mask_embeddings(rollout)[1]
    torch.testing.assert_close(torch.cat(parts), sampled, atol=1e-3, rtol=0)


# The mask term


def test_every_sam2_weight_that_trains_can_get_a_gradient(model, rollout):
    """All but the hypernetworks of mask tokens that did not win here."""
    task = task_of(model, 2, mask_loss_coef=1.0)
    grads, _, _ = backward(model, work_of(model, task, rollout, torch.zeros(4)))
    silent = {n for n, g in grads.items() if model.group_of[n] == "sam2" and g.abs().max() == 0}
    assert {
        n.split("output_hypernetworks_mlps.")[-1].split(".")[0]
        for n in silent
        if "hypernetworks" in n
    } < {"1", "2", "3"}
    assert not {n for n in silent if "hypernetworks" not in n}


def test_the_mask_term_is_of_the_sampled_masks(model, rollout):
    """Those that the rollout was scored on, not those of the mean."""
    drawn = rollout.latents
    image = [rollout.prompts.image_index[row] for row in drawn.rows.tolist()]
    targets = [rollout.batch.masks[i] for i in image]
    with torch.no_grad():
        of_drawn, of_mean = (
            mask_loss(model.decode_masks(rollout.features, image, z), targets).mean().item()
            for z in (drawn.z, drawn.z - drawn.noise)
        )
    task = task_of(model, 2, mask_loss_coef=0.5)
    _, sums, loss = backward(model, work_of(model, task, rollout, torch.zeros(4)))
    assert sums["mask_loss"] == pytest.approx(of_drawn, rel=1e-3)
    assert abs(of_drawn - of_mean) > 5e-3 * of_drawn
    assert loss == pytest.approx(0.5 * of_drawn, rel=1e-3)


def test_a_row_without_reward_has_neither_term(model, rollout):
    """The terms of the scored rows alone, divided by their [SEG]."""
    scored, task = torch.tensor([True, False, True, True]), task_of(model, 2, mask_loss_coef=1.0)
    reference = ReferenceScores(rollout.logp, model.mask_embeddings(rollout)[1] + SIGMA)
    work = work_of(model, task, rollout, torch.zeros(4), scored, reference)
    _, sums, _ = backward(model, work, LossConfig(kl_coef=0.5))
    drawn = rollout.latents
    kept = scored[drawn.rows]
    total, count = sums["latent_joint_kl"]
    assert count == kept.sum() < len(drawn.rows)
    dimensions = drawn.z.shape[1]
    assert total / dimensions == pytest.approx(0.5 * kept.sum().item(), rel=1e-2)
    image = [rollout.prompts.image_index[row] for row in drawn.rows[kept].tolist()]
    with torch.no_grad():
        logits = model.decode_masks(rollout.features, image, drawn.z[kept])
    expected = mask_loss(logits, [rollout.batch.masks[i] for i in image]).mean().item()
    assert sums["mask_loss"] == pytest.approx(expected, rel=1e-3)


def test_its_state_is_the_noise():
    policy = SimpleNamespace(device=torch.device("cpu"))
    action, other = LatentMaskAction(policy, 1.25, 0.1), LatentMaskAction(policy, "auto", 0.1)
    action.factor = torch.eye(3)
    other.load_state_dict(action.state_dict())
    assert other.sigma == 1.25 and torch.equal(other.factor, torch.eye(3))


def test_without_noise_nothing_is_calibrated():
    action = LatentMaskAction(None, 0.0, 0.1)
    action.calibrate(SimpleNamespace(), 8)  # neither model nor data are asked
    assert action.state_dict() == dict(sigma=0.0, factor=None)
