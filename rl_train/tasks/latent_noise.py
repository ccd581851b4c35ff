"""Scale and covariance of loop 2's noise on the policy's prompt embedding, fitted to the base.

z ~ N(mean, sigma^2 L L^T): L L^T is the covariance of the base's own embeddings of different
phrases, so that a sample differs from the mean as another phrase would, and sigma so large that its
mask is often another one. Letters: n phrases, D width of an embedding.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import segment_by_own_answer
from rl_train.rewards.iou import mask_iou
from rl_train.rollout import Batch
from rl_train.utils.rng import RowRNG

SHRINKAGE = 0.1  # fraction of the covariance that is the same in all directions
SIGMA_IOU = 0.5  # --latent_std auto: IoU of sampled masks with the mask of the mean
SIGMA_SAMPLES = 4  # sampled for each caption to measure that IoU


@dataclass
class CalibrationBatch:
    """Record of the first [SEG] in each of n answers to a batch's captions; others are left out."""

    # (k images, (k, D) embeddings) -> (k, h, w) mask logits
    decode: Callable[[list[int], torch.Tensor], torch.Tensor]
    image: list[int]  # n of the batch
    index: list[int]  # n of the data set
    embeddings: torch.Tensor  # (n, D)


@torch.no_grad()
def collect_calibration(
    policy: Sa2VAPolicy, batches: Iterable[Batch], max_new_tokens: int
) -> list[CalibrationBatch]:
    """Answer the captions of `batches` with the weights in use; keep the answers with [SEG]."""
    calibration = []
    for batch in batches:
        features = policy.encode(batch)
        _, rows, embeddings = segment_by_own_answer(
            policy, features, range(len(batch)), batch.captions, max_new_tokens
        )
        if len(rows):
            # Rows ascend: True at the first [SEG] of each.
            first = rows.diff(prepend=rows[:1] - 1) > 0
            image = rows[first].tolist()
            index = [batch.index[i] for i in image]
            decode = partial(policy.decode_masks, features)
            calibration.append(CalibrationBatch(decode, image, index, embeddings[first]))
    return calibration


def covariance_factor(embeddings: torch.Tensor) -> torch.Tensor | None:
    """Return float32 lower triangular L (D, D); L L^T is the shrunk covariance of embeddings.

    Its trace is D, so that sigma is the root mean square over dimensions whatever the embeddings'
    scale. A fraction SHRINKAGE of it is the identity, so that no direction's variance is below
    SHRINKAGE, or above D.

    Args:
        embeddings: (n, D); n may be far below D.

    Returns:
        None, for the identity, if the embeddings do not differ.
    """
    x = embeddings.double().cpu()
    x = x - x.mean(0)  # (n, D)
    covariance = x.T @ x  # (D, D), up to the scale that is divided out
    scale = covariance.diagonal().mean()
    if scale <= torch.finfo(torch.float32).tiny:
        return None
    identity = torch.eye(len(covariance), dtype=x.dtype)
    shrunk = (1 - SHRINKAGE) * covariance / scale + SHRINKAGE * identity
    return torch.linalg.cholesky(shrunk).float()


def correlated_noise(noise: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Return noise (M, D) of covariance L L^T, made of standard normal noise (M, D)."""
    return noise if factor is None else noise @ factor.to(noise.device).T


@torch.no_grad()
def calibrate_sigma(calibration: list[CalibrationBatch], factor: torch.Tensor | None) -> float:
    """Find the sigma whose masks have a mean IoU of SIGMA_IOU with those of the mean.

    The logarithm of sigma is bisected between 1/64 and 16 times the std of the embeddings
    themselves: SAM2's embedding has no scale of its own.

    Raises:
        ValueError: no caption was answered with [SEG], or no sigma in that range gives that IoU.
    """
    if not calibration:
        raise ValueError("--latent_std auto: no caption was answered with [SEG], give a number")
    samples = []  # (decode, mean, noise) of each batch, SIGMA_SAMPLES rows of each embedding
    for batch in calibration:
        mean = batch.embeddings.repeat_interleave(SIGMA_SAMPLES, 0)
        rng = RowRNG(0, 0, 0, batch.index, SIGMA_SAMPLES)
        # As in a rollout, normals come after a token's uniforms.
        rng.uniforms(1)
        noise = rng.normals(list(range(len(mean))), mean.shape[1]).to(mean.device)
        image = [i for i in batch.image for _ in range(SIGMA_SAMPLES)]
        samples.append((partial(batch.decode, image), mean, correlated_noise(noise, factor)))
    masks = [decode(mean) > 0 for decode, mean, _ in samples]

    def mean_iou(sigma: float) -> float:
        noisy = [decode(mean + sigma * noise) > 0 for decode, mean, noise in samples]
        iou = [mask_iou(sampled, of_mean, 1.0) for sampled, of_mean in zip(noisy, masks)]
        return torch.cat(iou).mean().item()

    scale = torch.cat([mean for _, mean, _ in samples]).std().log2().item()
    low, high = scale - 6, scale + 4  # log2 of sigma
    ends = mean_iou(2**low), mean_iou(2**high)
    if not ends[0] > SIGMA_IOU > ends[1]:
        raise ValueError(
            f"--latent_std auto: sampled masks have an IoU of {ends[0]:.2f} to {ends[1]:.2f} with "
            f"the mean's for sigma from {2**low:.3g} to {2**high:.3g}, never {SIGMA_IOU}; look "
            "at the model's masks, or give a number"
        )
    # The IoU falls with sigma; 10 halvings of 10 octaves leave a hundredth of one.
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_iou(2**middle) > SIGMA_IOU else (low, middle)
    return 2**low
