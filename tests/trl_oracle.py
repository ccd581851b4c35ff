"""TRL's own trainer, asked for its loss; and the command that records what it says for the CI.

    pip install -e ".[oracle]" -c constraints.txt
    python -m tests.trl_oracle     # writes tests/reference/trl_losses.safetensors

The trainer is built over a model of a few weights; what it would compute by that model, log-probs
and completions, is given instead.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_train import grpo
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT, ROOT

RECORDED = ROOT / "tests" / "reference" / "trl_losses.safetensors"
N, G, T, LONGEST = 8, 4, 6, 10  # rows, rows of a group, tokens, --max_completion_length
LOW, HIGH = 0.2, 0.28  # clip ranges
REWARD_WEIGHTS = dict(first=2.0, second=0.5)
SEED, KL_COEFS = 0, (0.0, 0.1)  # of the recording


def build_trainer(folder, rewards=None, kl_coef=0.0, **options):
    """TRL's trainer, training. Rewards: {name: list of N}; options: GRPOConfig's."""
    import datasets
    import trl

    def rollout(prompts, trainer):
        ids = [[5]] * len(prompts)
        return dict(prompt_ids=ids, completion_ids=[[6, 7]] * len(prompts), logprobs=None)

    def giver(name):
        def give(prompts, **kwargs):
            return (rewards or {}).get(name, [0.0] * len(prompts))

        give.__name__ = name
        return give

    settings = dict(
        output_dir=str(folder),
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
    )
    config = trl.GRPOConfig(**settings | options)
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
    # Set late: a trainer with KL would load a reference model from the hub.
    trainer.beta = kl_coef
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    return trainer


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


def trl_loss(trainer, logp, old, ref, advantages, valid, num_tokens=None):
    """TRL's loss and its metrics, for log-probs that are given."""
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, 0 * logp, None)
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


def trl_options(loss_type):
    """GRPOConfig's names of `loss_type`: there, gspo is grpo with one ratio for each sequence.

    Of cispo, epsilon_high is the largest weight itself.
    """
    if loss_type == "gspo":
        return dict(loss_type="grpo", importance_sampling_level="sequence")
    if loss_type == "cispo":
        return dict(loss_type="cispo", epsilon_high=1 + HIGH)
    return dict(loss_type=loss_type)


def our_options(loss_type):
    """Options of `grpo_loss` with which it is TRL's trainer."""
    low = 1.0 if loss_type == "cispo" else LOW  # TRL has no lower limit of the weight
    return dict(
        loss_type=loss_type,
        clip_range=low,
        clip_range_high=HIGH,
        max_completion_length=LONGEST,
    )


def record(file: Path):
    """Write the inputs of seed SEED, and TRL's loss and gradient of each loss type."""
    logp, old, ref, advantages, valid = tensors(SEED)
    recorded = dict(logp=logp, old=old, ref=ref, advantages=advantages, valid=valid)
    for loss_type in grpo.LOSSES:
        for kl_coef in KL_COEFS:
            with tempfile.TemporaryDirectory() as folder:
                options = dict(gradient_accumulation_steps=1) | trl_options(loss_type)
                trainer = build_trainer(folder, kl_coef=kl_coef, **options)
                theirs = logp.clone().requires_grad_()
                loss, _ = trl_loss(trainer, theirs, old, ref, advantages, valid)
            loss.backward()
            recorded[f"{loss_type}/{kl_coef}/loss"] = loss.detach()
            recorded[f"{loss_type}/{kl_coef}/gradient"] = theirs.grad
    save_file(recorded, file)


if __name__ == "__main__":
    record(RECORDED)
