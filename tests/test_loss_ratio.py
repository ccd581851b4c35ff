"""References of a loss: the reference model, if it is asked, and log-probs at sampling."""

from dataclasses import replace

import pytest
import torch

from rl_train.config.grpo_config import LossConfig
from tests.updates import (
    POLICY_ALONE,
    backward,
    largest_difference,
    mean,
    moved_policy,
    roll_loops,
    task_of,
    work_of,
)

model = pytest.fixture(scope="module")(moved_policy)
rollouts = pytest.fixture(scope="module")(roll_loops)


def test_without_a_kl_the_reference_changes_nothing_and_is_not_needed(model, rollouts):
    """The loss and every gradient, bit for bit; but there is no KL to be logged, not one of 0."""
    for loop in (1, 2):
        work = work_of(model, task_of(model, loop), rollouts[loop])
        asked, sums, loss = backward(model, work, POLICY_ALONE)
        alone, fewer, same = backward(model, replace(work, reference=None), POLICY_ALONE)
        assert loss == same and largest_difference(asked, alone) == 0
        if loop == 2:
            assert sums["latent_joint_kl"][1] > 0 == fewer["latent_joint_kl"][1]
        assert sums.keys() - fewer.keys() == {"kl_div"}
        assert all(fewer[name] == sums[name] for name in fewer if "joint_kl" not in name)
        with pytest.raises(ValueError, match="--kl_coef needs the reference"):
            backward(model, replace(work, reference=None), LossConfig(kl_coef=0.1))


def test_the_gap_of_sampler_and_scorer_by_hand(model, rollouts):
    """The sampler's log-probs are moved by ln 2 where the answer counts, and by 9 elsewhere."""
    rollout, scored = rollouts[1], torch.tensor([True, True, True, False])
    with torch.no_grad():
        exact = model.score(rollout).logp
    counts = rollout.valid & scored[:, None]
    sampled = exact + torch.where(counts, -(torch.tensor(2.0).log()), 9.0)
    sampled[0, 0] = exact[0, 0] + torch.tensor(2.0).log()
    work = work_of(model, task_of(model, 1), replace(rollout, logp=sampled), scored=scored)
    _, sums, _ = backward(model, work)
    assert sums["sampler_gap"] == pytest.approx(0.693147, abs=1e-4)
    assert mean(sums["sampler_gap_mean"]) == pytest.approx(0.693147, abs=1e-4)
    n, up, down = int(counts.sum()), 1 - 0.693147, 0.693147 - 0.5  # k3 at d = ln 2 and -ln 2
    assert sums["sampler_k3"] == (pytest.approx((n - 1) * up + down, abs=1e-3), n)


def test_the_ratio_of_gspo_is_one_at_the_first_update_whatever_the_sampler_said(model, rollouts):
    """Its window is narrower than bfloat16's gap; the second update compares with the first."""
    rollout, config = rollouts[1], LossConfig(loss_type="gspo", kl_coef=0.0)
    task, off = task_of(model, 1), replace(rollout, logp=rollout.logp + 0.01)
    expected = backward(model, work_of(model, task, rollout), config)[2]
    work = work_of(model, task, off)
    _, sums, loss = backward(model, work, config, micro_batch_size=2)
    assert loss == pytest.approx(expected, abs=1e-6) and sums["clip_frac"][0] == 0
    assert sums["sampler_gap"] == pytest.approx(2 * 0.01, abs=1e-4)  # of two micro-batches
    parameter = next(p for n, p in model.trainable.items() if ".lora_B." in n)
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter += 1.0
    _, one, _ = backward(model, work, config, micro_batch_size=2)
    work.advantages = -work.advantages
    _, other, _ = backward(model, work, config, micro_batch_size=2)
    with torch.no_grad():
        parameter.copy_(before)
    # A row outside the window is clipped with one sign of its advantage: no luck with either.
    tokens = one["clip_frac"][1]
    assert one["clip_frac"][0] + other["clip_frac"][0] == tokens > 0
