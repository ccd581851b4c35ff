"""Compute the loss of rows of a rollout: clipped policy term, KL to the reference, the task's own.

Letters: N rows of a rollout, n of a micro-batch, G generations, T tokens, M actions, D their
parameters.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from rl_train.config.grpo_config import LossConfig
from rl_train.distributed import process_group
from rl_train.engine import ScoreOutput
from rl_train.grpo import LOSSES, divide_by_std, grpo_loss, k3_kl
from rl_train.policies.base import Policy
from rl_train.rollout import RewardOutput, Rollout
from rl_train.utils.nan_check import NanWatcher
from sa2va_hf.to_device import to_device

if TYPE_CHECKING:  # tasks import this module
    from rl_train.tasks.base import Task

# Of one micro-batch: a term of the step's sum, or (total, count) of the step's mean.
Statistic = torch.Tensor | tuple[torch.Tensor | float, torch.Tensor | float]


@dataclass
class ReferenceScores:
    """Log-probs and action parameters of a whole rollout under the reference."""

    logp: torch.Tensor  # (N, T)
    action_params: torch.Tensor | None  # (M, D) parameters of the task's actions, if it has any


@dataclass
class ScoredRollout:
    """Rollout of one task on one batch, with everything that the update needs."""

    task: "Task"
    rollout: Rollout
    outcome: RewardOutput
    reward: torch.Tensor  # (N,) on the CPU, logged; NaN = not scored
    advantages: torch.Tensor  # (N,) on the CPU
    reference: ReferenceScores | None  # None if --kl_coef is 0
    nan_watcher: NanWatcher = field(default_factory=NanWatcher)  # of the model's outputs
    # (N,) reward from which the advantages were computed; None: `reward`. With --scale_components
    # they differ.
    training_reward: torch.Tensor | None = None
    # Whether answers cut at the length limit leave the loss
    mask_truncated_completions: bool = False
    # Groups in whose place another prompt's is learnt from, see `run.resample`
    replaced: set[int] = field(default_factory=set)
    # {(start, stop) of a micro-batch: (n, T) log-probs when it was first scored}, for gspo
    first_logp: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, init=False)

    @property
    def kept(self) -> torch.Tensor:
        """Rows of the groups that are not replaced, (N,) bool."""
        kept = torch.ones(len(self.reward), dtype=torch.bool)
        if self.replaced:
            kept[self.rollout.rows_of(list(self.replaced))] = False
        return kept

    @property
    def in_loss(self) -> torch.Tensor:
        """Rows in the loss, (N,) bool.

        False where the reward is missing, the row is masked or its group replaced.
        """
        in_loss = ~self.reward.isnan() & self.kept
        return in_loss & self.rollout.stopped if self.mask_truncated_completions else in_loss

    @property
    def groups_that_differ(self) -> list[bool]:
        """B bools: True if a row of the group is in the loss with an advantage other than 0."""
        learnable = (self.advantages != 0) & self.in_loss
        return learnable.view(-1, self.rollout.num_generations).any(1).tolist()

    def groups_in_update(self, config: LossConfig) -> list[int]:
        """Return the groups whose rows have a gradient; one that is replaced has none.

        One without a signal (`groups_that_differ`) has none if its loss has no other term: no KL
        and no supervised term of the task's action.
        """
        action = self.task.action
        is_supervised = action is not None and action.has_supervised_term
        learns_anyway = config.kl_coef or is_supervised
        differ = enumerate(self.groups_that_differ)
        return [
            group
            for group, differs in differ
            if group not in self.replaced and (differs or learns_anyway)
        ]

    def select(self, groups: list[int]) -> "ScoredRollout":
        """Return the rows of some groups for an update, none replaced; the outcome stays whole."""
        rollout, reference = self.rollout, self.reference
        rows = rollout.rows_of(groups)
        if reference:
            actions = reference.action_params
            if actions is not None:
                actions = actions[rollout.latents.is_of_rows(rows)]
            reference = ReferenceScores(reference.logp[rows], actions)
        return replace(
            self,
            rollout=rollout.select(groups),
            reward=self.reward[rows],
            advantages=self.advantages[rows],
            reference=reference,
            replaced=set(),
        )

    def faults(self) -> list[str]:
        """Return the names of the rollout's non-finite numbers. NaN rewards are no fault."""
        names = self.nan_watcher.names()
        if self.reference and not self.reference.logp.isfinite().all():
            names.append("the reference's log-probs")
        if self.reward.isinf().any():
            names.append("rewards")
        return [f"{self.task.name}: {name}" for name in names]


@dataclass(frozen=True)
class LossDenominators:
    """Divisors of a step: counts over all ranks, divided by the number of ranks.

    With these divisors, DDP's mean over ranks is the loss of one process with the whole batch.
    """

    rows: float
    tokens: float
    actions: float


@dataclass
class MicroBatch:
    """Rows of a rollout that go through one forward and backward."""

    scored: ScoredRollout
    rows: slice
    denominators: LossDenominators  # of the rollout's task in the whole step
    is_last: bool  # of the step's update on this rank: gradients are then averaged over ranks
    statistics: dict[str, Statistic] = field(default_factory=dict)  # of its loss, filled later


def micro_batches(rows: slice, size: int) -> list[slice]:
    """Cut `rows` into consecutive slices of at most `size` rows."""
    starts = range(rows.start, rows.stop, size)
    return [slice(start, min(start + size, rows.stop)) for start in starts]


def iter_micro_batches(
    scored_rollouts: list[ScoredRollout], size: int, denominators: dict[str, LossDenominators]
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step: at most `size` rows of one rollout each."""
    pieces = _pieces(scored_rollouts, size)
    for number, (scored, rows) in enumerate(pieces, 1):
        is_last = number == len(pieces)
        yield MicroBatch(scored, rows, denominators[scored.task.name], is_last)


def count_micro_batches(scored_rollouts: list[ScoredRollout], size: int) -> int:
    """Return how many micro-batches `iter_micro_batches` yields."""
    return len(_pieces(scored_rollouts, size))


def _pieces(scored_rollouts, size) -> list[tuple[ScoredRollout, slice]]:
    """Return a rollout and at most `size` of its rows for each micro-batch."""
    return [
        (scored, rows)
        for scored in scored_rollouts
        for rows in micro_batches(slice(0, len(scored.rollout)), size)
    ]


def select_for_update(
    scored_rollouts: list[ScoredRollout], config: LossConfig
) -> list[ScoredRollout]:
    """Return a step's rollouts without the groups that have no gradient.

    At least one group is left, since every rank takes part in the averaging of gradients.
    """
    selected = []
    for scored in scored_rollouts:
        groups = scored.groups_in_update(config)
        if len(groups) == len(scored.groups_that_differ):
            selected.append(scored)
        elif groups:
            selected.append(scored.select(groups))
    if not selected:
        # A rollout whose groups are all replaced is skipped: its replacements follow in the list.
        scored = next(scored for scored in scored_rollouts if scored.kept.any())
        first_row = int(scored.kept.nonzero()[0])
        selected = [scored.select([first_row // scored.rollout.num_generations])]
    return selected


def divide_by_batch_std(scored_rollouts: list[ScoredRollout]):
    """Divide advantages by the std of their task's rewards in this step, on all ranks."""
    local = defaultdict(list)  # {task: rewards of this rank}
    for scored in scored_rollouts:
        rewards = scored.reward if scored.training_reward is None else scored.training_reward
        local[scored.task.name] += rewards[scored.kept].tolist()
    # Rewards themselves, not sums: the std is the same to the last bit on all ranks.
    ranks = process_group.gather_objects(local)
    for scored in scored_rollouts:
        rewards = [value for rank in ranks for value in rank[scored.task.name]]
        scored.advantages = divide_by_std(
            scored.advantages, torch.tensor(rewards, dtype=torch.float64)
        )


def reference_scores(
    policy: Policy, task: "Task", rollout: Rollout, micro_batch_size: int
) -> ReferenceScores:
    """Score a whole rollout under the role in use."""
    logps, actions = [], []
    for rows in micro_batches(slice(0, len(rollout)), micro_batch_size):
        scores = policy.score(rollout, rows)
        logps.append(scores.logp)
        if task.action:
            actions.append(task.action.distribution_params(rollout, rows, scores))
    return ReferenceScores(torch.cat(logps), torch.cat(actions) if actions else None)


def loss_denominators(
    scored_rollouts: list[ScoredRollout], num_ranks: int
) -> tuple[dict[str, LossDenominators], bool]:
    """Return ({task: `LossDenominators`} of this step, True if any rank has a group with a signal).

    Raises:
        FloatingPointError: a rollout of any rank has `faults`; raised on all ranks.
    """
    counts, faults = Counter(learnable=0), []
    for scored in scored_rollouts:
        name, in_loss, latents = scored.task.name, scored.in_loss, scored.rollout.latents
        faults += scored.faults()
        counts["learnable"] += sum(scored.groups_that_differ)
        # Rows without a reward count too: losses by rows divide by a fixed number.
        counts[name, "rows"] += int(scored.kept.sum())
        counts[name, "tokens"] += int(scored.rollout.valid[in_loss].sum())
        counts[name, "actions"] += int(in_loss[latents.rows].sum()) if latents else 0
    total = process_group.all_sum(counts, faults)
    # At least 1: a step may have no action, and its sum is 0 then.
    mean = {key: max(count, 1) / num_ranks for key, count in total.items()}
    denominators = {
        name: LossDenominators(mean[name, "rows"], mean[name, "tokens"], mean[name, "actions"])
        for name in dict.fromkeys(scored.task.name for scored in scored_rollouts)
    }
    return denominators, total["learnable"] > 0


@torch.no_grad()
def check_finite_log_probs(policy: Policy, scored_rollouts: list[ScoredRollout], size: int):
    """Raise FloatingPointError, on all ranks, if the newest weights' log-probs are not finite.

    It scores each task's first `size` rows, so that weights which an update has spoilt are not
    saved as a checkpoint.
    """
    policy.unshard_base()
    faults = []
    for scored in scored_rollouts:
        if not policy.score(scored.rollout, slice(0, size)).logp.isfinite().all():
            faults.append(f"{scored.task.name}: log-probs after the update")
    process_group.raise_on_any_rank(faults)


class MicroBatchLoss(torch.nn.Module):
    """Module that computes the loss of a micro-batch, as DistributedDataParallel needs one.

    Args:
        policy: its trainable weights are the module's parameters.
        max_tokens: length limit of an answer, the divisor of dr_grpo.
    """

    def __init__(self, policy: Policy, config: LossConfig, max_tokens: int):
        super().__init__()
        self.trainable = torch.nn.ParameterList(policy.trainable.values())
        self.policy, self.config, self.max_tokens = policy, config, max_tokens

    def forward(
        self, micro_batch: MicroBatch | None
    ) -> tuple[torch.Tensor, dict[str, Statistic]] | None:
        """Return (loss of its rows, {name: statistic}); without one see `join_other_ranks`.

        The loss is normalised over the whole step and multiplied by the task's weight.

        In the last micro-batch, connect every trainable parameter to the loss so that DDP reduces
        all of them.

        Statistics are detached, and numbers add up to the step's value; sampler_gap is a maximum.
        Statistics called sampler_.. compare the scorer's log-probs with those at sampling: largest
        and mean difference, and KL(sampler || scorer) by k3. They are meaningful under the weights
        that sampled.
        """
        if micro_batch is None:
            return self.policy.engine.take_part()
        scored, rows = micro_batch.scored, micro_batch.rows
        denominators = micro_batch.denominators
        scores = self.policy.score(scored.rollout, rows)
        loss, statistics = self._text_loss(scored, rows, scores, denominators)
        if scored.task.action:
            action_terms, action_statistics = scored.task.action.loss(
                scored, rows, scores, denominators, self.config
            )
            loss = sum(action_terms, loss)
            statistics |= action_statistics
        statistics["loss"] = loss.detach()
        loss = scored.task.loss_weight * loss
        if micro_batch.is_last:
            loss = process_group.touch_all_params(loss, self.trainable)
        return loss, statistics

    def _text_loss(
        self,
        scored: ScoredRollout,
        rows: slice,
        scores: ScoreOutput,
        denominators: LossDenominators,
    ) -> tuple[torch.Tensor, dict[str, Statistic]]:
        """Return (loss of the sampled tokens, {name: statistic}).

        The old log-probs are the sampler's. A loss with a ratio per row (gspo) takes those of the
        first update's scoring, since its clip range is narrower than the sampler's gap to the
        scorer in bfloat16.
        """
        rollout, config, logp = scored.rollout, self.config, scores.logp  # logp (n, T)
        old_logp = rollout.logp[rows]
        if LOSSES[config.loss_type].ratio_per_row:
            old_logp = scored.first_logp.setdefault((rows.start, rows.stop), logp.detach())
        valid = to_device(rollout.valid[rows] & scored.in_loss[rows, None], logp.device)  # (n, T)
        advantages = to_device(scored.advantages[rows], logp.device)  # (n,)
        # Means over rows are scaled by the rows' fraction of the step; token sums already are.
        mean_over_rows = LOSSES[config.loss_type].average != "tokens"
        fraction = len(valid) / denominators.rows if mean_over_rows else 1.0
        loss, stats = grpo_loss(
            logp,
            old_logp,
            scored.reference and scored.reference.logp[rows],
            advantages,
            valid,
            **config.clip,
            kl_coef=config.kl_coef,
            loss_type=config.loss_type,
            max_completion_length=self.max_tokens,
            num_tokens=denominators.tokens,
        )
        loss = fraction * loss
        tokens = stats["tokens"]
        # Equal outside of `valid`, where there is no gap.
        scorer_logp = torch.where(valid, logp.detach(), 0.0)
        sampler_logp = torch.where(valid, rollout.logp[rows], 0.0)
        gap = (scorer_logp - sampler_logp).abs()
        statistics = dict(
            policy_loss=fraction * stats["policy_loss"],
            clip_frac=(stats["clip_low"] + stats["clip_high"], tokens),
            entropy=((scores.entropy * valid).sum(), tokens),
            sampler_gap=gap.max(),
            sampler_gap_mean=(gap.sum(), tokens),
            sampler_k3=(k3_kl(sampler_logp, scorer_logp).sum(), tokens),
        )
        if scored.reference:
            statistics["kl_div"] = (stats["kl"], tokens)
        return loss, statistics


def join_other_ranks(ddp: torch.nn.Module, policy: Policy, num_micro_batches: int):
    """Take part in the micro-batches that other ranks have beyond the `num_micro_batches` here.

    With --fsdp, by which ranks gather layers together, a collective; else nothing happens. It comes
    before this rank's own: in the last one gradients are averaged, so all ranks must be at theirs.

    Args:
        ddp: of `MicroBatchLoss`, through which it goes, as DDP's first forwards are collectives.
    """
    if policy.sharded_vision is None:
        return
    for _ in range(max(process_group.gather_objects(num_micro_batches)) - num_micro_batches):
        with process_group.sync_gradients(ddp, last=False):
            ddp(None)
