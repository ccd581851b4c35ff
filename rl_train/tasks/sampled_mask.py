"""The action of loop 2: the mask of each [SEG], drawn as a prompt embedding of SAM2.

The answer's text is nearly constant and the mask a deterministic function of it, so G equal texts
would give one mask, equal rewards and no gradient. The action is z ~ N(mean, sigma^2), mean the
prompt embedding that text_hidden_fcs makes of the hidden state at [SEG]; what decodes z into a mask
learns by a supervised term alone (--mask_loss_coef).

Letters: N rows, M [SEG] tokens in them, D prompt-embedding width.
"""

from dataclasses import dataclass
from functools import partial

import torch

from rl_train.distributed import gather_objects, print0
from rl_train.draws import Draws
from rl_train.grpo import gaussian_kl, gaussian_logp, grpo_loss
from rl_train.policies.sa2va import Sa2VAPolicy, by_chunks
from rl_train.policies.segment_describe import answer, row_masks
from rl_train.rewards.iou import best_objects, mask_iou, mask_spread
from rl_train.types import Outcome, Rollout
from sa2va_hf.losses import mask_loss

SIGMA_IOU = 0.8  # --mask_sigma auto: IoU of sampled masks with the mask of the mean
SIGMA_SAMPLES = 4  # drawn for each caption to measure it


@dataclass
class DrawnMasks:
    """The masks of a rollout and the embeddings they were decoded from, M in row-major order."""

    rows: torch.Tensor  # (M,) the row of each [SEG]
    masks: list[torch.Tensor]  # N (H, W) bool, the union of a row's, empty without [SEG]
    z: torch.Tensor  # (M, D) sampled; the mean itself where sigma is 0
    offset: torch.Tensor  # (M, D) z minus the mean it was sampled around
    logp: torch.Tensor | None  # (M,) log-density, mean over dimensions; None where sigma is 0


class SampledMask:
    """Draws masks and computes their part of the loss.

    Args:
        sigma: standard deviation in each dimension, 0 for none, or "auto" until `calibrate`.
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
        self.clip_range, self.kl_weight = clip_range, kl_weight

    def calibrate(self, batches, max_new_tokens: int):
        """Replace "auto" by a number, the same on all ranks, by the base's answers."""
        if self.sigma == "auto":
            value = calibrate_sigma(self.policy, batches, max_new_tokens)
            self.sigma = gather_objects(value)[0]
            print0(f"--mask_sigma auto: {self.sigma:.3g}")

    def draw(self, rollout: Rollout, draws: Draws) -> DrawnMasks:
        rows, mean = self.policy.mask_embeddings(rollout)
        z, logp = mean, None
        if self.sigma > 0:
            noise = draws.normals(rows.tolist(), mean.shape[1])
            z = mean + self.sigma * noise.to(mean.device)
            logp = gaussian_logp(z, mean, self.sigma)
        masks = row_masks(self.policy, rollout.features, rollout.prompts.image, rows.tolist(), z)
        return DrawnMasks(rows, masks, z, z - mean, logp)

    def parameters(self, rollout: Rollout, rows: slice, scores) -> torch.Tensor:
        return self.policy.scored_mask_embeddings(scores, rollout.ids[rows], rollout.valid[rows])

    def loss(self, work, rows: slice, scores, totals, config) -> tuple[list, dict]:
        """([policy term with its KL, supervised mask term], sums for the curves) of `rows`.

        Each [SEG] is one action whose log-ratio is the mean over the D dimensions; both terms are
        divided by the number of [SEG] tokens of the step, `totals.actions`.
        """
        rollout, drawn, terms = work.rollout, work.rollout.action, []
        pick = (drawn.rows >= rows.start) & (drawn.rows < rows.stop)
        segs = drawn.rows[pick]  # (m,) rows of these [SEG]
        scored, zero = work.scored[segs], scores.logp.new_zeros(())
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
                work.advantages[segs],
                scored,
                sigma=self.sigma,
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
        return int(scored[rollout.action.rows.cpu()].sum())

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
        return dict(sigma=self.sigma)

    def load_state_dict(self, state: dict):
        self.sigma = state["sigma"]


def latent_loss(
    mean, z, old_logp, ref_mean, advantages, scored, *, sigma, clip_range, kl_coef, num_actions
):
    """(clipped policy term of m sampled embeddings z (m, D) plus their exact KL, its statistics).

    Ratio and KL are of means over the D dimensions, so both weigh 1/D of the joint distribution's.

    Args:
        mean, ref_mean: (m, D) by the weights in use and by the reference, None if kl_coef is 0.
        old_logp: (m,) of z when it was drawn; advantages: (m,); scored: (m,) bool.
        num_actions: of the whole step, by which the sums are divided.

    Returns:
        statistics, detached: the term itself, the share of clipped actions, and the KL in nats of
        the joint distribution, D times that of the loss.
    """
    logp = gaussian_logp(z, mean, sigma)  # (m,)
    one_token = (logp[:, None], old_logp[:, None], None, advantages, scored[:, None])
    how = dict(clip_range=clip_range, loss_type="bnpo", num_tokens=num_actions)
    loss, stats = grpo_loss(*one_token, **how)
    clipped, count = stats["clip_low"] + stats["clip_high"], scored.sum()
    statistics = dict(latent_clip_frac=(clipped, count))
    if ref_mean is not None:
        kl = (gaussian_kl(mean, ref_mean, sigma) * scored).sum()
        loss = loss + kl_coef * kl / num_actions
        statistics["latent_joint_kl"] = (kl.detach() * mean.shape[1], count)
    return loss, statistics | dict(latent_loss=loss.detach())


@torch.no_grad()
def calibrate_sigma(policy: Sa2VAPolicy, batches, max_new_tokens: int) -> float:
    """The sigma whose masks have a mean IoU of SIGMA_IOU with the mean's, over `batches`.

    Of each answer the first [SEG] counts. By bisection of the logarithm, between 1/64 and 16 times
    the spread of the prompt embeddings themselves: SAM2's embedding has no scale of its own.

    Raises:
        ValueError: no caption was answered with [SEG], or no sigma in that range gives that IoU.
    """
    drawn = []  # (decoder, mean, noise) of each batch
    for batch in batches:
        features = policy.encode(batch)
        asked = (range(len(batch)), batch.captions)
        _, rows, means = answer(policy, features, *asked, max_new_tokens)
        if len(rows):
            first = rows.diff(prepend=rows[:1] - 1) > 0
            image = rows[first].tolist()
            mean = means[first].repeat_interleave(SIGMA_SAMPLES, 0)
            draws = Draws(0, 0, 0, [batch.index[i] for i in image], SIGMA_SAMPLES)
            draws.uniforms(1)
            noise = draws.normals(list(range(len(mean))), mean.shape[1]).to(mean.device)
            image = [i for i in image for _ in range(SIGMA_SAMPLES)]
            drawn.append((partial(policy.decode_masks, features, image), mean, noise))
    if not drawn:
        raise ValueError("--mask_sigma auto: no caption was answered with [SEG], give a number")
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
