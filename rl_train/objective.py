"""The loss of some rows of a rollout: clipped policy terms for text and latent, KL to the reference, mask term.

Letters: n rows, T completion tokens, M [SEG] tokens in those rows, D prompt-embedding width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rl_train.grpo import gaussian_kl, gaussian_logp, grpo_loss
from rl_train.policies.sa2va import Policy, Scores
from rl_train.rollout import Rollout

BCE_WEIGHT, DICE_WEIGHT = 2.0, 0.5  # of Sa2VA's supervised training (configs/sa2va_4b.py)


@dataclass(frozen=True)
class Totals:
    """Divisors of a step, equal on all ranks: counts over all ranks, divided by their number.

    With them the mean over ranks of the sums over micro-batches is what one process computes on the joined batch.
    """

    rows: float
    tokens: float
    latents: float


def token_logps(policy: Policy, rollout: Rollout, rows: slice = slice(None)) -> Scores:
    """Log-probs of the sampled tokens of `rows` under the weights in use, and the means of their latents."""
    prompts = rollout.prompts.select(range(len(rollout))[rows])
    return policy.score(rollout.images, prompts, rollout.ids[rows], rollout.valid[rows])


def micro_batches(num_rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def rollout_loss(
    policy: Policy,
    rollout: Rollout,
    rows: slice,
    advantages,
    scored,
    reference: list[torch.Tensor],
    totals: Totals,
    args,
):
    """Loss of `rows` = micro-batch of one rollout, normalised over the whole step.

    Args:
        advantages: (N,); scored: (N,) bool, False where the reward is missing: such rows leave the loss.
        reference: [logp (N, T), latent mean (M, D)] under the reference role.

    Returns:
        (scalar with gradient, {name: detached sum}) to be divided by the counts that are among the sums.
    """
    scores = token_logps(policy, rollout, rows)
    valid = rollout.valid[rows] & scored[rows, None]  # (n, T)
    share = len(valid) / totals.rows if args.loss_type in ("grpo", "gspo", "dr_grpo") else 1.0
    loss, stats = grpo_loss(
        scores.logp,
        rollout.logp[rows],
        reference[0][rows],
        advantages[rows],
        valid,
        clip_range=args.clip_range,
        clip_range_high=args.clip_range_high,
        kl_coef=args.kl_coef,
        loss_type=args.loss_type,
        max_completion_length=args.max_completion_length,
        num_tokens=totals.tokens,
    )
    loss = share * loss
    sums = dict(
        policy_loss=share * stats["policy_loss"],
        tokens=stats["tokens"],
        kl=stats["kl"],
        clipped=stats["clip_low"] + stats["clip_high"],
        entropy=(scores.entropy * valid).sum(),
        sampler_gap=((scores.logp.detach() - rollout.logp[rows]).abs() * valid).max(),
    )
    if rollout.latent is None and not (args.mask_loss_coef and rollout.has_mask):
        return loss, sums
    pick = (rollout.seg_rows >= rows.start) & (rollout.seg_rows < rows.stop)
    seg_rows = rollout.seg_rows[pick]
    if rollout.latent is not None and len(seg_rows):
        term, kl = latent_loss(
            scores.latent_mean,
            rollout.latent,
            pick,
            advantages[seg_rows],
            scored[seg_rows],
            reference[1][pick],
            totals,
            args,
        )
        loss = loss + term
        sums |= dict(latent_loss=term.detach(), latent_kl=kl, latents=scored[seg_rows].sum())
    if args.mask_loss_coef and len(seg_rows):
        z = (
            scores.latent_mean
            if rollout.latent is None
            else scores.latent_mean + rollout.latent.offset[pick]
        )
        image = [rollout.prompts.image[row] for row in seg_rows.tolist()]
        targets = [rollout.batch.masks[i] for i in image]
        term = (
            mask_loss(policy.decode_masks(rollout.images, image, z), targets) * scored[seg_rows]
        ).sum() / totals.latents
        loss = loss + args.mask_loss_coef * term
        sums |= dict(mask_loss=term.detach())
    return loss, sums


def latent_loss(mean, latent, pick, advantages, scored, ref_mean, totals: Totals, args):
    """Clipped policy term of the sampled prompt embeddings plus their exact KL: (scalar, detached sum of KL).

    Each [SEG] is one action whose log-ratio is the mean over the D dimensions; the sum over them, divided by the
    number of [SEG] tokens of the step.
    """
    logp = gaussian_logp(latent.z[pick], mean, latent.sigma)  # (M,)
    loss, _ = grpo_loss(
        logp[:, None],
        latent.logp[pick][:, None],
        None,
        advantages,
        scored[:, None],
        clip_range=args.clip_range,
        clip_range_high=args.clip_range_high,
        loss_type="bnpo",
        num_tokens=totals.latents,
    )
    kl = (gaussian_kl(mean, ref_mean, latent.sigma) * scored).sum()
    return loss + args.kl_coef * kl / totals.latents, kl.detach()


def mask_loss(logits: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
    """(M,) supervised loss 2.0 BCE + 0.5 Dice (smoothing 1) of mask logits (M, h, w) against masks (H, W) bool.

    Targets are nearest-resized to (h, w), as in the supervised training; all pixels count (it sampled 12,544 points).
    """
    size = logits.shape[-2:]
    resized = {}
    for t in targets:
        if id(t) not in resized:  # rows about one region share its mask
            pixels = t[None, None].to(logits.device, torch.uint8)
            resized[id(t)] = F.interpolate(pixels, size=size, mode="nearest")[0, 0].float()
    target = torch.stack([resized[id(t)] for t in targets])
    bce = (
        F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
        .flatten(1)
        .mean(1)
    )
    probability, target = logits.float().sigmoid().flatten(1), target.flatten(1)
    dice = 1 - (2 * (probability * target).sum(1) + 1) / (probability.sum(1) + target.sum(1) + 1)
    return BCE_WEIGHT * bce + DICE_WEIGHT * dice
