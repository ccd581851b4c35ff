"""Quantised layers on the engine's fast path, on the CPU by the plain twins of its kernels."""

import pytest
import torch

from rl_train.engine import Engine
from rl_train.engine.fused_weights import unsupported
from rl_train.engine.quantize import QuantizedLinear
from tests.engine.tiny import (
    assert_same,
    both,
    fast,
    prompts,
    quantized_llm,
    scored,
    slow,
    tiny_llm,
    trained,
)


def test_the_sampler_dequantises_each_layer(choice, monkeypatch):
    llm = quantized_llm(choice)
    assert unsupported(llm) is None
    assert_same(*both(Engine(llm, pad_id=1), monkeypatch, *prompts(llm)))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora_r", [0, 4])
def test_scores_and_gradients_are_those_of_the_modules(choice, checkpointing, lora_r):
    """Without checkpointing too: what autograd kept of a layer would be another's by then."""
    llm = quantized_llm(choice, lora_r=lora_r)
    right, found = scored(llm, slow), scored(llm, fast, checkpointing)
    torch.testing.assert_close(found[:2], right[:2], atol=1e-5, rtol=0)
    assert set(found[2]) == set(right[2]) and len(found[2]) == 2 * 7 * 3 * bool(lora_r) + 1
    for name, gradient in right[2].items():
        assert (found[2][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def test_one_layers_matrices_exist_at_a_time(choice):
    """The weights stay packed, in their own storage; a released engine leaves them as they were."""
    llm = quantized_llm(choice)
    before = {name: value.clone() for name, value in llm.state_dict().items()}
    engine = Engine(llm, pad_id=1)
    with fast(engine):
        engine.read(*prompts(llm))
        layers = engine.fused(llm.lm_head.weight).layers
    for groups in zip(*(layer.linears for layer in layers)):
        assert len({group.copied.weight.data_ptr() for group in groups}) == 1
        assert len({group.lora_a.data_ptr() for group in groups}) == len(layers)
    engine.release()
    assert all(torch.equal(value, before[name]) for name, value in llm.state_dict().items())


def test_a_cast_without_release_is_an_error(choice):
    llm = quantized_llm(choice)
    engine = Engine(llm, pad_id=1)
    with fast(engine):
        engine.read(*prompts(llm))
        llm.to(torch.bfloat16)
        with pytest.raises(AssertionError, match="release"):
            engine.read(*prompts(llm))


def test_linears_of_which_some_are_quantised_take_the_modules(choice):
    llm = tiny_llm()
    lora = llm.model.layers[1].self_attn.q_proj
    lora.base_layer = QuantizedLinear(lora.base_layer, choice, "cpu")
    assert unsupported(llm) == "only some of its linears are quantised"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(7, 3), (1024, 5), (2500, 130)])
def test_a_gpu_dequantises_to_the_same_bits(sizes, dtype):
    linear = torch.nn.Linear(*sizes, dtype=dtype).requires_grad_(False)
    quantized = QuantizedLinear(linear, "8bit", "cuda")
    on_gpu = quantized.dequantize().cpu()
    assert torch.equal(on_gpu, quantized.cpu().dequantize())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(choice, monkeypatch):
    """A token's CUDA graph dequantises each layer, by weights that it reads anew at each use."""
    sizes = dict(hidden_size=256, intermediate_size=352, num_attention_heads=8)
    llm = quantized_llm(choice, lora_r=16, device="cuda", initializer_range=0.02, **sizes)
    engine = Engine(llm, pad_id=1)
    assert_same(*both(engine, monkeypatch, *prompts(llm)))
    with torch.no_grad():
        for parameter in trained(llm).values():
            parameter.mul_(1.5)
    assert_same(*both(engine, monkeypatch, *prompts(llm)))  # by the same graph
    engine.release()
    right, found = scored(llm, slow), scored(llm, fast)
    torch.testing.assert_close(found[:2], right[:2], atol=1e-4, rtol=0)
    for name, gradient in right[2].items():
        assert (found[2][name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
