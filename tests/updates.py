"""Rollouts of both loops on drawn scenes and one update's losses: what tests of the loss share."""

import dataclasses

import torch

from rl_train.config.grpo_config import LossConfig
from rl_train.loss import (
    LossDenominators,
    MicroBatchLoss,
    ReferenceScores,
    ScoredRollout,
    iter_micro_batches,
    loss_denominators,
    reference_scores,
)
from rl_train.roles import Roles
from rl_train.tasks import CaptionMaskCaption, MaskCaptionMask
from rl_train.tasks.base import TaskContext
from rl_train.utils.rng import RowRNG

GENERATIONS, STEPS, SIGMA = 2, 14, 0.3
ADVANTAGES = torch.tensor([0.7, -0.7, -0.7, 0.7])  # of 2 scenes x GENERATIONS
POLICY_ALONE = LossConfig(kl_coef=0.0)


def moved_policy(policy):
    """A policy, its LoRA's B no longer 0 (where no gradient would reach A)."""
    model = policy()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.trainable.items():
            if ".lora_B." in name:
                p += 0.01 * torch.randn(p.shape, generator=generator)
    return model


def task_of(model, loop: int, roles: Roles | None = None, max_new_tokens=STEPS, **options):
    """Loop 1's or 2's task with these options; without roles it can ask, not judge."""
    kind = (MaskCaptionMask, CaptionMaskCaption)[loop - 1]
    if loop == 2:
        options = dict(latent_std=SIGMA, mask_loss_coef=0.0) | options
    task = kind(kind.Options(**options), TaskContext(model, roles, max_new_tokens))
    if loop == 2:  # METEOR and likelihood, so that both are computed
        task.set_reward_weights({"meteor": 0.5, "likelihood": 0.5})
    return task


def roll(model, task, batch, num_generations=GENERATIONS, max_new_tokens=STEPS, step=0):
    """A rollout of the task on a batch, with its action, as the loop makes it."""
    number = dict(loop2=1).get(task.name, 0)
    features, draws = (
        model.encode(batch),
        RowRNG(0, step, number, batch.index, num_generations),
    )
    prompts = task.prompts(batch, features)
    uniforms = draws.uniforms(max_new_tokens)
    rollout = model.sample(batch, features, prompts, num_generations, max_new_tokens, uniforms)
    if task.action:
        rollout.latents = task.action.draw(rollout, draws)
        assert len(set(rollout.latents.rows.tolist())) > 1, "the demo model answers with [SEG]"
    return rollout


def roll_loops(model, scenes, prepare) -> dict:
    """{loop: its rollout of 4 rows about the first two scenes}."""
    two = prepare(scenes[:2], model.processor)
    return {loop: roll(model, task_of(model, loop), two) for loop in (1, 2)}


@torch.no_grad()
def reference_of(model, task, rollout) -> ReferenceScores:
    """Scores of a rollout by the weights in use."""
    return reference_scores(model, task, rollout, len(rollout))


def work_of(
    model, task, rollout, advantages=ADVANTAGES, scored=None, reference=None
) -> ScoredRollout:
    """The rollout with these advantages, unequal rewards, and the weights in use as reference."""
    reward = torch.arange(len(rollout)).float()
    if scored is not None:
        reward = torch.where(scored, reward, torch.nan)
    reference = reference or reference_of(model, task, rollout)
    return ScoredRollout(task, rollout, None, reward, advantages, reference)


def totals_by_hand(work: ScoredRollout) -> LossDenominators:
    """Denominators of a step of one rank with this rollout alone."""
    rollout, scored = work.rollout, work.in_loss
    actions = int(scored[rollout.latents.rows].sum()) if work.task.action else 0
    return LossDenominators(len(rollout), int(rollout.valid[scored].sum()), max(actions, 1))


def backward(
    model,
    work: ScoredRollout,
    config: LossConfig = POLICY_ALONE,
    micro_batch_size=4,
    denominators_of: ScoredRollout | None = None,
):
    """({parameter: gradient}, statistics summed over micro-batches, loss) of one update.

    Args:
        denominators_of: the step's rollout, if `work` is a selection of it.
    """
    step = denominators_of or work
    denominators, _ = loss_denominators([step], 1)
    assert denominators[step.task.name] == totals_by_hand(step)
    loss_of = MicroBatchLoss(model, config, STEPS)
    for p in model.trainable.values():
        p.grad = None
    sums, value = {}, 0.0
    for micro_batch in iter_micro_batches([work], micro_batch_size, denominators):
        loss, statistics = loss_of(micro_batch)
        loss.backward()
        value += loss.item()
        for name, x in statistics.items():
            x = tuple(map(float, x)) if isinstance(x, tuple) else float(x)
            sums[name] = added(sums[name], x) if name in sums else x
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.trainable.items()
    }
    for p in model.trainable.values():
        p.grad = None
    return gradients, sums, value


def added(one, other):
    """The sum of two numbers or of two (total, count)."""
    return tuple(map(sum, zip(one, other))) if isinstance(one, tuple) else one + other


def mean(statistic) -> float:
    """The mean of a (total, count)."""
    return statistic[0] / statistic[1]


def reached(model, gradients) -> set[str]:
    """The groups of trainables that a gradient reaches."""
    return {model.group_of[name] for name, g in gradients.items() if g.abs().max() > 0}


def largest_difference(a, b) -> float:
    """Return the largest difference of two sets of tensors of the same names."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def equal(a, b) -> bool:
    """Return whether two nests of records, lists, dictionaries and tensors hold the same."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and equal(vars(a), vars(b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def in_backward(loss) -> set[int]:
    """The ids of the tensors to which a backward of the loss comes, if with no gradient."""
    nodes, seen, found = [loss.grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return found
