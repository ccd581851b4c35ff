"""--mask_sigma auto: the sigma whose masks have a mean IoU of .8 with the mask of the mean."""

from dataclasses import replace

import pytest
import torch

from rl_train.data.loader import eval_loader
from rl_train.rewards import mask_iou
from rl_train.tasks.sampled_mask import SIGMA_IOU, calibrate_sigma
from tests.updates import STEPS, task_of


def test_calibrated_masks_agree_as_they_should(model, images, batch):
    """At that sigma, under other noise, the mean IoU with the mask of the mean is .8.

    The scenes several times, with noise each time.
    """
    batches = [replace(batch, index=list(range(4 * k, 4 * k + 4))) for k in range(10)]
    sigma = calibrate_sigma(model, batches, STEPS)
    prompts = model.segment_prompts(images, [0, 1, 2, 3], batch.captions)
    rows, mean = model.mask_embeddings(model.sample(batch, images, prompts, 1, STEPS))
    image = rows.tolist()

    def agreement(sigma, samples=64):
        generator = torch.Generator().manual_seed(123)
        plain = model.decode_masks(images, image, mean) > 0
        ious = []
        for _ in range(samples):
            z = mean + sigma * torch.randn(mean.shape, generator=generator)
            ious.append(mask_iou(model.decode_masks(images, image, z) > 0, plain, 1.0))
        return torch.cat(ious).mean().item()

    with torch.no_grad():
        found, half, twice = (agreement(k * sigma) for k in (1, 0.5, 2))
    print(f"sigma {sigma:.3f}: IoU {found:.3f}; of half and twice of it {half:.3f}, {twice:.3f}")
    assert SIGMA_IOU == 0.8 and found == pytest.approx(SIGMA_IOU, abs=0.05)
    assert half > 0.85 and twice < 0.75  # so that .8 is said about this sigma


def test_calibration_needs_a_mask(model, batch, monkeypatch):
    monkeypatch.setattr(model, "seg_tokens", lambda ids, valid: torch.zeros_like(valid))
    with pytest.raises(ValueError, match="--mask_sigma auto"):
        calibrate_sigma(model, [batch], STEPS)


def test_sigma_is_the_same_number_whatever_the_batch(policy, scenes):
    def found(seed=0, batch_size=2, mask_sigma="auto"):
        model = policy(seed=seed)
        tasks = [task_of(model, 1), task_of(model, 2, mask_sigma=mask_sigma)]
        loader = eval_loader(scenes, model.inputs(STEPS), batch_size, 0)
        tasks[1].action.calibrate(loader, STEPS)
        assert tasks[0].action is None  # nothing to draw
        return tasks[1].action.sigma

    first = found()
    assert 0 < first < 100
    assert found(seed=1) == first  # a fresh LoRA adds nothing
    # of ranks: one step of the bisection
    assert found(batch_size=1) == pytest.approx(first, rel=0.02) == found(batch_size=4)
    assert found(mask_sigma=0.3) == 0.3


def test_masks_that_sigma_does_not_move_cannot_calibrate_it(model, batch, monkeypatch):
    """Two empty masks agree: without a complaint the largest sigma would pass for the right one."""
    monkeypatch.setattr(
        model, "decode_masks", lambda images, image, z: torch.full((len(z), 8, 8), -1.0)
    )
    with pytest.raises(
        ValueError, match="--mask_sigma auto: sampled masks have an IoU of 1.00 to 1.00"
    ):
        calibrate_sigma(model, [batch], STEPS)
