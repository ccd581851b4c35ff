"""How far, and which way, loop 2 draws from the policy's prompt embedding, fitted to the base.

z ~ N(mean, sigma^2 L L^T): L L^T is the covariance of the base's own embeddings of different
phrases, so that a sample differs from the mean as another phrase would, and sigma so large that its
mask is often another one. Letters: n phrases, D width of an embedding.
"""

from dataclasses import dataclass
from functools import partial

import torch

from rl_train.draws import Draws
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.segment_describe import answer
from rl_train.rewards.iou import mask_iou

SHRINKAGE = 0.1  # share of the covariance that is the same in all directions
SIGMA_IOU = 0.5  # --mask_sigma auto: IoU of sampled masks with the mask of the mean
SIGMA_SAMPLES = 4  # drawn for each caption to measure it


@dataclass
class Asked:
    """What the base answered to the captions of a batch: the first [SEG] of each, n of them."""

    decode: object  # (k, D) embeddings of the k images -> (k, h, w) mask logits, given both
    image: list[int]  # n of the batch
    index: list[int]  # n of the data set
    embeddings: torch.Tensor  # (n, D)


@torch.no_grad()
def ask(policy: Sa2VAPolicy, batches, max_new_tokens: int) -> list[Asked]:
    """What the weights in use answer to the captions of `batches`, of those that have a [SEG]."""
    asked = []
    for batch in batches:
        features, captions = policy.encode(batch), (range(len(batch)), batch.captions)
        _, rows, embeddings = answer(policy, features, *captions, max_new_tokens)
        if len(rows):
            first = rows.diff(prepend=rows[:1] - 1) > 0
            image = rows[first].tolist()
            index = [batch.index[i] for i in image]
            decode = partial(policy.decode_masks, features)
            asked.append(Asked(decode, image, index, embeddings[first]))
    return asked


def covariance_factor(embeddings: torch.Tensor) -> torch.Tensor | None:
    """(D, D) float32 lower triangular L; L L^T is the covariance of embeddings (n, D), shrunk.

    Its trace is D, so that sigma is the root mean square over dimensions whatever the embeddings'
    scale. SHRINKAGE of it is the identity: n may be far below D, and yet no direction's variance is
    below SHRINKAGE, or above D. None, which stands for the identity, if embeddings do not differ.
    """
    x = embeddings.double().cpu()
    x = x - x.mean(0)
    covariance = x.T @ x
    scale = covariance.diagonal().mean()
    if scale <= torch.finfo(torch.float32).tiny:
        return None
    identity = torch.eye(len(covariance), dtype=x.dtype)
    shrunk = (1 - SHRINKAGE) * covariance / scale + SHRINKAGE * identity
    return torch.linalg.cholesky(shrunk).float()


def along(noise: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """(M, D) noise of covariance L L^T, of standard normal noise (M, D)."""
    return noise if factor is None else noise @ factor.to(noise.device).T


@torch.no_grad()
def calibrate_sigma(asked: list[Asked], factor: torch.Tensor | None) -> float:
    """The sigma whose masks have a mean IoU of SIGMA_IOU with the mean's.

    By bisection of the logarithm, between 1/64 and 16 times the spread of the embeddings
    themselves: SAM2's embedding has no scale of its own.

    Raises:
        ValueError: no caption was answered with [SEG], or no sigma in that range gives that IoU.
    """
    if not asked:
        raise ValueError("--mask_sigma auto: no caption was answered with [SEG], give a number")
    drawn = []  # (decoder, mean, noise) of each batch
    for one in asked:
        mean = one.embeddings.repeat_interleave(SIGMA_SAMPLES, 0)
        draws = Draws(0, 0, 0, one.index, SIGMA_SAMPLES)
        draws.uniforms(1)
        noise = draws.normals(list(range(len(mean))), mean.shape[1]).to(mean.device)
        image = [i for i in one.image for _ in range(SIGMA_SAMPLES)]
        drawn.append((partial(one.decode, image), mean, along(noise, factor)))
    masks = [decode(mean) > 0 for decode, mean, _ in drawn]

    def agreement(sigma):
        noisy = [decode(mean + sigma * noise) > 0 for decode, mean, noise in drawn]
        return torch.cat([mask_iou(*pair, 1.0) for pair in zip(noisy, masks)]).mean().item()

    scale = torch.cat([mean for _, mean, _ in drawn]).std().log2().item()
    low, high = scale - 6, scale + 4
    ends = agreement(2**low), agreement(2**high)
    if not ends[0] > SIGMA_IOU > ends[1]:
        raise ValueError(
            f"--mask_sigma auto: sampled masks have an IoU of {ends[0]:.2f} to {ends[1]:.2f} with "
            f"the mean's for sigma from {2**low:.3g} to {2**high:.3g}, never {SIGMA_IOU}; look "
            "at the model's masks, or give a number"
        )
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if agreement(2**middle) > SIGMA_IOU else (low, middle)
    return 2**low
