"""The loss of some rows of a rollout: clipped policy term, KL to the reference, the task's own.

Letters: N rows of a rollout, n of a micro-batch, T tokens, M actions, D their parameters.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from rl_train import distributed
from rl_train.config import LossConfig
from rl_train.finite import Watch
from rl_train.grpo import grpo_loss, k3_kl, mean_entropy, over_spread
from rl_train.types import Outcome, Rollout
from sa2va_hf.transfer import send


@dataclass
class Reference:
    logp: torch.Tensor  # (N, T)
    action: torch.Tensor | None  # (M, D) parameters of the task's actions, if it has any


@dataclass
class Work:
    """One task's rollout of one batch, with all that the update needs."""

    task: object
    rollout: Rollout
    outcome: Outcome
    reward: torch.Tensor  # (N,) on the CPU, NaN = not scored
    advantages: torch.Tensor  # (N,) on the CPU
    reference: Reference | None  # None if --kl_coef is 0
    watch: Watch = field(default_factory=Watch)  # of the model's outputs
    counted: torch.Tensor | None = None  # (N,) that the advantages are of, if not of the reward
    masked: torch.Tensor | None = None  # (N,) bool, rows that leave the loss: --mask_truncated

    @property
    def scored(self) -> torch.Tensor:
        """(N,) bool, False where the reward is missing or masked: such rows leave the loss."""
        missing = self.reward.isnan()
        return ~(missing if self.masked is None else missing | self.masked)

    @property
    def varying(self) -> list[bool]:
        """Of each group whether a row in the loss has an advantage that is not 0."""
        learnt = (self.advantages != 0) & self.scored
        return learnt.view(-1, self.rollout.num_generations).any(1).tolist()

    def faults(self) -> list[str]:
        """What is not finite of the rollout and of what was said of it. NaN rewards are fine."""
        names = self.watch.names()
        if self.reference and not self.reference.logp.isfinite().all():
            names.append("the reference's log-probs")
        if self.reward.isinf().any():
            names.append("rewards")
        return [f"{self.task.name}: {name}" for name in names]

    @cached_property
    def _first(self) -> torch.Tensor:
        return torch.full_like(self.rollout.logp, torch.nan)  # (N, T)

    def first_scored(self, rows: slice, logp: torch.Tensor) -> torch.Tensor:
        """(n, T) log-probs of `rows` when they were first scored: `logp`, if that is now."""
        first = self._first[rows]
        return first.copy_(torch.where(first.isnan(), logp.detach(), first))


@dataclass(frozen=True)
class Totals:
    """Divisors of a step: counts over all ranks, divided by their number.

    So the ranks' mean of sums over micro-batches is what one process computes on the joined batch.
    """

    rows: float
    tokens: float
    actions: float


def micro_batches(num_rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def micro_batches_of(
    work: list[Work], size: int, only_varying: bool = False
) -> Iterator[tuple[Work, slice, bool]]:
    """(work, its rows, whether it is the step's last) for each micro-batch of a step.

    Args:
        only_varying: rows of no other groups. A rank without such has one micro-batch of no rows,
            since in the last all ranks' gradients are averaged.
    """
    parts = [
        (w, slice(run.start + rows.start, run.start + rows.stop))
        for w in work
        for run in (varying_rows(w) if only_varying else [slice(0, len(w.rollout))])
        for rows in micro_batches(run.stop - run.start, size)
    ] or [(work[0], slice(0, 0))]
    for number, (w, rows) in enumerate(parts, 1):
        yield w, rows, number == len(parts)


def varying_rows(work: Work) -> list[slice]:
    """The rows of groups that are `varying`; neighbouring ones together."""
    G, runs = work.rollout.num_generations, []
    for group in (number for number, varies in enumerate(work.varying) if varies):
        start = runs.pop().start if runs and runs[-1].stop == group * G else group * G
        runs.append(slice(start, (group + 1) * G))
    return runs


def divide_by_batch(work: list[Work]):
    """Divide advantages by the std of their task's rewards in this step, on all ranks."""
    mine: dict[str, list[float]] = {}
    for w in work:
        counted = w.reward if w.counted is None else w.counted
        mine.setdefault(w.task.name, []).extend(counted.tolist())
    of_ranks = distributed.gather_objects(mine)
    for w in work:
        rewards = [value for rank in of_ranks for value in rank[w.task.name]]
        w.advantages = over_spread(w.advantages, torch.tensor(rewards, dtype=torch.float64))


def score_all(policy, task, rollout: Rollout, micro_batch_size: int) -> Reference:
    """What the role in use says of a whole rollout."""
    logps, actions = [], []
    for rows in micro_batches(len(rollout), micro_batch_size):
        scores = policy.score(rollout, rows)
        logps.append(scores.logp)
        if task.action:
            actions.append(task.action.parameters(rollout, rows, scores))
    return Reference(torch.cat(logps), torch.cat(actions) if actions else None)


def step_totals(work: list[Work], num_ranks: int) -> tuple[dict[str, Totals], bool]:
    """({task: `Totals`} of this step, whether any rank has a group that is `varying`).

    Raises FloatingPointError, on all ranks, if any rollout of any has `faults`.
    """
    counts = Counter(learnable=0)
    for w in work:
        name, scored = w.task.name, w.scored
        counts["learnable"] += sum(w.varying)
        counts[name, "rows"] += len(w.reward)
        counts[name, "tokens"] += int(w.rollout.valid[scored].sum())
        actions = w.task.action.count(w.rollout, scored) if w.task.action else 0
        counts[name, "actions"] += actions
    total = distributed.all_sum(counts, [fault for w in work for fault in w.faults()])
    mean = {key: max(count, 1) / num_ranks for key, count in total.items()}
    kinds = ("rows", "tokens", "actions")
    names = dict.fromkeys(w.task.name for w in work)
    totals = {name: Totals(**{kind: mean[name, kind] for kind in kinds}) for name in names}
    return totals, total["learnable"] > 0


@torch.no_grad()
def check_answers(policy, work: list[Work], size: int):
    """Raise FloatingPointError, on all ranks, if the newest weights' log-probs are not finite.

    Of each task's first `size` rows: it keeps weights that an update has spoilt out of checkpoints.
    """
    faults = []
    for w in work:
        if not policy.score(w.rollout, slice(0, size)).logp.isfinite().all():
            faults.append(f"{w.task.name}: log-probs after the update")
    distributed.raise_on_any_rank(faults)


class MicroBatchLoss(nn.Module):
    """The loss of a micro-batch as a module of what trains, as DistributedDataParallel wants it.

    Args:
        policy: whose trainables and scores; max_tokens: of an answer, the divisor of dr_grpo.
    """

    def __init__(self, policy, config: LossConfig, max_tokens: int):
        super().__init__()
        self.trainable = nn.ParameterList(policy.trainable.values())
        self.policy, self.config, self.max_tokens = policy, config, max_tokens

    def forward(self, work: Work, rows: slice, totals: Totals, last: bool):
        """(loss of `rows`, normalised over the whole step, times the task's weight; statistics).

        With `last` it holds every trainable, as DistributedDataParallel wants it of a backward. Of
        the statistics {name: detached} a pair is a total and its count, a single number adds up to
        the step's value; sampler_gap is a maximum. Those called sampler_.. compare with the
        log-probs at sampling: under the weights that sampled, how far the two ways to compute lie
        apart, as the largest and the mean difference and as KL(sampler || scorer) by k3.
        Without rows it is 0 and has none.
        """
        if rows.start == rows.stop:
            nothing = torch.zeros((), device=self.policy.device)
            return distributed.reaching(nothing, self.trainable), {}
        bonus = self.config.entropy_coef > 0
        scores = self.policy.score(work.rollout, rows, entropy_gradient=bonus)
        loss, statistics = self._text(work, rows, scores, totals)
        if work.task.action:
            terms, more = work.task.action.loss(work, rows, scores, totals, self.config)
            for term in terms:
                loss = loss + term
            statistics |= more
        statistics["loss"] = loss.detach()
        loss = work.task.weight * loss
        if last:
            loss = distributed.reaching(loss, self.trainable)
        return loss, statistics

    def _text(self, work: Work, rows: slice, scores, totals: Totals):
        """(loss of the sampled tokens, its statistics).

        The old log-probs are the sampler's. But gspo's window is narrower than its gap to the
        scorer in bfloat16, so there they are what the first update scores, by the same weights.
        """
        rollout, config, old = work.rollout, self.config, work.rollout.logp[rows]
        if config.loss_type == "gspo":
            old = work.first_scored(rows, scores.logp)
        valid, advantages = (  # (n, T), (n,)
            send(x, scores.logp.device)
            for x in (rollout.valid[rows] & work.scored[rows, None], work.advantages[rows])
        )
        by_rows = config.loss_type in ("grpo", "gspo", "dr_grpo")
        share = len(valid) / totals.rows if by_rows else 1.0
        loss, stats = grpo_loss(
            scores.logp,
            old,
            work.reference and work.reference.logp[rows],
            advantages,
            valid,
            **config.clip,
            kl_coef=config.kl_coef,
            loss_type=config.loss_type,
            max_completion_length=self.max_tokens,
            num_tokens=totals.tokens,
        )
        loss = share * loss
        if config.entropy_coef:
            loss = loss - config.entropy_coef * mean_entropy(scores.entropy, valid, totals.tokens)
        tokens = stats["tokens"]
        scored, sampled = (
            torch.where(valid, x, 0.0) for x in (scores.logp.detach(), rollout.logp[rows])
        )
        gap = (scored - sampled).abs()
        statistics = dict(
            policy_loss=share * stats["policy_loss"],
            clip_frac=(stats["clip_low"] + stats["clip_high"], tokens),
            entropy=((scores.entropy.detach() * valid).sum(), tokens),
            sampler_gap=gap.max(),
            sampler_gap_mean=(gap.sum(), tokens),
            sampler_k3=(k3_kl(sampled, scored).sum(), tokens),
        )
        if work.reference:
            statistics["kl_div"] = (stats["kl"], tokens)
        return loss, statistics
