"""Rows that leave the loss or the update, the batch's scale, and the entropy's gradient."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train import loss as objective
from rl_train.config.grpo_config import LossConfig
from rl_train.distributed import process_group
from rl_train.grpo import group_advantages
from rl_train.loss import (
    LossDenominators,
    ScoredRollout,
    divide_by_batch_std,
    loss_denominators,
    select_for_update,
)
from rl_train.rollout import SampledLatents
from tests.updates import (
    POLICY_ALONE,
    backward,
    largest_difference,
    moved_policy,
    reference_of,
    roll,
    roll_loops,
    task_of,
    work_of,
)

model = pytest.fixture(scope="module")(moved_policy)
rollouts = pytest.fixture(scope="module")(roll_loops)


class Rows(SimpleNamespace):
    def __len__(self):
        return len(self.valid)


def without_model(rewards, masked=None, size=2, name="loop1", scale="group"):
    """Work of groups of `size` rows of three tokens."""
    rewards, rows = torch.tensor(rewards), len(rewards)
    rollout = Rows(
        valid=torch.ones(rows, 3, dtype=torch.bool),
        num_generations=size,
        stopped=torch.ones(rows) > 0 if masked is None else ~torch.tensor(masked),
        latents=None,
    )
    task = SimpleNamespace(name=name, action=None)
    advantages = group_advantages(rewards, size, scale)
    return ScoredRollout(
        task,
        rollout,
        None,
        rewards,
        advantages,
        None,
        mask_truncated_completions=masked is not None,
    )


# --mask_truncated_completions


def test_masked_rows_leave_the_loss_as_rows_without_reward_do(model, rollouts):
    """Their advantage may be anything; tokens and latents do not count."""
    kept = torch.tensor([True, False, True, True])
    for loop in (1, 2):
        task = task_of(model, loop, **(dict(mask_loss_coef=0.1) if loop == 2 else {}))
        work = work_of(model, task, rollouts[loop], torch.tensor([0.7, 50.0, -0.7, 0.7]))
        config = LossConfig(kl_coef=0.1)
        cut = replace(
            work, rollout=replace(work.rollout, stopped=kept), mask_truncated_completions=True
        )
        masked = backward(model, cut, config)
        unscored = replace(work, reward=torch.where(kept, work.reward, torch.nan))
        expected = backward(model, unscored, config)
        assert largest_difference(masked[0], expected[0]) == 0 and masked[2] == expected[2]
        assert masked[1] == expected[1]
        assert masked[1]["entropy"][1] == rollouts[loop].valid[kept].sum()


def test_a_masked_row_counts_in_its_group_and_not_in_the_divisors():
    """The two cut answers of rewards 1, 0 | 1, 0 | .5, .5 give their neighbours a sign."""
    work = without_model([1.0, 0, 1, 0, 0.5, 0.5], [False, True, True, True, False, False])
    s = 0.5 / (0.5**0.5 + 1e-4)
    assert work.advantages.tolist() == pytest.approx([s, -s, s, -s, 0, 0])
    assert work.in_loss.tolist() == [True, False, False, False, True, True]
    assert work.groups_that_differ == [True, False, False]
    totals, learnable = loss_denominators([work], 1)
    assert learnable and totals == {"loop1": LossDenominators(6, 9, 1)}
    all_cut = without_model([1.0, 0], [True, True])
    assert not loss_denominators([all_cut], 1)[1]  # nothing to learn: no step is taken


def test_selected_latents_keep_their_own_masks_and_regions():
    """Rows 0 and 1 of group 0 have two and no [SEG], rows 2 and 3 of group 1 one and two."""
    masks, region = [torch.ones(n, 2, 2) > 0 for n in (2, 0, 1, 2)], torch.ones(2, 2) > 0
    latents = SampledLatents(
        rows=torch.tensor([0, 0, 2, 3, 3]),
        masks=[torch.zeros(2, 2) > 0] * 4,
        z=torch.arange(5.0)[:, None],
        noise=torch.zeros(5, 1),
        logp=torch.arange(5.0),
        confidence=[0.1, 0.2, 0.3, 0.4],
        seg_masks=masks,
        targets=[region, None, None, region, None],
    )
    second = latents.select(torch.tensor([2, 3]))
    assert second.rows.tolist() == [0, 1, 1] and second.z[:, 0].tolist() == [2, 3, 4]
    assert second.logp.tolist() == [2, 3, 4] and second.confidence == [0.3, 0.4]
    assert [len(of_row) for of_row in second.seg_masks] == [1, 2]
    assert second.targets[0] is None and second.targets[1] is region and second.targets[2] is None
    without = replace(latents, seg_masks=None, targets=None).select(torch.tensor([0, 1]))
    assert without.seg_masks is None and without.targets is None


# Groups without a signal


@pytest.mark.parametrize("loop", [1, 2])
def test_a_group_of_equal_rewards_costs_no_backward_and_changes_no_gradient(
    model, scenes, prepare, loop
):
    """The middle one of three groups is left out; a third of forward and backward is saved."""
    batch, task = prepare(scenes[:3], model.processor), task_of(model, loop)
    advantages = torch.tensor([0.7, -0.7, 0, 0, -0.4, 0.4])
    work = work_of(model, task, roll(model, task, batch), advantages)
    assert work.groups_that_differ == [True, False, True]
    plain, plain_sums, plain_loss = backward(model, work, POLICY_ALONE)
    (selected,) = select_for_update([work], POLICY_ALONE)
    assert len(selected.rollout) == 4 and selected.rollout.ids.shape[0] == 4
    found, sums, loss = backward(model, selected, POLICY_ALONE, denominators_of=work)
    largest = max(gradient.abs().max().item() for gradient in plain.values())
    assert largest > 1e-3 and largest_difference(plain, found) < 1e-6 * max(largest, 1)
    assert loss == pytest.approx(plain_loss, abs=1e-6)
    assert sums["policy_loss"] == pytest.approx(plain_sums["policy_loss"], abs=1e-6)
    assert sums["entropy"][1] == plain_sums["entropy"][1] - work.rollout.valid[2:4].sum()
    # What is left out has no gradient, to the last bit.
    equal, _, none = backward(model, work.select([1]), POLICY_ALONE, denominators_of=work)
    assert none == 0 and not any(gradient.any() for gradient in equal.values())


def test_a_group_of_equal_rewards_stays_where_another_term_learns_from_it(model, rollouts):
    """The KL or loop 2's mask term; then the very same rollout is returned."""
    advantages = torch.tensor([0.7, -0.7, 0, 0])
    for config, options in (
        (LossConfig(kl_coef=0.1), {}),
        (POLICY_ALONE, dict(mask_loss_coef=0.1)),
    ):
        work = work_of(model, task_of(model, 2, **options), rollouts[2], advantages)
        (selected,) = select_for_update([work], config)
        assert selected is work
        gradients, _, _ = backward(model, work.select([1]), config, denominators_of=work)
        kl_is_zero = config.kl_coef > 0  # the weights in use are their own reference
        assert kl_is_zero or max(g.abs().max() for g in gradients.values()) > 0
    assert (
        len(
            select_for_update(
                [work_of(model, task_of(model, 2), rollouts[2], advantages)], POLICY_ALONE
            )[0].rollout
        )
        == 2
    )


def test_the_kl_of_a_group_of_equal_rewards_is_learnt_from(model, rollouts):
    """Its gradient, selected or not, is that of the KL alone; the reference's rows go with it."""
    for loop in (1, 2):
        task, config = task_of(model, loop), LossConfig(kl_coef=0.1)
        own = reference_of(model, task, rollouts[loop])
        actions = own.action_params if own.action_params is None else own.action_params + 0.1
        reference = objective.ReferenceScores(own.logp - 0.3, actions)
        work = work_of(model, task, rollouts[loop], torch.zeros(4), reference=reference)
        whole, _, _ = backward(model, work, config)
        halves = [
            backward(model, work.select([group]), config, denominators_of=work)[0]
            for group in (0, 1)
        ]
        added = {name: halves[0][name] + halves[1][name] for name in whole}
        largest = max(gradient.abs().max().item() for gradient in whole.values())
        assert largest > 1e-4 and largest_difference(whole, added) < 1e-4 * largest


def test_a_rank_without_a_signal_keeps_a_group(model, rollouts):
    """Other ranks may have one, and all take part in the averaging."""
    works = [
        work_of(model, task_of(model, loop), rollouts[loop], torch.zeros(4)) for loop in (1, 2)
    ]
    (selected,) = select_for_update(works, POLICY_ALONE)
    assert selected.task.name == "loop1" and len(selected.rollout) == 2


# --scale_rewards


def test_the_scale_is_the_loss_s_own_unless_it_is_said():
    for loss_type, scale in (("dapo", "group"), ("gspo", "group"), ("dr_grpo", "none")):
        assert LossConfig(loss_type=loss_type).scale == scale
        for said in ("group", "batch", "none"):
            assert LossConfig(loss_type=loss_type, scale_rewards=said).scale == said


def test_the_batch_is_the_step_s_on_all_ranks(monkeypatch):
    """Two batches of this rank and one of another; of scaled components, if these count."""
    rewards = [0.0, 1, 4, 2, 0.5, 0.5]  # the last two are the other rank's
    works = [
        without_model(part, name=name, scale="none")
        for name, part in (("a", rewards[:2]), ("a", rewards[2:4]), ("b", [0.0, 4.0]))
    ]
    works[2] = replace(works[2], reward=torch.zeros(2), training_reward=works[2].reward)
    there = dict(a=rewards[4:], b=[torch.nan, 8.0])
    monkeypatch.setattr(process_group, "gather_objects", lambda mine: [mine, there])
    divide_by_batch_std(works)
    std = (sum((r - 8 / 6) ** 2 for r in rewards) / 5) ** 0.5 + 1e-4
    assert works[0].advantages.tolist() == pytest.approx([-0.5 / std, 0.5 / std])
    assert works[1].advantages.tolist() == pytest.approx([1 / std, -1 / std])
    assert works[2].advantages.tolist() == pytest.approx([-2 / 4.0001, 2 / 4.0001])  # of 0, 4, 8
    assert works[2].advantages.dtype == torch.float32


def test_dr_grpo_without_a_scale_is_dr_grpo():
    """Its paper's gradient at ratio 1: each token weighs (r - mean) / (rows x longest answer)."""
    config, longest = LossConfig(loss_type="dr_grpo", scale_rewards="none", kl_coef=0.0), 5
    rewards = torch.tensor([0.2, 1.0, 0.7, 0.7])
    valid = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    logp = torch.full((4, 3), -1.0, requires_grad=True)
    loss, _ = objective.grpo_loss(
        logp,
        logp.detach(),
        None,
        group_advantages(rewards, 2, config.scale),
        valid,
        **config.clip,
        loss_type=config.loss_type,
        max_completion_length=longest,
        num_tokens=1.0,  # which it does not divide by
    )
    loss.backward()
    expected = torch.tensor([[0.4, 0.4, 0.4], [-0.4, 0, 0], [0, 0, 0], [0, 0, 0]]) / (4 * longest)
    torch.testing.assert_close(logp.grad, expected)
