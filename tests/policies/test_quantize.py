"""A base in 4 or 8 bits: its numbers, its gradient, its memory, and what refuses it."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_train.config.grpo_config import PolicyConfig
from rl_train.engine.quantize import CHOICES, QuantizedLinear, require_library
from rl_train.export.load_policy import load_policy
from rl_train.policies import registry
from rl_train.policies.lora import PROJECTIONS, parameter_counts
from rl_train.policies.sa2va import TRAINABLE
from rl_train.run.memory_estimate import standing_memory
from tests.policies.tiny_points import tiny_policy
from tests.runs import CHECKPOINT, complaint_of, flags, run, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)
ERROR = {"4bit": 0.1, "8bit": 0.012}  # relative, of normally distributed weights
BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1}  # of a weight, without the rows' scales


def sa2va(quantize_base=None, groups=tuple(TRAINABLE), dtype="float32"):
    torch.manual_seed(0)
    config = PolicyConfig(
        model_path=str(CHECKPOINT),
        lora_r=4,
        lora_alpha=8,
        dtype=dtype,
        gradient_checkpointing=False,
        quantize_base=quantize_base,
    )
    return registry.build_policy(config, {}, groups, 0, "cpu")


# A linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 96), (40, 33), (130, 7)])  # 130 * 7: a block is not full
def test_a_linear_computes_with_its_dequantised_weight(choice, dtype, sizes):
    torch.manual_seed(0)
    linear = nn.Linear(*sizes, dtype=dtype).requires_grad_(False)
    nn.init.normal_(linear.weight)
    quantized = QuantizedLinear(linear, choice, "cpu")
    weight = quantized.dequantize()
    assert weight.dtype == dtype and weight.shape == linear.weight.shape
    assert (weight - linear.weight).norm() < ERROR[choice] * linear.weight.norm()
    x = torch.randn(2, 5, sizes[0], dtype=dtype, requires_grad=True)
    y = quantized(x)
    assert torch.equal(y, F.linear(x, weight, linear.bias))
    d = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, x, d)
    assert torch.equal(gradient, d @ weight)
    with torch.no_grad():  # a use without gradient before does not matter
        assert torch.equal(quantized(x), y)
    (again,) = torch.autograd.grad(quantized(x), x, d)
    assert torch.equal(again, gradient)


def test_a_row_of_zeros_stays_zero():
    linear = nn.Linear(8, 3, bias=False).requires_grad_(False)
    linear.weight[1] = 0
    weight = QuantizedLinear(linear, "8bit", "cpu").dequantize()
    assert weight.isfinite().all() and not weight[1].any() and weight[0].any()


# A model


def test_the_llms_linears_alone_are_quantised(choice):
    plain, quantized = sa2va(), sa2va(choice)
    of_llm = {
        name.removesuffix(".base_layer")
        for name, module in quantized.model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    layers = plain.model.language_model.model.layers
    assert len(of_llm) == len(PROJECTIONS) * len(layers)
    assert all("language_model" in name and name.split(".")[-1] in PROJECTIONS for name in of_llm)
    # Everything else is as without the flag, the fresh LoRA too.
    weights = dict(quantized.model.named_parameters())
    for name, parameter in plain.model.named_parameters():
        if not name.removesuffix(".base_layer.weight").endswith(tuple(PROJECTIONS)):
            assert torch.equal(parameter, weights[name]), name
    assert quantized.trainable.keys() == plain.trainable.keys()


def test_memory_and_number_of_weights_are_counted(choice):
    plain, quantized = sa2va(dtype="bfloat16"), sa2va(choice, dtype="bfloat16")
    assert parameter_counts(quantized.model, quantized.group_of) == parameter_counts(
        plain.model, plain.group_of
    )
    linears = [m for m in quantized.model.modules() if isinstance(m, QuantizedLinear)]
    num_weights = sum(m.in_features * m.out_features for m in linears)
    num_rows = sum(m.out_features for m in linears)
    saved = standing_memory(plain)["frozen base"] - standing_memory(quantized)["frozen base"]
    scales = 4 * num_rows if choice == "8bit" else 0
    assert saved == 2 * num_weights - BYTES[choice] * num_weights - scales


def test_answers_are_scored_as_they_are_sampled(choice, scenes, prepare):
    """The sampler's log-probs are the scorer's, and the LoRA gets a gradient through every layer"""
    policy = sa2va(choice)
    batch = prepare(scenes, policy.processor)
    images = policy.encode(batch)
    prompts = policy.describe_prompts(images, range(4), images.prompt_masks)
    uniforms = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))
    completions, _ = policy.complete(images, prompts, 2, 6, uniforms)
    rows = prompts.repeat(2)
    scores = policy.score_answers(images, rows, completions.ids, completions.valid)
    valid = completions.valid
    torch.testing.assert_close(scores.logp[valid], completions.logp[valid], atol=1e-4, rtol=1e-4)
    scores.logp.sum().backward()
    for name, parameter in policy.trainable.items():
        if "lora_B" in name:
            assert parameter.grad.abs().max() > 0, name


def test_points_too(choice, qwens, sam):
    for folder in qwens.values():
        policy = tiny_policy(folder, sam, quantize_base=choice)
        layers = policy.engine.language_model.model.layers
        linears = [m for m in layers.modules() if isinstance(m, QuantizedLinear)]
        assert len(linears) == len(PROJECTIONS) * len(layers)
        vision = policy.model.vlm.model.visual.modules()
        assert not any(isinstance(module, QuantizedLinear) for module in vision)


# A run


def test_a_run_resumes_with_the_same_base_alone(choice, data, tmp_path):
    how = dict(quantize_base=choice, max_completion_length=6)
    output = run(data, tmp_path, max_steps=1, **how)
    run(data, tmp_path, max_steps=2, resume="", **how)
    pytest.importorskip("bitsandbytes", reason="it is not installed (extra: quantize)")
    other = next(other for other in CHOICES if other != choice)
    sentence = complaint_of(flags(data, output, resume="", **how | dict(quantize_base=other)))
    assert f"--quantize_base was {choice}, now {other}" in sentence
    # What is exported and evaluated has the base of the files, not the quantised one.
    policy = load_policy(output / "checkpoint_step_2", "policy", CHECKPOINT, "cpu")
    assert not any(isinstance(m, QuantizedLinear) for m in policy.model.modules())


# Refusals


def test_without_the_library_the_extra_is_named(monkeypatch, data, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"--quantize_base 4bit .*'\.\[quantize\]'"):
        require_library("--quantize_base 4bit")
    sentence = complaint_of(flags(data, tmp_path / "run", quantize_base="4bit"))
    assert "--quantize_base 4bit needs" in sentence and not (tmp_path / "run").exists()


def test_quantised_weights_do_not_train(choice):
    with pytest.raises(ValueError, match=f"--trainable_modules language_model.*{choice}"):
        sa2va(choice, ("language_model", "mlp1"))
