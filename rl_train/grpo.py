"""Group-relative policy optimisation: rewards -> advantages -> clipped loss with a KL term.

Definitions follow GRPO (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO
(2507.18071) and CISPO (2506.13585) as huggingface/trl 1.16 computes them (with
`use_bias_correction_kl=False`); `docs/algorithm.md` has the equations.

Letters: N rows = B prompts x G samples, row i*G+j answers prompt i; T completion tokens; V
vocabulary.
"""

from dataclasses import dataclass

import torch

SCALES = ("group", "batch", "none")  # what advantages may be divided by (`group_advantages`)


@dataclass(frozen=True)
class LossType:
    """Definition of one loss type, a row of `LOSSES`.

    Attributes:
        average: "rows": mean over rows of each row's mean over its tokens; "tokens": sum over
            tokens divided by the step's number of tokens; "length": sum over tokens divided by N
            times the length limit of an answer.
        advantage_scale: default scale of the advantages.
        clip_range: default clip range of the ratio, below and above 1.
        ratio_per_row: one ratio per row, exp of its mean log-ratio, instead of one per token. It
            moves less than a token's, so that its clip range is narrower.
        ratio_is_weight: the clipped ratio is a weight without gradient of the log-prob, so that a
            clipped token still has a gradient.
    """

    average: str
    advantage_scale: str = "group"
    clip_range: tuple[float, float] = (0.2, 0.2)
    ratio_per_row: bool = False
    ratio_is_weight: bool = False


LOSSES = dict(
    grpo=LossType("rows"),
    bnpo=LossType("tokens"),
    dr_grpo=LossType("length", advantage_scale="none"),
    dapo=LossType("tokens"),
    gspo=LossType("rows", clip_range=(3e-4, 4e-4), ratio_per_row=True),
    # Weights up to 5, without a lower limit: TRL's epsilon_high of 5 is the limit itself.
    cispo=LossType("tokens", clip_range=(1.0, 4.0), ratio_is_weight=True),
)
ADVANTAGE_EPS = 1e-4  # added to the standard deviation, as in TRL
MIN_STD = 1e-6  # below it a group's rewards are equal up to rounding and carry no signal


def group_std(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return the (B,) unbiased std of each group's scored rewards; 0 if fewer than two or equal."""
    std = _group_moments(rewards, num_generations)[1][:, 0]
    return torch.where(std < MIN_STD, 0.0, std)


def group_advantages(
    rewards: torch.Tensor, num_generations: int, scale: str = "group"
) -> torch.Tensor:
    """Return the (N,) advantages (r - mean) / (std + 1e-4) inside each group of G rows.

    Args:
        rewards: (N,) float, NaN where a row could not be scored. Such rows leave the statistics and
            get advantage 0.
        num_generations: G; rows i*G to i*G + G - 1 form a group.
        scale: "group" divides by the group's unbiased std, "batch" by that of all rows, "none" by
            1.

    A group whose rewards are all equal, or with fewer than two scored rows, gets exactly 0.

    Raises:
        ValueError: G < 2, N not a multiple of G, or an unknown scale.
    """
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r} is unknown; known: {', '.join(SCALES)}")
    mean, std = _group_moments(rewards, num_generations)  # (B, 1) each
    advantages = rewards.view(-1, num_generations) - mean  # (B, G)
    # Differences by rounding are no signal, and division would enlarge them.
    advantages = torch.where(std < MIN_STD, 0.0, advantages)
    if scale == "group":
        advantages = advantages / (std + ADVANTAGE_EPS)
    elif scale == "batch":
        advantages = divide_by_std(advantages, rewards)
    return torch.where(rewards.isnan(), 0.0, advantages.view(-1))


def divide_by_std(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Divide advantages by 1e-4 plus the unbiased std of the scored ones among `rewards` (M,)."""
    scored = rewards[~rewards.isnan()]
    std = scored.std() if len(scored) > 1 else scored.new_zeros(())
    return advantages / (std.to(advantages) + ADVANTAGE_EPS)


def _group_moments(
    rewards: torch.Tensor, num_generations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (mean, unbiased std) of each group's scored rows, (B, 1) each."""
    if num_generations < 2:
        raise ValueError(f"--num_generations {num_generations}: a group needs at least 2 samples")
    if rewards.ndim != 1 or len(rewards) % num_generations:
        raise ValueError(f"{tuple(rewards.shape)} rewards do not form groups of {num_generations}")
    groups = rewards.view(-1, num_generations)
    scored = ~groups.isnan()
    # NaN times 0 is NaN: rows without a reward are masked, not multiplied.
    count = scored.sum(1, keepdim=True)
    values = torch.where(scored, groups, 0.0)
    mean = values.sum(1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(scored, (values - mean) ** 2, 0.0).sum(1, keepdim=True)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()  # unbiased


def token_logps_from_logits(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the log-probs of ids (N, T) under softmax(logits (N, T, V) / temperature).

    Returns:
        (N, T) float32.
    """
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logp.gather(-1, ids[..., None])[..., 0]


def k3_kl(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """Return Schulman's k3 estimate of KL(policy || reference) at the policy's samples.

    It is exp(d) - d - 1 with d = ref_logp - logp.
    """
    difference = ref_logp - logp
    return difference.exp() - difference - 1


def clip_window(
    loss_type: str, low: float | None = None, high: float | None = None
) -> tuple[float, float]:
    """Return (low, high) of the ratio's window [1 - low, 1 + high].

    Missing values default to the loss's own; a missing high equals low if low is given.
    """
    default_low, default_high = LOSSES[loss_type].clip_range
    if high is None:
        high = default_high if low is None else low
    return default_low if low is None else low, high


def grpo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    valid: torch.Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    kl_coef: float = 0.0,
    loss_type: str = "grpo",
    max_completion_length: int | None = None,
    num_tokens: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the clipped policy-gradient loss with a KL penalty.

    Per token L = -min(rho A, clip(rho, 1 - clip_range, 1 + clip_range_high) A) + kl_coef k3,
    rho = exp(logp - old_logp). With cispo the first term is -clip(rho, ..) A logp, in which the
    clipped ratio has no gradient.

    Args:
        logp, old_logp, ref_logp: (N, T) log-probs of the sampled tokens: now (with gradient), when
            sampled, under the reference (may be None if kl_coef is 0). advantages: (N,).
        valid: (N, T) bool, up to and including the token that ends the answer.
        loss_type: grpo: mean over rows of each row's mean over valid tokens; gspo: the same with
            one ratio per row, exp of the mean log-ratio; bnpo, dapo, cispo: sum / num_tokens;
            dr_grpo: sum / (N max_completion_length).
        num_tokens: by default the valid tokens given. The training loop passes the count of the
            whole step over ranks, so that the sum over micro-batches is exact.

    Returns:
        (scalar, stats): detached; policy_loss, the scalar without its KL part, and, to be divided
        by stats["tokens"], kl, clip_low (rho < 1 - clip_range and A < 0), clip_high (rho > 1 +
        clip_range_high and A > 0).

    Raises:
        ValueError: unknown loss_type, or one of max_completion_length and ref_logp is missing.
    """
    if loss_type not in LOSSES:
        raise ValueError(f"--loss_type {loss_type!r} is unknown; known: {', '.join(LOSSES)}")
    definition = LOSSES[loss_type]
    if definition.average == "length" and max_completion_length is None:
        raise ValueError(f"--loss_type {loss_type} needs max_completion_length")
    if kl_coef and ref_logp is None:
        raise ValueError("--kl_coef needs the reference's log-probs")
    high = clip_range if clip_range_high is None else clip_range_high
    # Padding may hold any number, whose exp could overflow.
    log_ratio = torch.where(valid, logp - old_logp, 0.0)  # (N, T)
    if definition.ratio_per_row:
        log_ratio = _row_mean(log_ratio, valid)[:, None]  # (N, 1)
    ratio = log_ratio.exp()
    a = advantages[:, None]  # (N, 1)
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + high)
    if definition.ratio_is_weight:
        policy = -clipped_ratio.detach() * a * torch.where(valid, logp, 0.0)
    else:
        # Pessimistic: the smaller of both, so moving beyond the window gains nothing.
        policy = -torch.minimum(ratio * a, clipped_ratio * a)
    policy = policy.expand_as(logp)  # (N, T)

    def reduce(per_token: torch.Tensor) -> torch.Tensor:
        per_token = torch.where(valid, per_token, 0.0)
        # Every row counts the same, whatever its length.
        if definition.average == "rows":
            return _row_mean(per_token, valid).mean()
        # A constant divisor: long answers weigh no less a token (Dr. GRPO).
        if definition.average == "length":
            return per_token.sum() / (len(per_token) * max_completion_length)
        return per_token.sum() / (valid.sum().clamp(min=1) if num_tokens is None else num_tokens)

    policy_loss = reduce(policy)
    loss = policy_loss
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        # Other tokens may hold anything: both are set to 0 there, and so is their KL.
        kl = k3_kl(torch.where(valid, logp, 0.0), torch.where(valid, ref_logp, 0.0))
    if kl_coef:
        loss = loss + kl_coef * reduce(kl)
    with torch.no_grad():
        rho = ratio.expand_as(logp)
        stats = dict(
            policy_loss=policy_loss.detach(),
            tokens=valid.sum(),
            kl=kl.sum().detach(),
            clip_low=(valid & (rho < 1 - clip_range) & (a < 0)).sum(),
            clip_high=(valid & (rho > 1 + high) & (a > 0)).sum(),
        )
    return loss, stats


def _row_mean(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the (N,) means over valid tokens, 0 for a row without any."""
    return torch.where(valid, values, 0.0).sum(1) / valid.sum(1).clamp(min=1)


def gaussian_logp_per_dim(
    z: torch.Tensor, mean: torch.Tensor, sigma: float, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the (M,) log-densities of z (M, D) under N(mean, sigma^2 L L^T), divided by D.

    The average over dimensions is used because the joint ratio of 256 dimensions would leave any
    clip range after one step.

    Args:
        factor: (D, D) lower triangular L; None is the identity.
    """
    y = whitened(z.float() - mean.float(), factor)
    logp = torch.distributions.Normal(0.0, sigma, validate_args=False).log_prob(y).mean(-1)
    # The change of variables: log det L, the sum of its diagonal's logs, divided by D.
    return logp if factor is None else logp - factor.diagonal().log().mean()


def gaussian_kl_per_dim(
    mean: torch.Tensor, ref_mean: torch.Tensor, sigma: float, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the (M,) exact KL of N(mean, sigma^2 L L^T) to the same around ref_mean, divided by D.

    Args:
        mean, ref_mean: (M, D); factor: as of `gaussian_logp_per_dim`.
    """
    return (whitened(mean.float() - ref_mean.float(), factor) ** 2).mean(-1) / (2 * sigma**2)


def whitened(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Solve L y = x for y (M, D), with x (M, D) and L (D, D) lower triangular or None, identity."""
    if factor is None:
        return x
    return torch.linalg.solve_triangular(factor.to(x.device), x.T, upper=False).T
