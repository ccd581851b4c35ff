"""The action of loop 2: the mask of each [SEG], drawn as a prompt embedding of SAM2.

The answer's text is nearly constant and the mask a deterministic function of it, so G equal texts
would give one mask, equal rewards and no gradient. The action is z ~ N(mean, sigma^2 L L^T), mean
the prompt embedding that text_hidden_fcs makes of the hidden state at [SEG], L of `prompt_noise`;
what decodes z into a mask learns by a supervised term alone (--mask_loss_coef).

Letters: N rows, M [SEG] tokens in them, D prompt-embedding width.
"""

from dataclasses import dataclass, field

import torch

from rl_train.distributed import gather_objects, print0
from rl_train.draws import Draws
from rl_train.grpo import gaussian_kl, gaussian_logp, grpo_loss
from rl_train.policies.sa2va import Sa2VAPolicy, by_chunks
from rl_train.policies.segment_describe import row_masks
from rl_train.rewards.iou import best_objects, mask_spread
from rl_train.tasks.prompt_noise import along, ask, calibrate_sigma, covariance_factor
from rl_train.types import Outcome, Rollout
from sa2va_hf.losses import mask_loss
from sa2va_hf.transfer import send


@dataclass
class DrawnMasks:
    """The masks of a rollout and the embeddings they were decoded from, M in row-major order."""

    rows: torch.Tensor  # (M,) the row of each [SEG], on the CPU
    masks: list[torch.Tensor]  # N (H, W) bool, the union of a row's, empty without [SEG]
    z: torch.Tensor  # (M, D) sampled; the mean itself where sigma is 0
    offset: torch.Tensor  # (M, D) z minus the mean it was sampled around
    logp: torch.Tensor | None  # (M,) log-density, mean over dimensions; None where sigma is 0
    confidence: list[float] = field(default_factory=list)  # N, of the masks: `mask_confidence`


class SampledMask:
    """Draws masks and computes their part of the loss.

    Args:
        sigma: standard deviation, root mean square over dimensions; 0 for none, or "auto" until
            `calibrate`. Until then `factor` L is None, the identity.
        mask_loss_coef: weight of the supervised BCE + Dice term on the sampled masks.
        clip_range: of the ratio, whose log is the mean over the D dimensions.
        kl_weight: of the KL, the mean over D, relative to that of the text's.
    """

    def __init__(
        self,
        policy: Sa2VAPolicy,
        sigma: float | str,
        mask_loss_coef: float,
        clip_range: float = 0.2,
        kl_weight: float = 1.0,
    ):
        self.policy, self.sigma, self.mask_loss_coef = policy, sigma, mask_loss_coef
        self.clip_range, self.kl_weight, self.factor = clip_range, kl_weight, None

    def calibrate(self, batches, max_new_tokens: int):
        """Fit the noise to the base's answers, on all ranks to rank 0's; "auto" is a number then.

        Of no answers with [SEG] a given sigma is kept as it is, the same in all directions.
        """
        if self.sigma == 0:
            return
        asked = ask(self.policy, batches, max_new_tokens)
        embeddings = [one.embeddings for one in asked]
        factor = covariance_factor(torch.cat(embeddings)) if asked else None
        self.factor = self._of_device(gather_objects(factor)[0])
        if self.sigma == "auto":
            self.sigma = gather_objects(calibrate_sigma(asked, self.factor))[0]
            print0(f"--mask_sigma auto: {self.sigma:.3g}")

    def draw(self, rollout: Rollout, draws: Draws) -> DrawnMasks:
        rows, mean = self.policy.mask_embeddings(rollout)
        z, logp = mean, None
        if self.sigma > 0:
            noise = draws.normals(rows.tolist(), mean.shape[1])
            z = mean + self.sigma * along(send(noise, mean.device), self.factor)
            logp = gaussian_logp(z, mean, self.sigma, self.factor)
        seen, confidence = (self.policy, rollout.features, rollout.prompts.image), []
        masks = row_masks(*seen, rows.tolist(), z, confidence)
        return DrawnMasks(rows, masks, z, z - mean, logp, confidence)

    def parameters(self, rollout: Rollout, rows: slice, scores) -> torch.Tensor:
        return self.policy.scored_mask_embeddings(scores, rollout.ids[rows], rollout.valid[rows])

    def loss(self, work, rows: slice, scores, totals, config) -> tuple[list, dict]:
        """([policy term with its KL, supervised mask term], sums for the curves) of `rows`.

        Each [SEG] is one action whose log-ratio is the mean over the D dimensions; both terms are
        divided by the number of [SEG] tokens of the step, `totals.actions`.
        """
        rollout, drawn, terms = work.rollout, work.rollout.action, []
        bounds = torch.tensor([rows.start, rows.stop])
        pick = slice(*torch.searchsorted(drawn.rows, bounds).tolist())
        segs = drawn.rows[pick]  # (m,) rows of these [SEG]
        scored, advantages = (
            send(of_row[segs], scores.logp.device) for of_row in (work.scored, work.advantages)
        )
        zero = scores.logp.new_zeros(())
        none = zero, zero
        sums = dict(latent_loss=zero, mask_loss=zero, latent_clip_frac=none, latent_joint_kl=none)
        if not len(segs) or not (self.sigma > 0 or self.mask_loss_coef):
            return terms, sums
        mean = self.parameters(rollout, rows, scores)
        if self.sigma > 0:
            term, more = latent_loss(
                mean,
                drawn.z[pick],
                drawn.logp[pick],
                work.reference and work.reference.action[pick],
                advantages,
                scored,
                sigma=self.sigma,
                factor=self.factor,
                clip_range=self.clip_range,
                kl_coef=config.kl_coef * self.kl_weight,
                num_actions=totals.actions,
            )
            terms.append(term)
            sums |= more
        if self.mask_loss_coef:
            image = [rollout.prompts.image[row] for row in segs.tolist()]
            z = mean + drawn.offset[pick]
            regions = [rollout.batch.masks[i] for i in image]

            def losses(some):
                logits = self.policy.decode_masks(rollout.features, image[some], z[some])
                return mask_loss(logits, regions[some])

            term = (by_chunks(losses, len(image)) * scored).sum() / totals.actions
            terms.append(self.mask_loss_coef * term)
            sums |= dict(mask_loss=term.detach())
        return terms, sums

    def count(self, rollout: Rollout, scored: torch.Tensor) -> int:
        return int(scored[rollout.action.rows].sum())

    def curves(self, rollout: Rollout, outcome: Outcome) -> dict[str, tuple[float, float]]:
        """{curve: (total, count)}: how far a group's masks lie apart, [SEG] of none or many, sigma.

        capped_frac: rows with more [SEG] than are decoded; objects_frac: groups whose masks lie on
        two objects or more, with --other_regions.
        """
        G, batch = rollout.num_generations, rollout.batch
        groups = [torch.stack(outcome.masks[i : i + G]) for i in range(0, len(rollout), G)]
        no_seg = len(rollout) - len(rollout.action.rows.unique())
        spread = sum(map(mask_spread, groups))
        capped = self.policy.capped(rollout).sum()
        curves = dict(
            mask_spread=(spread, len(groups)),
            no_seg_frac=(no_seg, len(rollout)),
            capped_frac=(capped, len(rollout)),
        )
        if batch.others is not None:
            best = best_objects(outcome.masks, batch.masks, batch.others).view(-1, G)  # (B, G)
            differ = sum(len(set(row) - {-1}) > 1 for row in best.tolist())
            curves["objects_frac"] = differ, len(groups)
        return curves | (dict(mask_sigma=(self.sigma, 1)) if self.sigma else {})

    def state_dict(self) -> dict:
        factor = None if self.factor is None else self.factor.cpu()
        return dict(sigma=self.sigma, factor=factor)

    def load_state_dict(self, state: dict):
        self.sigma, self.factor = state["sigma"], self._of_device(state["factor"])

    def _of_device(self, factor: torch.Tensor | None) -> torch.Tensor | None:
        """The factor on the policy's device, where each micro-batch asks for it."""
        return None if factor is None else factor.to(self.policy.device)


def latent_loss(
    mean,
    z,
    old_logp,
    ref_mean,
    advantages,
    scored,
    *,
    sigma,
    factor=None,
    clip_range,
    kl_coef,
    num_actions,
):
    """(clipped policy term of m sampled embeddings z (m, D) plus their exact KL, its statistics).

    Ratio and KL are of means over the D dimensions, so both weigh 1/D of the joint distribution's.
    Their gradient by the mean is the natural one (`natural`): a good sample attracts along z - mean
    as for an isotropic sigma. The plain one is (L L^T)^-1 of that, largest in the directions in
    which phrases, and so the samples, hardly differ.

    Args:
        mean, ref_mean: (m, D) by the weights in use and by the reference, None if kl_coef is 0.
        old_logp: (m,) of z when it was drawn; advantages: (m,); scored: (m,) bool.
        num_actions: of the whole step, by which the sums are divided.

    Returns:
        statistics, detached: the term itself, the share of clipped actions, and the KL in nats of
        the joint distribution, D times that of the loss.
    """
    mean = natural(mean, factor)
    logp = gaussian_logp(z, mean, sigma, factor)  # (m,)
    one_token = (logp[:, None], old_logp[:, None], None, advantages, scored[:, None])
    how = dict(clip_range=clip_range, loss_type="bnpo", num_tokens=num_actions)
    loss, stats = grpo_loss(*one_token, **how)
    clipped, count = stats["clip_low"] + stats["clip_high"], scored.sum()
    statistics = dict(latent_clip_frac=(clipped, count))
    if ref_mean is not None:
        kl = (gaussian_kl(mean, ref_mean, sigma, factor) * scored).sum()
        loss = loss + kl_coef * kl / num_actions
        statistics["latent_joint_kl"] = (kl.detach() * mean.shape[1], count)
    return loss, statistics | dict(latent_loss=loss.detach())


def natural(mean: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """The mean (m, D) itself, whose gradient arrives multiplied by L L^T (Amari 1998)."""
    if factor is None:
        return mean
    fixed, factor = mean.detach(), factor.to(mean.device)
    return fixed + (mean - fixed) @ factor @ factor.T
