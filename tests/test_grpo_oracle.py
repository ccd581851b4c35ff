"""rl_train/grpo.py against TRL's own trainer (trl 1.16) on random tensors; see tests/trl_oracle.py.

pip install -e ".[oracle]" -c constraints.txt
python -m pytest -m oracle
"""

from functools import partial

import pytest
import torch

from rl_train import grpo
from rl_train.rewards.combine import combine, normalise_components
from rl_train.rewards.custom import overlong_penalty
from tests.trl_oracle import (
    KL_COEFS,
    LONGEST,
    REWARD_WEIGHTS,
    G,
    N,
    build_trainer,
    our_options,
    tensors,
    trl_loss,
    trl_options,
)

trl = pytest.importorskip("trl", reason="trl is not installed (extra: oracle)")
datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra: oracle)")
pytestmark = pytest.mark.oracle

BUFFER = 4  # --overlong_buffer
CLOSE = dict(rtol=1e-12, atol=1e-12)  # in float64


@pytest.fixture
def trainer_of(tmp_path):
    """Function of rewards {name: list of N} and GRPOConfig's options: TRL's trainer, training."""
    return partial(build_trainer, tmp_path)


@pytest.mark.parametrize("kl_coef", KL_COEFS)
@pytest.mark.parametrize("loss_type", grpo.LOSSES)
def test_loss_gradient_and_metrics(trainer_of, loss_type, kl_coef):
    trainer = trainer_of(kl_coef=kl_coef, gradient_accumulation_steps=1, **trl_options(loss_type))
    differences = []
    for seed in range(5):
        # TRL averages clipping over sequences under gspo, we over tokens: equal for equal lengths.
        logp, old, ref, advantages, valid = tensors(
            seed, whole_rows=loss_type == "gspo" and seed > 2
        )
        theirs, ours = logp.clone().requires_grad_(), logp.clone().requires_grad_()
        expected, metrics = trl_loss(trainer, theirs, old, ref, advantages, valid)
        loss, stats = grpo.grpo_loss(
            ours,
            old,
            ref,
            advantages,
            valid,
            kl_coef=kl_coef,
            **our_options(loss_type),
        )
        expected.backward()
        loss.backward()
        torch.testing.assert_close(loss, expected, **CLOSE)
        torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)
        assert theirs.grad.abs().max() > 1e-3
        differences.append(
            ((loss - expected).abs().item(), (ours.grad - theirs.grad).abs().max().item())
        )
        if kl_coef:
            assert stats["kl"] / stats["tokens"] == pytest.approx(metrics["kl"], rel=1e-6)
        if loss_type == "cispo":  # TRL counts no lower limit
            clipped = (stats["clip_high"] / stats["tokens"]).item()
            assert clipped == pytest.approx(metrics["cispo_clip_ratio"], abs=1e-6) and clipped > 0
        elif loss_type != "gspo" or valid.all():
            for name in ("low", "high"):
                clipped = (stats[f"clip_{name}"] / stats["tokens"]).item()
                assert clipped == pytest.approx(metrics[f"clip_ratio/{name}_mean"], abs=1e-6)
                assert clipped > 0 or loss_type == "gspo"
    worst = [max(column) for column in zip(*differences)]
    print(f"{loss_type}, KL {kl_coef}: loss within {worst[0]:.1e}, gradient within {worst[1]:.1e}")


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_micro_batches_add_up_to_the_same(trainer_of, loss_type):
    options = dict(gradient_accumulation_steps=2) | trl_options(loss_type)
    trainer = trainer_of(kl_coef=0.1, **options)
    logp, old, ref, advantages, valid = tensors(0)
    expected = [
        trl_loss(trainer, *(t[rows] for t in (logp, old, ref, advantages, valid)), valid.sum())[0]
        for rows in (slice(0, N // 2), slice(N // 2, N))
    ]
    whole, _ = grpo.grpo_loss(
        logp,
        old,
        ref,
        advantages,
        valid,
        kl_coef=0.1,
        **our_options(loss_type),
    )
    torch.testing.assert_close(sum(expected), whole, **CLOSE)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages(trainer_of, scale):
    """Two weighted rewards, one missing here, both there; a group of equal rewards is zero."""
    generator = torch.Generator().manual_seed(1)
    first, second = torch.rand(2, N, generator=generator).tolist()
    first[1] = first[2] = second[2] = None
    equal = dict(first=first[:G] + [0.5] * G, second=second[:G] + [0.25] * G)
    lonely = dict(
        first=first[:G] + [None, None, 0.5, None], second=second[:G] + [None, None, 0.5, None]
    )
    for rewards in (dict(first=first, second=second), equal, lonely):
        trainer = trainer_of(rewards, loss_type="grpo", scale_rewards=scale)
        expected = trainer._generate_and_score_completions([{"prompt": "a"}] * N)["advantages"]
        parts = {
            name: torch.tensor([torch.nan if value is None else value for value in values])
            for name, values in rewards.items()
        }
        ours = grpo.group_advantages(combine(parts, REWARD_WEIGHTS), G, scale)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
        assert expected[:G].abs().max() > 0.1
        print(f"{scale}: advantages within {(ours - expected).abs().max():.1e}")


def test_components_on_one_scale(trainer_of):
    """--scale_components --scale_rewards batch; in one group a component that is equal."""
    first, second = torch.rand(2, N, generator=torch.Generator().manual_seed(2))
    second[:G] = 0.25
    rewards = dict(first=first, second=second)
    options = dict(loss_type="grpo", multi_objective_aggregation="normalize_then_sum")
    trainer = trainer_of({name: values.tolist() for name, values in rewards.items()}, **options)
    expected = trainer._generate_and_score_completions([{"prompt": "a"}] * N)["advantages"]
    counted = combine(normalise_components(rewards, REWARD_WEIGHTS, G), REWARD_WEIGHTS)
    ours = grpo.group_advantages(counted, G, "batch")
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_the_soft_punishment_of_long_answers():
    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(1, LONGEST + 1))
    expected = get_soft_overlong_punishment(LONGEST, BUFFER)([[0] * n for n in lengths])
    term = overlong_penalty(LONGEST, BUFFER)
    assert term([""] * LONGEST, num_tokens=lengths).tolist() == pytest.approx(expected)
    assert expected[-1] == -1
