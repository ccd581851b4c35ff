"""The noise of loop 2: its covariance, and --latent_std auto, at which masks agree by half."""

from dataclasses import replace

import pytest
import torch

from rl_train.data.loader import eval_loader
from rl_train.rewards import mask_iou
from rl_train.tasks.latent_noise import (
    SHRINKAGE,
    SIGMA_IOU,
    calibrate_sigma,
    collect_calibration,
    correlated_noise,
    covariance_factor,
)
from tests.updates import STEPS, task_of


def test_covariance_by_hand():
    """All variance of (2, 0) and (0, 0) lies in the first direction, whatever its scale."""
    two = torch.tensor([[2.0, 0], [0, 0]])
    factor = covariance_factor(two)
    expected = (1 - SHRINKAGE) * torch.diag(torch.tensor([2.0, 0])) + SHRINKAGE * torch.eye(2)
    torch.testing.assert_close(factor @ factor.T, expected)
    torch.testing.assert_close(covariance_factor(100 * two + 7), factor)
    assert covariance_factor(two[:1]) is None is covariance_factor(torch.ones(3, 2))


@pytest.mark.parametrize("n", [2, 32])
def test_few_embeddings_of_the_real_width_are_well_conditioned(n):
    """256 dimensions, bfloat16 numbers far from 0: mean variance 1, none below SHRINKAGE."""
    generator = torch.Generator().manual_seed(0)
    factor = covariance_factor((30 + torch.randn(n, 256, generator=generator)).bfloat16())
    variances = torch.linalg.eigvalsh((factor @ factor.T).double())
    assert factor.dtype == torch.float32 and torch.equal(factor, factor.tril())
    assert variances.mean().item() == pytest.approx(1, abs=1e-4)
    assert SHRINKAGE - 1e-4 < variances[0] and variances[-1] < 256


def test_noise_has_the_embeddings_covariance():
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(6, 4, generator=generator) @ torch.randn(4, 4, generator=generator)
    factor, normal = covariance_factor(embeddings), torch.randn(40000, 4, generator=generator)
    drawn = correlated_noise(normal, factor)
    covariance = torch.cov(embeddings.T)
    shrunk = (1 - SHRINKAGE) * covariance / covariance.diagonal().mean() + SHRINKAGE * torch.eye(4)
    torch.testing.assert_close(torch.cov(drawn.T), shrunk, atol=0.06, rtol=0)
    assert correlated_noise(normal, None) is normal


def test_calibrated_masks_agree_as_they_should(model, images, batch):
    """The mean IoU with the mask of the mean is .5 at that sigma, under other noise.

    The scenes several times, with noise each time.
    """
    batches = [replace(batch, index=list(range(4 * k, 4 * k + 4))) for k in range(10)]
    asked = collect_calibration(model, batches, STEPS)
    factor = covariance_factor(torch.cat([one.embeddings for one in asked]))
    sigma = calibrate_sigma(asked, factor)
    prompts = model.segment_prompts(images, [0, 1, 2, 3], batch.captions)
    rows, mean = model.mask_embeddings(model.sample(batch, images, prompts, 1, STEPS))
    image = rows.tolist()

    def agreement(sigma, samples=64):
        generator = torch.Generator().manual_seed(123)
        plain = model.decode_masks(images, image, mean) > 0
        ious = []
        for _ in range(samples):
            z = mean + sigma * correlated_noise(
                torch.randn(mean.shape, generator=generator), factor
            )
            ious.append(mask_iou(model.decode_masks(images, image, z) > 0, plain, 1.0))
        return torch.cat(ious).mean().item()

    with torch.no_grad():
        found, half, twice = (agreement(k * sigma) for k in (1, 0.5, 2))
    print(f"sigma {sigma:.3f}: IoU {found:.3f}; of half and twice of it {half:.3f}, {twice:.3f}")
    assert found == pytest.approx(SIGMA_IOU, abs=0.06)
    assert half > SIGMA_IOU + 0.1 and twice < SIGMA_IOU - 0.1  # so that it is said of this sigma


def test_calibration_needs_a_mask(model, batch, monkeypatch):
    """But a sigma that is given is kept, and the same in all directions."""
    monkeypatch.setattr(model, "seg_tokens", lambda ids, valid: torch.zeros_like(valid))
    with pytest.raises(ValueError, match="--latent_std auto: no caption was answered"):
        task_of(model, 2, latent_std="auto").action.calibrate([batch], STEPS)
    action = task_of(model, 2, latent_std=0.5).action
    action.calibrate([batch], STEPS)
    assert action.state_dict() == dict(sigma=0.5, factor=None)


def test_the_noise_is_the_same_whatever_the_batch(policy, scenes):
    def found(seed=0, batch_size=2, latent_std="auto"):
        model = policy(seed=seed)
        tasks = [task_of(model, 1), task_of(model, 2, latent_std=latent_std)]
        loader = eval_loader(scenes, model.preprocessor(STEPS), batch_size, 0)
        tasks[1].action.calibrate(loader, STEPS)
        assert tasks[0].action is None  # nothing to draw
        return tasks[1].action.sigma, tasks[1].action.factor

    first, factor = found()
    assert 0 < first < 100 and factor is not None
    again = found(seed=1)  # a fresh LoRA adds nothing
    assert again[0] == first and torch.equal(again[1], factor)
    for size in (1, 4):  # of ranks: one step of the bisection
        sigma, other = found(batch_size=size)
        assert sigma == pytest.approx(first, rel=0.02)
        torch.testing.assert_close(other, factor, atol=1e-3, rtol=0)
    sigma, other = found(latent_std=0.3)
    assert sigma == 0.3 and torch.equal(other, factor)


def test_masks_that_sigma_does_not_move_cannot_calibrate_it(model, batch, monkeypatch):
    """Two empty masks agree: without a complaint the largest sigma would pass for the right one."""
    monkeypatch.setattr(
        model, "decode_masks", lambda images, image, z: torch.full((len(z), 8, 8), -1.0)
    )
    with pytest.raises(
        ValueError, match="--latent_std auto: sampled masks have an IoU of 1.00 to 1.00"
    ):
        calibrate_sigma(collect_calibration(model, [batch], STEPS), None)
