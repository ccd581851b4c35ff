"""One update on real rollouts of both loops: what is zero at the start, which term reaches which
weights, and that micro-batches do not matter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train.config.grpo_config import LossConfig
from rl_train.grpo import group_advantages
from rl_train.loss import (
    LossDenominators,
    MicroBatch,
    MicroBatchLoss,
    ReferenceScores,
    ScoredRollout,
    iter_micro_batches,
    loss_denominators,
    micro_batches,
)
from rl_train.policies.sa2va import TRAINABLE
from rl_train.roles import Roles
from tests.updates import (
    ADVANTAGES,
    POLICY_ALONE,
    STEPS,
    backward,
    in_backward,
    largest_difference,
    mean,
    moved_policy,
    reference_of,
    roll,
    roll_loops,
    task_of,
    work_of,
)

model = pytest.fixture(scope="module")(moved_policy)
rollouts = pytest.fixture(scope="module")(roll_loops)


@pytest.fixture(scope="module")
def two(scenes, prepare, model):
    """The first two scenes as a batch."""
    return prepare(scenes[:2], model.processor)


# The start


def test_at_step_0_the_ratio_is_one_and_the_kl_zero(policy, two):
    model = policy()
    roles = Roles(model.trainable)
    for loop in (1, 2):
        task = task_of(model, loop)
        rollout = roll(model, task, two)
        with roles.use("reference"):
            reference = reference_of(model, task, rollout)
        work = work_of(model, task, rollout, reference=reference)
        _, sums, loss = backward(model, work, LossConfig(kl_coef=0.1))
        for name in ("kl_div", "clip_frac", "entropy"):
            assert sums[name][1] == rollout.valid.sum(), name
        assert sums["clip_frac"][0] == 0
        assert 0 <= sums["sampler_gap"] < 1e-4  # |log ratio|
        assert abs(mean(sums["kl_div"])) < 1e-6
        if loop == 2:
            rows = rollout.latents.rows
            assert (
                sums["latent_joint_kl"][1] == len(rows) and abs(sums["latent_joint_kl"][0]) < 1e-6
            )
        # ratio 1: the loss is minus the advantages, averaged over tokens and over latents
        expected = -(ADVANTAGES[:, None] * rollout.valid).sum() / rollout.valid.sum()
        assert sums["policy_loss"] == pytest.approx(expected.item(), abs=1e-4)
        if loop == 2:
            expected = expected - ADVANTAGES[rows].mean()
        assert loss == pytest.approx(expected.item(), abs=1e-4)
        assert loss == pytest.approx(sums["loss"], abs=1e-7)


def test_entropy_and_kl_away_from_the_start(model, rollouts):
    """The KL of shifted reference log-probs by hand: d = ln 2 everywhere gives 1 - ln 2 a token."""
    task, rollout = task_of(model, 1), rollouts[1]
    with torch.no_grad():
        scores = model.score(rollout)
    reference = ReferenceScores(scores.logp + torch.tensor(2.0).log(), None)
    work = work_of(model, task, rollout, reference=reference)
    _, sums, _ = backward(model, work, LossConfig(kl_coef=0.1))
    assert mean(sums["kl_div"]) == pytest.approx(1 - 0.693147, abs=1e-4)
    assert sums["entropy"][0] == pytest.approx(
        (scores.entropy * rollout.valid).sum().item(), rel=1e-4
    )


# Which term reaches which weights


def test_one_step_moves_what_trains_and_nothing_else(policy, two):
    model = policy()
    before = {n: p.detach().clone() for n, p in model.model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.model.named_buffers()}
    roles = Roles(model.trainable)
    optimizer = torch.optim.AdamW(model.trainable.values(), lr=1e-3, weight_decay=0.0)
    sum_of = dict.fromkeys(model.trainable, 0.0)
    for task in (task_of(model, 1), task_of(model, 2, mask_loss_coef=0.1)):
        work = work_of(model, task, roll(model, task, two))
        for n, g in backward(model, work, LossConfig(kl_coef=0.02))[0].items():
            sum_of[n] += g
    for n, p in model.trainable.items():
        p.grad = sum_of[n]
    optimizer.step()
    moved = {n for n, p in model.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved <= set(model.trainable)
    assert {model.group_of[n] for n in moved} == set(TRAINABLE)
    assert all(torch.equal(b, buffers[n]) for n, b in model.model.named_buffers())
    for role in ("teacher", "reference"):
        assert all(torch.equal(roles.copies[role][n], before[n]) for n in model.trainable)


COLUMNS = ("lora", "mlp1", "text_hidden_fcs", "mask_decoder", "prompt_encoder")
# One update by each term alone, KL off unless it says so: 1 where its gradient is not zero, 0 where
# it is exactly zero.
TABLE = {
    # term                               lora mlp1 text_hidden_fcs mask_decoder prompt_encoder
    "loop 1, policy": (1, 1, 0, 0, 0),
    "loop 1, policy, KL": (1, 1, 0, 0, 0),
    "loop 2, policy, sigma 0": (1, 1, 0, 0, 0),
    "loop 2, policy, latent": (1, 1, 1, 0, 0),  # IoU and captions are black boxes
    "loop 2, mask term": (1, 1, 1, 1, 1),
    "loop 2, mask term, sigma 0": (1, 1, 1, 1, 1),
    "loop 2, policy, latent, mask term": (1, 1, 1, 1, 1),
    "loop 2, equal rewards": (0, 0, 0, 0, 0),
}


def column_of(model, name) -> str:
    group = model.group_of[name]
    parts = [part for part in COLUMNS[3:] if f"grounding_encoder.{part}." in name]
    return parts[0] if group == "sam2" else group


def test_gradient_of_each_term_by_module(model, two, rollouts):
    """Weights that one update of each term reaches; prints the norms."""
    plain = roll(model, task_of(model, 2, latent_std=0.0), two)
    assert plain.latents.logp is None and not plain.latents.noise.any()
    assert {column_of(model, n) for n in model.trainable} == set(COLUMNS)
    print("\n" + " " * 36 + "".join(f"{column:>17s}" for column in COLUMNS))
    for term, expected in TABLE.items():
        loop = int(term[5])
        sigma = {"latent_std": 0.0} if "sigma 0" in term else {}
        mask = {"mask_loss_coef": 0.1} if "mask" in term else {}
        work = work_of(
            model,
            task_of(model, loop, **sigma, **mask),
            plain if sigma else rollouts[loop],
            ADVANTAGES if "policy" in term else torch.zeros(4),
        )
        config = LossConfig(kl_coef=0.1 if "KL" in term else 0.0)
        grads, sums, _ = backward(model, work, config)
        assert all(g.isfinite().all() for g in grads.values())
        assert ("latent_joint_kl" in sums and sums["latent_joint_kl"][1] > 0) == (
            loop == 2 and not sigma
        )
        norms = dict.fromkeys(COLUMNS, 0.0)
        for n, g in grads.items():
            norms[column_of(model, n)] += g.double().square().sum().item()
        print(f"{term:36s}" + "".join(f"{norm**0.5:17.3g}" for norm in norms.values()))
        assert tuple(int(norm > 0) for norm in norms.values()) == expected, (term, norms)


@pytest.mark.parametrize("loop", [1, 2])
def test_the_opposite_advantages_give_the_opposite_gradient(model, rollouts, loop):
    def gradient(advantages):
        work = work_of(model, task_of(model, loop), rollouts[loop], advantages)
        return backward(model, work)[0]

    one, other, double = (gradient(k * ADVANTAGES) for k in (1, -1, 2))
    scale = max(g.abs().max().item() for g in one.values())
    assert scale > 1e-4
    assert largest_difference(one, {n: -g for n, g in other.items()}) < 1e-4 * scale
    assert largest_difference({n: 2 * g for n, g in one.items()}, double) < 1e-4 * scale


# Normalisation


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo", "gspo", "cispo"])
def test_micro_batches_give_the_gradient_of_the_whole(model, rollouts, loss_type):
    config = LossConfig(loss_type=loss_type, kl_coef=0.1)
    task = task_of(model, 2, mask_loss_coef=0.1)
    own = reference_of(model, task, rollouts[2])
    reference = ReferenceScores(own.logp - 0.3, own.action_params + 0.1)
    work = work_of(model, task, rollouts[2], reference=reference)
    whole, sums, loss = backward(model, work, config)
    assert max(g.abs().max() for g in whole.values()) > 1e-2
    for size in (1, 2, 3):
        grads, part_sums, part_loss = backward(model, work, config, micro_batch_size=size)
        assert largest_difference(whole, grads) < 1e-5
        assert part_loss == pytest.approx(loss, abs=1e-5)
        assert part_sums.keys() == sums.keys()
        for name in set(sums) - {"sampler_gap"}:
            expected = pytest.approx(sums[name], abs=1e-4, rel=1e-4)
            assert part_sums[name] == expected, name


def test_a_row_without_reward_leaves_the_loss(model, rollouts):
    """Whatever its advantage, and its tokens and latents do not count."""
    scored, rollout = torch.tensor([True, True, True, False]), rollouts[2]
    results = [
        backward(
            model,
            work_of(
                model,
                task_of(model, 2, mask_loss_coef=0.1),
                rollout,
                torch.tensor([0.7, -0.7, -0.7, last]),
                scored,
            ),
            LossConfig(kl_coef=0.1),
        )
        for last in (0.7, 50.0)
    ]
    assert largest_difference(results[0][0], results[1][0]) == 0
    sums = results[0][1]
    assert sums["kl_div"][1] == rollout.valid[:3].sum()
    assert sums["latent_joint_kl"][1] == (rollout.latents.rows < 3).sum()


def test_the_weight_of_a_task_multiplies_its_loss_and_not_its_curve(model, rollouts):
    one, three = (
        backward(model, work_of(model, task_of(model, 1, weight=weight), rollouts[1]))
        for weight in (1.0, 3.0)
    )
    assert three[2] == pytest.approx(3 * one[2], rel=1e-5)
    assert three[1]["loss"] == one[1]["loss"]
    scale = max(g.abs().max().item() for g in one[0].values())
    assert largest_difference({n: 3 * g for n, g in one[0].items()}, three[0]) < 1e-4 * scale


def test_the_backward_of_the_last_micro_batch_comes_by_every_trainable(model, rollouts):
    """Though loop 1 does not reach SAM2: DistributedDataParallel waits for all of them."""
    work = work_of(model, task_of(model, 1), rollouts[1])
    loss_of = MicroBatchLoss(model, POLICY_ALONE, STEPS)
    trainable = {id(p) for p in model.trainable.values()}
    assert {id(p) for p in loss_of.parameters() if p.requires_grad} >= trainable
    for last in (False, True):
        micro_batch = MicroBatch(work, slice(0, 2), LossDenominators(4, 20, 1), last)
        by = in_backward(loss_of(micro_batch)[0])
        missing = {model.group_of[n] for n, p in model.trainable.items() if id(p) not in by}
        assert missing == (set() if last else {"text_hidden_fcs", "sam2"})


def test_micro_batches_cover_all_rows_once(rollouts):
    assert micro_batches(slice(0, 5), 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert micro_batches(slice(0, 2), 8) == [slice(0, 2)]
    tasks = [SimpleNamespace(name=f"loop{loop}") for loop in (1, 2)]
    works = [
        ScoredRollout(task, rollouts[loop], None, None, None, None)
        for loop, task in enumerate(tasks, 1)
    ]
    totals = dict(loop1=LossDenominators(4, 20, 1), loop2=LossDenominators(4, 30, 4))
    parts = list(iter_micro_batches(works, 3, totals))
    assert [part.scored for part in parts] == [works[0]] * 2 + [works[1]] * 2
    assert [part.rows for part in parts] == [slice(0, 3), slice(3, 4)] * 2
    assert [part.is_last for part in parts] == [False, False, False, True]
    assert [part.denominators for part in parts] == [totals["loop1"]] * 2 + [totals["loop2"]] * 2


def test_totals_by_hand():
    """Two batches of 4 rows with 3 tokens each; one row has no reward."""
    nan, valid = torch.nan, torch.ones(4, 3, dtype=torch.bool)
    two_each = SimpleNamespace(rows=torch.arange(4).repeat_interleave(2))

    def work(name, rewards):
        task, action = SimpleNamespace(name=name), two_each if name == "drawn" else None
        rollout = SimpleNamespace(valid=valid, num_generations=2, latents=action)
        rewards = torch.tensor(rewards)
        return ScoredRollout(task, rollout, None, rewards, group_advantages(rewards, 2), None)

    step = [work("text", [0.0, 1.0, nan, 1.0]), work("text", [1.0] * 4), work("drawn", [nan] * 4)]
    totals, learnable = loss_denominators(step, 1)
    assert learnable and totals == {
        "text": LossDenominators(8, 21, 1),
        "drawn": LossDenominators(4, 1, 1),
    }
    totals, learnable = loss_denominators(
        [work("drawn", [2.0, 2.0, 0.5, 0.5])], 2
    )  # the mean of two ranks
    assert not learnable and totals == {"drawn": LossDenominators(2, 6, 4)}


def test_what_is_scored_is_where_the_advantages_are(model, rollouts):
    work = work_of(model, task_of(model, 1), rollouts[1])
    work = replace(work, reward=torch.tensor([0.0, torch.nan, 1.0, 2.0]))
    assert work.in_loss.tolist() == [True, False, True, True]
    assert work.in_loss.device == work.advantages.device
