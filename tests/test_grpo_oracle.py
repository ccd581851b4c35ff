"""rl_train/grpo.py against TRL's own trainer (trl 1.16) on random tensors.

    pip install -e ".[oracle]" -c constraints.txt
    python -m pytest -m oracle

The trainer is built over a model of a few weights and asked for its loss and its advantages; what
it would compute by that model, log-probs and completions, is given instead.
"""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_train import grpo
from rl_train.rewards.combine import combine, normalise_components
from rl_train.rewards.custom import overlong_penalty
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT

trl = pytest.importorskip("trl", reason="trl is not installed (extra: oracle)")
datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra: oracle)")
pytestmark = pytest.mark.oracle

N, G, T, LONGEST = 8, 4, 6, 10  # rows, rows of a group, tokens, --max_completion_length
LOW, HIGH = 0.2, 0.28  # clip ranges
BUFFER = 4  # --overlong_buffer
REWARD_WEIGHTS = dict(first=2.0, second=0.5)
CLOSE = dict(rtol=1e-12, atol=1e-12)  # in float64


@pytest.fixture
def trainer_of(tmp_path):
    """Function of rewards {name: list of N} and GRPOConfig's options: TRL's trainer, training."""

    def build(rewards=None, kl_coef=0.0, **options):
        def rollout(prompts, trainer):
            ids = [[5]] * len(prompts)
            return dict(prompt_ids=ids, completion_ids=[[6, 7]] * len(prompts), logprobs=None)

        def giver(name):
            def give(prompts, **kwargs):
                return (rewards or {}).get(name, [0.0] * len(prompts))

            give.__name__ = name
            return give

        config = trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=N,
            num_generations=G,
            max_completion_length=LONGEST,
            epsilon=LOW,
            epsilon_high=HIGH,
            reward_weights=list(REWARD_WEIGHTS.values()),
            beta=0.0,
            use_bias_correction_kl=False,
            **options,
        )
        tokenizer = load_tokenizer(CHECKPOINT)
        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        heads = dict(num_attention_heads=1, num_key_value_heads=1)
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads))
        trainer = trl.GRPOTrainer(
            model,
            [giver(name) for name in REWARD_WEIGHTS],
            config,
            train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * N),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.model.train()
        trainer.beta = (
            kl_coef  # set late: a trainer with KL would load a reference model from the hub
        )
        trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        return trainer

    return build


def tensors(seed, whole_rows=False):
    """logp, old_logp, ref_logp (N, T), advantages (N,), valid (N, T); some ratios are clipped."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = normal(N, T) - 2
    lengths = torch.randint(1, T + 1, (N,), generator=generator)
    lengths[0] = 0  # an answer without a token
    valid = torch.arange(T) < lengths[:, None]
    if whole_rows:
        valid = torch.ones(N, T, dtype=torch.bool)
    return old + 0.3 * normal(N, T), old, old + 0.5 * normal(N, T), normal(N), valid


def trl_loss(trainer, logp, old, ref, advantages, valid, num_tokens=None, entropy=None):
    """TRL's loss and its metrics, for log-probs that are given."""
    entropy = 0 * logp if entropy is None else entropy
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, entropy, None)
    ones = torch.ones(len(logp), 1, dtype=torch.long)
    inputs = dict(
        prompt_ids=ones,
        prompt_mask=ones,
        completion_ids=torch.ones_like(valid, dtype=torch.long),
        completion_mask=valid.long(),
        advantages=advantages,
        old_per_token_logps=old,
        ref_per_token_logps=ref,
        num_items_in_batch=valid.sum() if num_tokens is None else num_tokens,
    )
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def loss_options(loss_type):
    """GRPOConfig's names of `loss_type`: there, gspo is grpo with one ratio for each sequence."""
    if loss_type == "gspo":
        return dict(loss_type="grpo", importance_sampling_level="sequence")
    return dict(loss_type=loss_type)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", grpo.LOSSES)
def test_loss_gradient_and_metrics(trainer_of, loss_type, kl_coef):
    trainer = trainer_of(kl_coef=kl_coef, gradient_accumulation_steps=1, **loss_options(loss_type))
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
            clip_range=LOW,
            clip_range_high=HIGH,
            kl_coef=kl_coef,
            loss_type=loss_type,
            max_completion_length=LONGEST,
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
        if loss_type != "gspo" or valid.all():
            for name in ("low", "high"):
                clipped = (stats[f"clip_{name}"] / stats["tokens"]).item()
                assert clipped == pytest.approx(metrics[f"clip_ratio/{name}_mean"], abs=1e-6)
                assert clipped > 0 or loss_type == "gspo"
    worst = [max(column) for column in zip(*differences)]
    print(f"{loss_type}, KL {kl_coef}: loss within {worst[0]:.1e}, gradient within {worst[1]:.1e}")


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_entropy_bonus(trainer_of, loss_type):
    options = dict(gradient_accumulation_steps=1, entropy_coef=0.3)
    trainer = trainer_of(**options, **loss_options(loss_type))
    logp, old, _, advantages, valid = tensors(0)
    entropy = tensors(1)[0].abs()
    expected, _ = trl_loss(trainer, logp, old, None, advantages, valid, entropy=entropy)
    how = dict(clip_range=LOW, clip_range_high=HIGH, max_completion_length=LONGEST)
    ours, _ = grpo.grpo_loss(logp, old, None, advantages, valid, loss_type=loss_type, **how)
    bonus = 0.3 * grpo.mean_entropy(entropy, valid)
    assert bonus > 0.1
    torch.testing.assert_close(ours - bonus, expected, **CLOSE)


def test_micro_batches_of_dapo_add_up_to_the_same(trainer_of):
    trainer = trainer_of(kl_coef=0.1, gradient_accumulation_steps=2, loss_type="dapo")
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
        clip_range=LOW,
        clip_range_high=HIGH,
        kl_coef=0.1,
        loss_type="dapo",
    )
    torch.testing.assert_close(sum(expected), whole, **CLOSE)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages(trainer_of, scale):
    """Of two weighted rewards, one missing here, both there; a group of equal rewards is zero."""
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
