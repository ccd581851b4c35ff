"""Losses and KL against numbers worked by hand, and against numbers recorded of TRL's code.

test_grpo_oracle.py asks TRL itself, where it is installed.
"""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Normal, kl_divergence

from rl_train import cli, grpo, train
from rl_train.utils.io import read_json
from tests.runs import flags
from tests.trl_oracle import KL_COEFS, RECORDED, our_options

NAN = math.nan

# Three rows, eps 0.2, old log-probs 0, so exp(logp) are the ratios.
# Per token L = -min(rho A, clip(rho, .8, 1.2) A):
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
    # One ratio per row, the geometric mean: row 0 (1.5 * 0.5)^(1/3), row 1 (1.5 * 0.5)^(1/2);
    # neither is clipped.
    gspo=(-(0.75 ** (1 / 3)) + 2 * 0.75**0.5) / 3,
    # -clip(rho) A ln(rho): row 0 -(1.2 ln 1.5 + 0 + .8 ln .5), row 1 twice that, the other sign.
    cispo=(2 - 1) * (1.2 * math.log(1.5) + 0.8 * math.log(0.5)) / 5,
)
KL = dict(
    grpo=(K3_UP / 3 + K3_DOWN / 2) / 3,
    bnpo=(K3_UP + K3_DOWN) / 5,
    dapo=(K3_UP + K3_DOWN) / 5,
    dr_grpo=(K3_UP + K3_DOWN) / (3 * LENGTH),
    gspo=(K3_UP / 3 + K3_DOWN / 2) / 3,
    cispo=(K3_UP + K3_DOWN) / 5,
)
# d L / d logp is 0 where clipped, else -A rho; of the row's ratio in gspo, shared by its tokens. In
# cispo it is -A clip(rho) everywhere.
_TOKEN = torch.tensor([[0, -1.0, -0.5], [3.0, 0, 0], [0, 0, 0]])
_ROW0, _ROW1 = -(0.75 ** (1 / 3)), 2 * 0.75**0.5
GRADIENT = dict(
    grpo=_TOKEN / torch.tensor([[3.0], [2.0], [1.0]]) / 3,
    bnpo=_TOKEN / 5,
    dapo=_TOKEN / 5,
    dr_grpo=_TOKEN / (3 * LENGTH),
    gspo=torch.tensor([[_ROW0 / 3] * 3, [_ROW1 / 2, _ROW1 / 2, 0], [0, 0, 0]]) / 3,
    cispo=torch.tensor([[-1.2, -1.0, -0.8], [2.4, 1.6, 0], [0, 0, 0]]) / 5,
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


@pytest.mark.parametrize("loss_type", grpo.LOSSES)
def test_loss_and_gradient_by_hand(loss_type):
    loss, stats, logp = loss_of(loss_type)
    assert loss.item() == pytest.approx(LOSS[loss_type], abs=1e-6)
    assert stats["policy_loss"].item() == pytest.approx(LOSS[loss_type], abs=1e-6)
    assert stats["tokens"] == 5
    loss.backward()
    torch.testing.assert_close(logp.grad, GRADIENT[loss_type], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kl_coef", KL_COEFS)
@pytest.mark.parametrize("loss_type", grpo.LOSSES)
def test_loss_and_gradient_that_trl_computed(loss_type, kl_coef):
    """Recorded by `python -m tests.trl_oracle`, which a new loss needs too."""
    recorded = load_file(RECORDED)
    logp = recorded["logp"].requires_grad_()
    inputs = [recorded[name] for name in ("old", "ref", "advantages", "valid")]
    loss, _ = grpo.grpo_loss(logp, *inputs, kl_coef=kl_coef, **our_options(loss_type))
    loss.backward()
    close = dict(rtol=1e-10, atol=1e-10)  # float64
    torch.testing.assert_close(loss, recorded[f"{loss_type}/{kl_coef}/loss"], **close)
    torch.testing.assert_close(logp.grad, recorded[f"{loss_type}/{kl_coef}/gradient"], **close)
    assert logp.grad.abs().max() > 1e-3


def test_a_new_loss_is_one_line(data, tmp_path, monkeypatch):
    """A row of LOSSES is a choice of --loss_type, has its defaults, and trains."""
    new = grpo.LossType("length", advantage_scale="batch", clip_range=(0.1, 0.3))
    monkeypatch.setitem(grpo.LOSSES, "mine", new)
    argv = flags(data, tmp_path / "run", loss_type="mine", max_steps=1)
    config = cli.parse(argv).loss
    assert (config.scale, config.clip) == ("batch", dict(clip_range=0.1, clip_range_high=0.3))
    train.main(argv)
    assert read_json(tmp_path / "run" / "config.json")["loss_type"] == "mine"
    assert loss_of("mine")[0].item() == loss_of("dr_grpo", clip_range=0.2)[0].item()


@pytest.mark.parametrize("loss_type", grpo.LOSSES)
def test_kl_is_added_by_the_same_average(loss_type):
    loss, stats, _ = loss_of(loss_type, kl_coef=0.1)
    assert loss.item() == pytest.approx(LOSS[loss_type] + 0.1 * KL[loss_type], abs=1e-6)
    assert stats["policy_loss"].item() == pytest.approx(LOSS[loss_type], abs=1e-6)
    assert stats["kl"].item() == pytest.approx(
        K3_UP + K3_DOWN, abs=1e-6
    )  # a sum over valid tokens, whatever the loss


def test_kl_gradient_reaches_the_policy():
    # d k3 / d logp = 1 - e^d: 1 - 2 = -1 and 1 - 1/2; advantages 0 leave nothing else. 5 tokens.
    loss, _, logp = loss_of("dapo", kl_coef=1.0, advantages=torch.zeros(3))
    loss.backward()
    torch.testing.assert_close(
        logp.grad, torch.tensor([[-1.0, 0, 0], [0.5, 0, 0], [0, 0, 0]]) / 5, atol=1e-6, rtol=0
    )


def test_clip_statistics():
    # rho 1.5 with A > 0 and rho 0.5 with A < 0 are clipped; 0.5 with A > 0 and 1.5 with A < 0 are
    # not, masked ones never.
    _, stats, _ = loss_of("grpo")
    assert (stats["clip_low"], stats["clip_high"]) == (1, 1)
    _, stats, _ = loss_of("gspo")
    assert (stats["clip_low"], stats["clip_high"]) == (0, 0)


def test_upper_clip_alone():
    # With clip_range_high 0.6 the 1.5 of row 0 is free: L -1.5, sum 1.6; below it stays at 0.8.
    loss, stats, logp = loss_of("bnpo", clip_range_high=0.6)
    assert loss.item() == pytest.approx((-3.0 + 4.6) / 5, abs=1e-6)
    assert (stats["clip_low"], stats["clip_high"]) == (1, 0)
    loss.backward()
    assert logp.grad[0, 0].item() == pytest.approx(-1.5 / 5) and logp.grad[1, 1] == 0


def test_the_window_is_the_losss_own_unless_given():
    for loss_type in grpo.LOSSES:
        own = dict(gspo=(3e-4, 4e-4), cispo=(1.0, 4.0)).get(loss_type, (0.2, 0.2))
        assert grpo.clip_window(loss_type) == own
        assert grpo.clip_window(loss_type, 0.1) == (0.1, 0.1)
        assert grpo.clip_window(loss_type, None, 0.3) == (own[0], 0.3)
        assert grpo.clip_window(loss_type, 0.1, 0.3) == (0.1, 0.3)


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo", "cispo"])
def test_micro_batches_add_up(loss_type):
    whole, _, logp = loss_of(loss_type, kl_coef=0.1, num_tokens=5.0)
    parts = [
        loss_of(loss_type, rows, kl_coef=0.1, num_tokens=5.0)[::2]
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(p.item() for p, _ in parts) == pytest.approx(whole.item(), abs=1e-6)
    assert whole.item() == pytest.approx(LOSS[loss_type] + 0.1 * KL["bnpo"], abs=1e-6)
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


@pytest.mark.parametrize("loss_type", grpo.LOSSES)
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
    assert loss == 0 and stats["tokens"] == 0


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
    assert loss == 0
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


# Log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_token_logps(temperature):
    # logits (0, ln 3): p = 1/4, 3/4 at T = 1; 1/10, 9/10 at T = 1/2
    logits, ids = torch.tensor([[[0.0, math.log(3)], [0.0, math.log(3)]]]), torch.tensor([[0, 1]])
    expected = {1.0: [1 / 4, 3 / 4], 0.5: [1 / 10, 9 / 10]}[temperature]
    torch.testing.assert_close(
        grpo.token_logps_from_logits(logits, ids, temperature).exp(), torch.tensor([expected])
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
        grpo.gaussian_logp_per_dim(z, mean, 0.3).double(),
        normal.log_prob(z.double()).mean(-1),
        atol=1e-6,
        rtol=1e-6,
    )
    torch.testing.assert_close(
        grpo.gaussian_kl_per_dim(mean, reference, 0.3).double(),
        kl_divergence(normal, other).mean(-1),
        atol=1e-6,
        rtol=1e-6,
    )
    # By hand: z - mean = (0.3, -0.6) = (1, -2) sigma: -(1 + 4)/2 / 2 - ln(0.3 sqrt(2 pi)).
    by_hand = grpo.gaussian_logp_per_dim(torch.tensor([[0.3, -0.6]]), torch.zeros(1, 2), 0.3).item()
    assert by_hand == pytest.approx(-1.25 - math.log(0.3 * math.sqrt(2 * math.pi)), abs=1e-6)
    assert grpo.gaussian_kl_per_dim(
        torch.tensor([[0.3, -0.6]]), torch.zeros(1, 2), 0.3
    ).item() == pytest.approx(1.25, abs=1e-6)


def test_gaussian_with_a_covariance_is_torchs_multivariate_normal():
    """D times our means are torch's joint log-density and KL; the identity as factor is none."""
    generator, D, sigma = torch.Generator().manual_seed(2), 5, 0.7
    z, mean, reference = torch.randn(3, 4, D, generator=generator).unbind(0)
    factor = torch.randn(D, D, generator=generator).tril(-1) + torch.diag(torch.arange(1.0, 6) / 3)
    joint = [
        torch.distributions.MultivariateNormal(m.double(), scale_tril=sigma * factor.double())
        for m in (mean, reference)
    ]
    logp = grpo.gaussian_logp_per_dim(z, mean, sigma, factor)
    torch.testing.assert_close(D * logp.double(), joint[0].log_prob(z.double()), rtol=1e-5, atol=0)
    kl = grpo.gaussian_kl_per_dim(mean, reference, sigma, factor)
    torch.testing.assert_close(D * kl.double(), kl_divergence(*joint), rtol=1e-5, atol=0)
    same = grpo.gaussian_logp_per_dim(z, mean, sigma, torch.eye(D))
    torch.testing.assert_close(same, grpo.gaussian_logp_per_dim(z, mean, sigma))
    half = grpo.gaussian_logp_per_dim(z.bfloat16(), mean.bfloat16(), sigma, factor)
    assert half.dtype == torch.float32


def test_gaussian_gradient_is_the_score_function():
    # d log N / d mean = (z - mean) / sigma^2, divided by D = 2 dimensions
    mean = torch.zeros(1, 2, requires_grad=True)
    grpo.gaussian_logp_per_dim(torch.tensor([[0.3, -0.6]]), mean, 0.3).sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([[0.3, -0.6]]) / 0.09 / 2)
