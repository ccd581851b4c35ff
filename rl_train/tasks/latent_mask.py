"""Action of loop 2: the mask of each [SEG], sampled as a prompt embedding of SAM2.

The answer's text is nearly constant and the mask a deterministic function of it, so G equal texts
would give one mask, equal rewards and no gradient. The action is z ~ N(mean, sigma^2 L L^T): mean
is the prompt embedding that text_hidden_fcs makes of the hidden state at [SEG], L is fitted by
`latent_noise`. The decoder of z into a mask learns by a supervised term alone (--mask_loss_coef).

Letters: N rows, M [SEG] tokens in them, m of a micro-batch, D prompt-embedding width.
"""

from collections.abc import Iterable
from typing import Any

import torch

from rl_train.config.grpo_config import LossConfig
from rl_train.distributed.process_group import print0
from rl_train.engine import ScoreOutput
from rl_train.grpo import gaussian_kl_per_dim, gaussian_logp_per_dim, grpo_loss
from rl_train.loss import LossDenominators, ScoredRollout, Statistic
from rl_train.policies.sa2va import Sa2VAPolicy, by_chunks
from rl_train.policies.sa2va_queries import row_masks
from rl_train.rewards.iou import best_objects, mask_spread
from rl_train.rewards.objects import match
from rl_train.rollout import Batch, RewardOutput, Rollout, SampledLatents
from rl_train.tasks.base import LatentAction
from rl_train.tasks.latent_noise import (
    SIGMA_IOU,
    calibrate_sigma,
    collect_calibration,
    correlated_noise,
    covariance_factor,
)
from rl_train.utils.rng import RowRNG
from sa2va_hf.losses import mask_loss
from sa2va_hf.to_device import to_device

CLIP_RANGE = 0.2  # of the ratio, whose log is the mean over the D dimensions


class LatentMaskAction(LatentAction):
    """Samples masks and computes their part of the loss.

    Args:
        sigma: standard deviation, root mean square over dimensions; 0 for none, or "auto" until
            `calibrate`. Until then `factor` L is None, the identity.
        mask_loss_coef: weight of the supervised BCE + Dice term on the sampled masks.
        one_by_one: keep each [SEG]'s own mask, and teach it the region that it is matched with, in
            place of the union of all that are named; a surplus one nothing.
    """

    def __init__(
        self,
        policy: Sa2VAPolicy,
        sigma: float | str,
        mask_loss_coef: float,
        one_by_one: bool = False,
    ):
        self.policy, self.sigma, self.mask_loss_coef = policy, sigma, mask_loss_coef
        self.one_by_one = one_by_one
        self.factor = None

    @property
    def has_supervised_term(self) -> bool:
        return self.mask_loss_coef > 0

    def calibrate(self, batches: Iterable[Batch], max_new_tokens: int):
        """Fit the noise to the base's answers; afterwards an "auto" sigma is a number.

        If no answer has a [SEG], a given sigma is kept, the same in all directions. The run then
        loads rank 0's `state_dict` on all ranks.
        """
        if self.sigma == 0:
            return
        calibration = collect_calibration(self.policy, batches, max_new_tokens)
        embeddings = [batch.embeddings for batch in calibration]
        factor = covariance_factor(torch.cat(embeddings)) if calibration else None
        if self.sigma == "auto":
            self.sigma = calibrate_sigma(calibration, factor)
            print0(
                f"--latent_std auto: {self.sigma:.3g}, at which masks sampled for "
                f"{len(torch.cat(embeddings))} captions have a mean IoU of {SIGMA_IOU} with the "
                "unsampled ones"
            )
        self.load_state_dict(dict(sigma=self.sigma, factor=factor))

    def draw(self, rollout: Rollout, rng: RowRNG) -> SampledLatents:
        rows, mean = self.policy.mask_embeddings(rollout)  # (M,), (M, D)
        z, logp = mean, None
        if self.sigma > 0:
            # From (seed, step, task, sample), whatever the number of processes.
            noise = rng.normals(rows.tolist(), mean.shape[1])
            z = mean + self.sigma * correlated_noise(to_device(noise, mean.device), self.factor)
            logp = gaussian_logp_per_dim(z, mean, self.sigma, self.factor)
        image_index = rollout.prompts.image_index
        decoded = row_masks(
            self.policy, rollout.features, image_index, rows.tolist(), z, self.one_by_one
        )
        latents = SampledLatents(rows, decoded.masks, z, z - mean, logp, decoded.confidence)
        if self.one_by_one:
            latents.seg_masks, latents.targets = decoded.seg_masks, []
            for masks, regions in zip(
                decoded.seg_masks, rollout.repeat_for_rows(rollout.batch.regions)
            ):
                region_of = dict(match(masks, regions.to(masks.device)).pairs)
                latents.targets += [
                    regions[region_of[m]] if m in region_of else None for m in range(len(masks))
                ]
        return latents

    def distribution_params(
        self, rollout: Rollout, rows: slice, scores: ScoreOutput
    ) -> torch.Tensor:
        return self.policy.scored_mask_embeddings(scores, rollout.ids[rows], rollout.valid[rows])

    def loss(
        self,
        scored: ScoredRollout,
        rows: slice,
        scores: ScoreOutput,
        denominators: LossDenominators,
        config: LossConfig,
    ) -> tuple[list[torch.Tensor], dict[str, Statistic]]:
        """Return ([policy term with its KL, supervised mask term], {name: statistic}) of `rows`.

        Each [SEG] is one action whose log-ratio is the mean over the D dimensions. Both terms are
        divided by the number of [SEG] tokens of the step, `denominators.actions`.
        """
        rollout, latents, loss_terms = scored.rollout, scored.rollout.latents, []
        # Rows ascend, so the micro-batch's [SEG] tokens are one slice.
        bounds = torch.tensor([rows.start, rows.stop])
        selected = slice(*torch.searchsorted(latents.rows, bounds).tolist())  # m of the M
        seg_rows = latents.rows[selected]  # (m,)
        in_loss, advantages = (  # (m,) each
            to_device(row_values[seg_rows], scores.logp.device)
            for row_values in (scored.in_loss, scored.advantages)
        )
        zero = scores.logp.new_zeros(())
        statistics = dict(
            latent_loss=zero,
            mask_loss=zero,
            latent_clip_frac=(zero, zero),
            latent_joint_kl=(zero, zero),
        )
        if not len(seg_rows) or not (self.sigma > 0 or self.mask_loss_coef):
            return loss_terms, statistics
        mean = self.distribution_params(rollout, rows, scores)  # (m, D)
        if self.sigma > 0:
            policy_term, latent_statistics = latent_loss(
                mean,
                latents.z[selected],
                latents.logp[selected],
                scored.reference and scored.reference.action_params[selected],
                advantages,
                in_loss,
                sigma=self.sigma,
                factor=self.factor,
                clip_range=CLIP_RANGE,
                kl_coef=config.kl_coef,
                num_actions=denominators.actions,
            )
            loss_terms.append(policy_term)
            statistics |= latent_statistics
        if self.mask_loss_coef:
            image = [rollout.prompts.image_index[row] for row in seg_rows.tolist()]
            # The sampled point around the newest mean, so that the gradient reaches the mean.
            z = mean + latents.noise[selected]
            # Copied to the GPU once: each chunk, computed again, would copy them again.
            regions = {i: to_device(rollout.batch.masks[i], mean.device) for i in set(image)}
            targets = [regions[i] for i in image]
            if latents.targets is not None:
                matched = latents.targets[selected]
                is_matched = torch.tensor([target is not None for target in matched])
                in_loss = in_loss & to_device(is_matched, in_loss.device)
                targets = [
                    union if target is None else target for union, target in zip(targets, matched)
                ]

            def mask_losses(chunk: slice) -> torch.Tensor:
                logits = self.policy.decode_masks(rollout.features, image[chunk], z[chunk])
                return mask_loss(logits, targets[chunk])

            losses = by_chunks(mask_losses, len(image), rollout.features)
            mask_term = (losses * in_loss).sum() / denominators.actions
            loss_terms.append(self.mask_loss_coef * mask_term)
            statistics["mask_loss"] = mask_term.detach()
        return loss_terms, statistics

    def metrics(self, rollout: Rollout, outcome: RewardOutput) -> dict[str, tuple[float, float]]:
        """Return {metric: (total, count)} of the sampled masks.

        mask_spread: 1 - mean pairwise IoU in a group; no_seg_frac: rows without [SEG];
        capped_frac: rows with more [SEG] than are decoded; objects_frac: groups whose masks lie on
        two objects or more, with --distractors; latent_std: the noise.
        """
        G, batch = rollout.num_generations, rollout.batch
        # (G, H, W) each
        groups = [torch.stack(outcome.masks[i : i + G]) for i in range(0, len(rollout), G)]
        no_seg = len(rollout) - len(rollout.latents.rows.unique())
        metrics = dict(
            mask_spread=(sum(map(mask_spread, groups)), len(groups)),
            no_seg_frac=(no_seg, len(rollout)),
            capped_frac=(self.policy.too_many_masks(rollout).sum(), len(rollout)),
        )
        if batch.distractors is not None:
            objects = best_objects(outcome.masks, batch.masks, batch.distractors).view(
                -1, G
            )  # (B, G)
            differ = sum(len(set(row) - {-1}) > 1 for row in objects.tolist())  # -1: on no object
            metrics["objects_frac"] = differ, len(groups)
        if self.sigma:
            metrics["latent_std"] = self.sigma, 1
        return metrics

    def state_dict(self) -> dict[str, Any]:
        factor = None if self.factor is None else self.factor.cpu()
        return dict(sigma=self.sigma, factor=factor)

    def load_state_dict(self, state: dict[str, Any]):
        self.sigma, self.factor = state["sigma"], state["factor"]
        if self.factor is not None:  # kept on the device, where each micro-batch uses it
            self.factor = self.factor.to(self.policy.device)


def latent_loss(
    mean: torch.Tensor,
    z: torch.Tensor,
    old_logp: torch.Tensor,
    ref_mean: torch.Tensor | None,
    advantages: torch.Tensor,
    in_loss: torch.Tensor,
    *,
    sigma: float,
    factor: torch.Tensor | None = None,
    clip_range: float,
    kl_coef: float,
    num_actions: float,
) -> tuple[torch.Tensor, dict[str, Statistic]]:
    """Return (clipped policy term of m sampled embeddings plus their exact KL, {name: statistic}).

    Ratio and KL are of means over the D dimensions, so both weigh 1/D of the joint distribution's.
    Their gradient by the mean is the natural one (`natural_gradient`): a good sample attracts
    along z - mean, as for an isotropic sigma. The plain one is (L L^T)^-1 of that, largest in the
    directions in which phrases, and so the samples, hardly differ.

    Args:
        mean, ref_mean: (m, D) by the weights in use and by the reference, None if kl_coef is 0.
        z: (m, D) sampled.
        old_logp: (m,) of z when it was sampled; advantages: (m,); in_loss: (m,) bool.
        num_actions: of the whole step, by which the sums are divided.

    The statistics are detached: the term itself, the fraction of clipped actions, and the KL in
    nats of the joint distribution, D times that of the loss.
    """
    mean = natural_gradient(mean, factor)
    logp = gaussian_logp_per_dim(z, mean, sigma, factor)  # (m,)
    loss, stats = grpo_loss(  # each action as an answer of one token
        logp[:, None],
        old_logp[:, None],
        None,
        advantages,
        in_loss[:, None],
        clip_range=clip_range,
        loss_type="bnpo",
        num_tokens=num_actions,
    )
    num_clipped, count = stats["clip_low"] + stats["clip_high"], in_loss.sum()
    statistics = dict(latent_clip_frac=(num_clipped, count))
    if ref_mean is not None:
        kl = (gaussian_kl_per_dim(mean, ref_mean, sigma, factor) * in_loss).sum()
        loss = loss + kl_coef * kl / num_actions
        statistics["latent_joint_kl"] = (kl.detach() * mean.shape[1], count)
    return loss, statistics | dict(latent_loss=loss.detach())


def natural_gradient(mean: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Return the mean (m, D) unchanged, with its gradient multiplied by L L^T (Amari 1998)."""
    if factor is None:
        return mean
    fixed, factor = mean.detach(), factor.to(mean.device)
    # The second term is 0; only its gradient, multiplied by L L^T, counts.
    return fixed + (mean - fixed) @ factor @ factor.T
