"""Advantages, losses and KL against numbers worked by hand; test_grpo_oracle.py asks TRL."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from rl_train import grpo

NAN = math.nan

# Three rows, eps 0.2, old log-probs 0, so exp(logp) are the ratios. Per-token L = -min(rho A, clip(rho, .8, 1.2) A):
#   row 0, A = +1: rho 1.5 1.0 0.5 -> L -1.2 (clipped) -1.0 -0.5,            sum -2.7, mean -0.9
#   row 1, A = -2: rho 1.5 0.5 and a masked 9 -> L 3.0, 1.6 (clipped),       sum  4.6, mean  2.3
#   row 2, A = +5: nothing valid                                             sum    0, mean    0
RATIO = torch.tensor([[1.5, 1.0, 0.5], [1.5, 0.5, 9.0], [2.0, 3.0, 4.0]])
VALID = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
ADVANTAGES = torch.tensor([1.0, -2.0, 5.0])
# d = ref - logp: k3 = e^d - d - 1 is 1 - ln 2 at ln 2, ln 2 - 1/2 at -ln 2, 0 at 0.
D = torch.tensor([[2.0, 1.0, 1.0], [0.5, 1.0, 7.0], [5.0, 5.0, 5.0]]).log()
K3_UP, K3_DOWN = 1 - math.log(2), math.log(2) - 0.5
LENGTH = 4

LOSS = dict(
    grpo=(-0.9 + 2.3 + 0) / 3,
    bnpo=(-2.7 + 4.6) / 5,
    dapo=(-2.7 + 4.6) / 5,
    dr_grpo=(-2.7 + 4.6) / (3 * LENGTH),
    # one ratio per row, the geometric mean: row 0 (1.5 * 0.5)^(1/3), row 1 (1.5 * 0.5)^(1/2); neither is clipped
    gspo=(-(0.75 ** (1 / 3)) + 2 * 0.75**0.5) / 3,
)
KL = dict(
    grpo=(K3_UP / 3 + K3_DOWN / 2) / 3,
    bnpo=(K3_UP + K3_DOWN) / 5,
    dapo=(K3_UP + K3_DOWN) / 5,
    dr_grpo=(K3_UP + K3_DOWN) / (3 * LENGTH),
    gspo=(K3_UP / 3 + K3_DOWN / 2) / 3,
)
# d L / d logp is 0 where clipped, else -A rho; of the row's ratio in gspo, shared by its tokens.
_TOKEN = torch.tensor([[0, -1.0, -0.5], [3.0, 0, 0], [0, 0, 0]])
_ROW0, _ROW1 = -(0.75 ** (1 / 3)), 2 * 0.75**0.5
GRADIENT = dict(
    grpo=_TOKEN / torch.tensor([[3.0], [2.0], [1.0]]) / 3,
    bnpo=_TOKEN / 5,
    dapo=_TOKEN / 5,
    dr_grpo=_TOKEN / (3 * LENGTH),
    gspo=torch.tensor([[_ROW0 / 3] * 3, [_ROW1 / 2, _ROW1 / 2, 0], [0, 0, 0]]) / 3,
)


def loss_of(loss_type, rows=slice(None), kl_coef=0.0, advantages=ADVANTAGES, **options):
    logp = RATIO.log().clone().requires_grad_()
    options = (
        dict(clip_range=0.2, loss_type=loss_type, max_completion_length=LENGTH, kl_coef=kl_coef)
        | options
    )
    loss, stats = grpo.grpo_loss(
        logp[rows],
        torch.zeros_like(logp)[rows],
        (logp.detach() + D)[rows],
        advantages[rows],
        VALID[rows],
        **options,
    )
    return loss, stats, logp


@pytest.mark.parametrize("loss_type", grpo.LOSS_TYPES)
def test_loss_and_gradient_by_hand(loss_type):
    loss, stats, logp = loss_of(loss_type)
    assert loss.item() == pytest.approx(LOSS[loss_type], abs=1e-6)
    assert stats["policy_loss"].item() == pytest.approx(LOSS[loss_type], abs=1e-6)
    assert stats["tokens"] == 5
    loss.backward()
    torch.testing.assert_close(logp.grad, GRADIENT[loss_type], atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss_type", grpo.LOSS_TYPES)
def test_kl_is_added_by_the_same_average(loss_type):
    loss, stats, _ = loss_of(loss_type, kl_coef=0.1)
    assert loss.item() == pytest.approx(LOSS[loss_type] + 0.1 * KL[loss_type], abs=1e-6)
    assert stats["policy_loss"].item() == pytest.approx(LOSS[loss_type], abs=1e-6)
    assert stats["kl"].item() == pytest.approx(
        K3_UP + K3_DOWN, abs=1e-6
    )  # a sum over valid tokens, whatever the loss


def test_kl_gradient_reaches_the_policy():
    # d k3 / d logp = 1 - e^d: 1 - 2 = -1 and 1 - 1/2; advantages 0 leave nothing else. Divided by 5 tokens.
    loss, _, logp = loss_of("dapo", kl_coef=1.0, advantages=torch.zeros(3))
    loss.backward()
    torch.testing.assert_close(
        logp.grad, torch.tensor([[-1.0, 0, 0], [0.5, 0, 0], [0, 0, 0]]) / 5, atol=1e-6, rtol=0
    )


def test_clip_statistics():
    # rho 1.5 with A > 0 and rho 0.5 with A < 0 are clipped; 0.5 with A > 0 and 1.5 with A < 0 are not, masked ones never.
    _, stats, _ = loss_of("grpo")
    assert (stats["clip_low"], stats["clip_high"]) == (1, 1)
    assert stats["ratio_max"].item() == pytest.approx(0.5)
    _, stats, _ = loss_of("gspo")
    assert (stats["clip_low"], stats["clip_high"]) == (0, 0)
    assert stats["ratio_max"].item() == pytest.approx(1 - 0.75**0.5, abs=1e-6)


def test_upper_clip_alone():
    # With clip_range_high 0.6 the 1.5 of row 0 is free: L -1.5, sum 1.6; the lower side stays at 0.8.
    loss, stats, logp = loss_of("bnpo", clip_range_high=0.6)
    assert loss.item() == pytest.approx((-3.0 + 4.6) / 5, abs=1e-6)
    assert (stats["clip_low"], stats["clip_high"]) == (1, 0)
    loss.backward()
    assert logp.grad[0, 0].item() == pytest.approx(-1.5 / 5) and logp.grad[1, 1] == 0


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_micro_batches_add_up(loss_type):
    whole, _, logp = loss_of(loss_type, kl_coef=0.1, num_tokens=5.0)
    parts = [
        loss_of(loss_type, rows, kl_coef=0.1, num_tokens=5.0)[::2]
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(p.item() for p, _ in parts) == pytest.approx(whole.item(), abs=1e-6)
    assert whole.item() == pytest.approx(LOSS["bnpo"] + 0.1 * KL["bnpo"], abs=1e-6)
    whole.backward()
    for part, _ in parts:
        part.backward()
    torch.testing.assert_close(sum(p.grad for _, p in parts), logp.grad)


def test_num_tokens_is_the_divisor():
    assert loss_of("dapo", num_tokens=10.0)[0].item() == pytest.approx(1.9 / 10, abs=1e-6)
    assert loss_of("grpo", num_tokens=10.0)[0].item() == pytest.approx(
        LOSS["grpo"], abs=1e-6
    )  # not its divisor


def test_masked_positions_cannot_spoil_loss_or_gradient():
    """The log-probs of pad tokens may be anything, even not finite."""
    logp = RATIO.log().clone()
    logp[~VALID] = -math.inf
    logp.requires_grad_()
    loss, _ = grpo.grpo_loss(
        logp,
        torch.zeros(3, 3),
        torch.where(VALID, logp.detach() + D, math.nan),
        ADVANTAGES,
        VALID,
        clip_range=0.2,
        kl_coef=0.1,
        loss_type="dapo",
    )
    loss.backward()
    assert loss.item() == pytest.approx(LOSS["dapo"] + 0.1 * KL["dapo"], abs=1e-6)
    assert logp.grad.isfinite().all() and (logp.grad[~VALID] == 0).all()


@pytest.mark.parametrize("loss_type", grpo.LOSS_TYPES)
def test_nothing_valid_is_zero(loss_type):
    loss, stats = grpo.grpo_loss(
        RATIO.log(),
        torch.zeros(3, 3),
        None,
        ADVANTAGES,
        torch.zeros(3, 3, dtype=torch.bool),
        clip_range=0.2,
        loss_type=loss_type,
        max_completion_length=LENGTH,
    )
    assert loss == 0 and stats["tokens"] == 0 and stats["ratio_max"] == 0


def test_on_policy_the_gradient_is_not_zero():
    """Ratio 1 and centred advantages: the loss is 0 while the gradient is that of REINFORCE."""
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    loss, stats = grpo.grpo_loss(
        logp,
        logp.detach(),
        None,
        torch.tensor([1.0, -1.0]),
        torch.ones(2, 2, dtype=torch.bool),
        clip_range=0.2,
    )
    loss.backward()
    assert loss == 0 and stats["ratio_max"] == 0
    assert logp.grad.tolist() == [[-0.25, -0.25], [0.25, 0.25]]


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="--loss_type 'ppo'.*dr_grpo"):
        loss_of("ppo")
    with pytest.raises(ValueError, match="max_completion_length"):
        loss_of("dr_grpo", max_completion_length=None)
    with pytest.raises(ValueError, match="--kl_coef"):
        grpo.grpo_loss(
            RATIO.log(), RATIO.log(), None, ADVANTAGES, VALID, clip_range=0.2, kl_coef=0.1
        )


# Advantages


def test_advantages_by_hand():
    # [0, 0, 0, 1]: mean 1/4, variance (3/16 + 9/16) / 3 = 1/4, std 1/2 (G - 1; with G it would be 0.433)
    advantages = grpo.group_advantages(torch.tensor([0.0, 0, 0, 1]), 4)
    torch.testing.assert_close(advantages, torch.tensor([-0.25, -0.25, -0.25, 0.75]) / 0.5001)


def test_groups_are_consecutive_rows():
    # [0, 1]: std 1/sqrt(2); [4, 2]: std sqrt(2)
    advantages = grpo.group_advantages(torch.tensor([0.0, 1, 4, 2]), 2)
    s = 2**0.5
    torch.testing.assert_close(
        advantages,
        torch.tensor(
            [-0.5 / (s / 2 + 1e-4), 0.5 / (s / 2 + 1e-4), 1 / (s + 1e-4), -1 / (s + 1e-4)]
        ),
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    # 0.1 * 3 / 3 is not 0.1 in float32: a tiny difference must not be divided by 1e-4
    advantages = grpo.group_advantages(torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.5]), 3, scale)
    assert advantages[:3].tolist() == [0, 0, 0] and (advantages[3:5] != 0).all()


def test_scales():
    rewards = torch.tensor([0.0, 1, 4, 2])
    # all rows: mean 1.75, squares 3.0625 + .5625 + 5.0625 + .0625 = 8.75, std sqrt(8.75 / 3)
    torch.testing.assert_close(
        grpo.group_advantages(rewards, 2, "batch"),
        torch.tensor([-0.5, 0.5, 1, -1]) / ((8.75 / 3) ** 0.5 + 1e-4),
    )
    assert grpo.group_advantages(rewards, 2, "none").tolist() == [-0.5, 0.5, 1, -1]
    with pytest.raises(ValueError, match="'global'"):
        grpo.group_advantages(rewards, 2, "global")


def test_an_unscored_row_leaves_the_statistics():
    # of [0, NaN, 1, NaN] two rows count: mean 1/2, std 1/sqrt(2)
    advantages = grpo.group_advantages(torch.tensor([0.0, NAN, 1, NAN]), 4)
    torch.testing.assert_close(advantages, torch.tensor([-0.5, 0, 0.5, 0]) / (0.5**0.5 + 1e-4))
    assert grpo.group_advantages(torch.tensor([0.7, NAN, NAN, NAN]), 4).tolist() == [0, 0, 0, 0]
    assert grpo.group_advantages(torch.full((4,), NAN), 4).tolist() == [0, 0, 0, 0]
    batch = grpo.group_advantages(torch.tensor([0.0, NAN, 1, NAN]), 4, "batch")
    torch.testing.assert_close(batch, advantages)


def test_group_std():
    std = grpo.group_std(torch.tensor([0.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1, NAN, NAN, NAN, 1]), 4)
    assert std.tolist() == [0.5, 0, 0]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="--num_generations 1"):
        grpo.group_advantages(torch.tensor([1.0, 2]), 1)
    with pytest.raises(ValueError, match="groups of 2"):
        grpo.group_advantages(torch.tensor([1.0, 2, 3]), 2)


def test_combine_leaves_nan_parts_out():
    rewards = dict(
        iou=torch.tensor([0.5, NAN, 0.25, NAN]),
        meteor=torch.tensor([1.0, 0.5, NAN, NAN]),
        seen=torch.tensor([9.0, 9, 9, 9]),
    )
    combined = grpo.combine(rewards, dict(iou=2.0, meteor=0.5))
    assert combined[:3].tolist() == [2 * 0.5 + 0.5 * 1, 0.5 * 0.5, 2 * 0.25] and combined[3].isnan()


@pytest.mark.parametrize("seed", range(5))
def test_shuffled_rewards_stay_in_their_group(seed):
    rewards = torch.arange(32.0)
    rewards[5] = NAN
    shuffled = grpo.control_rewards(rewards, 8, "shuffled", (seed, 3), [7, 1, 4, 9])
    for before, after in zip(rewards.view(4, 8), shuffled.view(4, 8)):
        assert sorted(before.nan_to_num(99).tolist()) == sorted(
            after.nan_to_num(99).tolist()
        ) and not torch.equal(before, after)
    assert (
        len({tuple((after % 8).tolist()) for after in shuffled.view(4, 8)[[0, 2, 3]]}) == 3
    )  # each in an order of its own
    again, other = (
        grpo.control_rewards(rewards, 8, "shuffled", (seed, step), [7, 1, 4, 9]) for step in (3, 4)
    )
    assert torch.equal(again.nan_to_num(99), shuffled.nan_to_num(99))
    alone = grpo.control_rewards(
        rewards[8:16], 8, "shuffled", (seed, 3), [1]
    )  # whatever else is in the batch
    assert torch.equal(alone, shuffled[8:16])
    assert (
        not torch.equal(other.nan_to_num(99), shuffled.nan_to_num(99)) and rewards[0] == 0
    )  # nor is the argument touched


def test_constant_rewards_teach_nothing():
    rewards = torch.tensor([0.0, 1, NAN, 3])
    constant = grpo.control_rewards(rewards, 4, "constant", (0,), [0])
    assert (
        constant.isnan().tolist() == [False, False, True, False]
        and len(set(constant[[0, 1, 3]].tolist())) == 1
    )
    assert grpo.group_advantages(constant, 4).tolist() == [0, 0, 0, 0] and grpo.group_std(
        constant, 4
    ).tolist() == [0]
    assert grpo.control_rewards(rewards, 4, "none", (0,), [0]) is rewards


# Log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_token_logps(temperature):
    # logits (0, ln 3): p = 1/4, 3/4 at T = 1; 1/10, 9/10 at T = 1/2
    logits, ids = torch.tensor([[[0.0, math.log(3)], [0.0, math.log(3)]]]), torch.tensor([[0, 1]])
    expected = {1.0: [1 / 4, 3 / 4], 0.5: [1 / 10, 9 / 10]}[temperature]
    torch.testing.assert_close(
        grpo.token_logps_from_logits(logits, ids, temperature).exp(), torch.tensor([expected])
    )
    entropy = -sum(p * math.log(p) for p in expected)
    torch.testing.assert_close(
        grpo.entropy_from_logits(logits, temperature), torch.full((1, 2), entropy)
    )


def test_token_logps_equal_log_softmax_in_float32():
    generator = torch.Generator().manual_seed(0)
    logits, ids = (
        torch.randn(2, 3, 50, generator=generator) * 5,
        torch.randint(50, (2, 3), generator=generator),
    )
    expected = torch.log_softmax(logits.double() / 0.7, -1)
    logp = grpo.token_logps_from_logits(logits, ids, 0.7)
    for n in range(2):
        for t in range(3):
            assert logp[n, t].item() == pytest.approx(expected[n, t, ids[n, t]].item(), abs=1e-5)
    assert grpo.token_logps_from_logits(logits.bfloat16(), ids, 0.7).dtype == torch.float32


def test_k3():
    torch.testing.assert_close(
        grpo.k3_kl(torch.zeros(3), torch.tensor([2.0, 0.5, 1.0]).log()),
        torch.tensor([K3_UP, K3_DOWN, 0.0]),
    )


def test_gaussian_logp_and_kl():
    generator = torch.Generator().manual_seed(1)
    z, mean, reference = torch.randn(3, 4, 16, generator=generator).unbind(0)
    normal, other = Normal(mean.double(), 0.3), Normal(reference.double(), 0.3)
    torch.testing.assert_close(
        grpo.gaussian_logp(z, mean, 0.3).double(),
        normal.log_prob(z.double()).mean(-1),
        atol=1e-6,
        rtol=1e-6,
    )
    torch.testing.assert_close(
        grpo.gaussian_kl(mean, reference, 0.3).double(),
        kl_divergence(normal, other).mean(-1),
        atol=1e-6,
        rtol=1e-6,
    )
    # by hand: z - mean = (0.3, -0.6) = (1, -2) sigma: mean of -(1 + 4)/2 / 2, minus ln(0.3 sqrt(2 pi))
    by_hand = grpo.gaussian_logp(torch.tensor([[0.3, -0.6]]), torch.zeros(1, 2), 0.3).item()
    assert by_hand == pytest.approx(-1.25 - math.log(0.3 * math.sqrt(2 * math.pi)), abs=1e-6)
    assert grpo.gaussian_kl(
        torch.tensor([[0.3, -0.6]]), torch.zeros(1, 2), 0.3
    ).item() == pytest.approx(1.25, abs=1e-6)


def test_gaussian_gradient_is_the_score_function():
    # d log N / d mean = (z - mean) / sigma^2, divided by D = 2 dimensions
    mean = torch.zeros(1, 2, requires_grad=True)
    grpo.gaussian_logp(torch.tensor([[0.3, -0.6]]), mean, 0.3).sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([[0.3, -0.6]]) / 0.09 / 2)
