"""The policy gradient of the sampled mask is unbiased: that of the expected reward
J(e) = E r(D(e + sigma eps)), whatever the reward r is to the decoder D.

Here r is an IoU of thresholded masks, which has no gradient of its own.
"""

import pytest
import torch
import torch.nn.functional as F

from rl_train.grpo import gaussian_logp_per_dim, group_advantages, group_std
from rl_train.rewards import mask_iou
from rl_train.tasks.latent_mask import latent_loss
from rl_train.utils.rng import RowRNG

SIGMA, SAMPLES, DIRECTIONS, DIFFERENCE_SAMPLES, CHUNK = 1.0, 2048, 12, 512, 64
# Of the central differences: for a reward like a soft step 4 % below the derivative.
STEP = 0.5 * SIGMA
SCENE = 2  # of the batch, where the demo model finds both the region and the other object
OTHER = "A striped yellow circle."


@pytest.fixture(scope="module")
def smoothed(model, images, batch):
    """(embedding (D,) half way from the scene's region to another object, function of embeddings).

    The function is (n, D) -> (n,) IoU with the region. There the sampled masks are now the one
    object, now the other, so that the reward has a gradient to be found.
    """
    prompts = model.segment_prompts(images, [SCENE] * 2, [batch.captions[SCENE], OTHER])
    ends = model.mask_embeddings(model.sample(batch, images, prompts, 1, 14))[1]  # (2, D)

    @torch.no_grad()
    def reward(z):
        ious = []
        for part in z.split(CHUNK):
            logits = model.decode_masks(images, [SCENE] * len(part), part)
            region = batch.masks[SCENE][None, None].float()
            target = F.interpolate(region, size=logits.shape[-2:])[0] > 0.5  # (1, h, w)
            ious.append(mask_iou(logits > 0, target.expand(len(part), -1, -1)))
        return torch.cat(ious)

    assert reward(ends)[0] > 0.5 and reward(ends)[1] < 0.1
    return ends.mean(0), reward


def policy_gradient(mean, z, rewards) -> torch.Tensor:
    """(D,) dJ/de by what trains, without its scales: the group's std, the mean over D."""
    n, every = len(z), torch.ones(len(z), dtype=torch.bool)
    e = mean.clone().requires_grad_()
    old_logp, advantages = gaussian_logp_per_dim(z, mean, SIGMA), group_advantages(rewards, n)
    how = dict(sigma=SIGMA, clip_range=0.2, kl_coef=0.0, num_actions=n)
    loss, _ = latent_loss(e.expand(n, -1), z, old_logp, None, advantages, every, **how)
    loss.backward()
    return -e.grad * len(mean) * group_std(rewards, n)


def test_the_latent_gradient_is_that_of_the_smoothed_reward(smoothed, seed=0):
    """Monte Carlo against central differences of J with other, common random numbers."""
    mean, reward = smoothed
    draws = RowRNG(seed, 0, 1, [0], SAMPLES)
    draws.uniforms(1)
    z = mean + SIGMA * draws.normals(list(range(SAMPLES)), len(mean))
    rewards = reward(z)
    gradient = policy_gradient(mean, z, rewards)
    half = torch.randn(
        DIFFERENCE_SAMPLES // 2, len(mean), generator=torch.Generator().manual_seed(seed + 1)
    )
    around = mean + SIGMA * torch.cat([half, -half])

    def difference(d):
        return ((reward(around + STEP * d) - reward(around - STEP * d)).mean() / (2 * STEP)).item()

    directions = torch.linalg.qr(
        torch.randn(len(mean), DIRECTIONS, generator=torch.Generator().manual_seed(seed + 2))
    )[0].T
    differences = torch.tensor([difference(d) for d in directions])
    cosine = torch.cosine_similarity(directions @ gradient, differences, dim=0).item()
    length, along = gradient.norm().item(), difference(gradient / gradient.norm())
    shuffled = rewards[torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + 3))]
    control = torch.cosine_similarity(
        directions @ policy_gradient(mean, z, shuffled), differences, dim=0
    ).item()
    print(
        f"\ncosine of {DIRECTIONS} directional derivatives {cosine:.3f}, of shuffled rewards' "
        f"{control:.3f}; length {length:.4f}, difference along it {along:.4f}; "
        f"reward {rewards.mean():.3f} +- {rewards.std():.3f}"
    )
    assert cosine > 0.9
    assert along == pytest.approx(length, rel=0.2)
    assert abs(control) < 0.6
