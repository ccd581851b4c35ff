"""Quantised layers on the engine's fast path, on the CPU by the plain twins of its kernels."""

import pytest
import torch

from rl_train.engine import Engine
from rl_train.engine.fused_weights import FusedModel, unsupported
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
    """The weights stay packed; a released engine leaves them as they were."""
    llm = quantized_llm(choice)
    before = {name: value.clone() for name, value in llm.state_dict().items()}
    engine = Engine(llm, pad_id=1)
    with fast(engine):
        engine.last_hidden_states(*prompts(llm))
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
        engine.last_hidden_states(*prompts(llm))
        llm.to(torch.bfloat16)
        with pytest.raises(AssertionError, match="release"):
            engine.last_hidden_states(*prompts(llm))


def test_linears_of_which_some_are_quantised_take_the_modules(choice):
    llm = tiny_llm()
    lora = llm.model.layers[1].self_attn.q_proj
    lora.base_layer = QuantizedLinear(lora.base_layer, choice, "cpu")
    assert unsupported(llm) == "only some of its linears are quantised"


@pytest.mark.parametrize("num_loras", [1, 2])
def test_int8_weights_are_those_of_a_dequantised_layer(num_loras):
    """The sampler's kernel reads the first, all else the second."""
    llm = quantized_llm("8bit")
    linears = [m for m in llm.model.layers.modules() if isinstance(m, QuantizedLinear)]
    before = [linear.dequantize() for linear in linears]
    fused = FusedModel(llm)
    fused.refresh()
    if num_loras > 1:
        fused.hold_lora()
    for number, layer in enumerate(fused.layers):
        with fused.gathered(number, number + 1, num_loras) as dequantized:
            int8 = layer.in_int8(num_loras)
            for name in ("qkv", "out", "gate_up", "down"):
                values, scale, lora_a = getattr(int8, name).int8
                rows = torch.cat([values * scale[:, None], lora_a])
                assert torch.equal(rows, getattr(dequantized, name).weight), (number, name)
    fused.release()
    for linear, weight in zip(linears, before):
        assert linear.weight.untyped_storage().nbytes() == linear.weight.nbytes
        assert torch.equal(linear.dequantize(), weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (20, 128, 70, 1024, True, 4),
        (70, 192, 0, 64, True, 1),
        (128, 8192, 6, 384, True, 2),
        (9, 64, 384, 384, False, 1),
    ],
)
def test_product_with_int8_weights(sizes, dtype):
    from rl_train.engine import int8_triton
    from rl_train.engine.layers import Int8Weights

    num_rows, outputs, rows_of_a, width, split, summands = sizes
    values = torch.randint(-127, 128, (outputs, width), dtype=torch.int8, device="cuda")
    scale = torch.rand(outputs, device="cuda") / 1000
    x, lora_a = (torch.randn(n, width, device="cuda").to(dtype) for n in (num_rows, rows_of_a))
    weights = torch.cat([(values * scale[:, None]).to(dtype), lora_a])
    assert int8_triton.fits(outputs, width)
    y = int8_triton.product(x, Int8Weights(values, scale, lora_a), split)
    assert y.shape == (summands, num_rows, outputs + rows_of_a)
    expected = x.double() @ weights.double().t()
    # One summand is rounded to bfloat16.
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    assert (y.double().sum(0) - expected).norm() < tolerance * expected.norm()


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
@pytest.mark.parametrize("mlp_width", [352, 384])
def test_on_a_gpu(choice, mlp_width, monkeypatch):
    """A token's CUDA graph dequantises each layer, by weights that it reads anew at each use.

    Of int8 a kernel multiplies without that, if it supports the widths.
    """
    from rl_train.engine import int8_triton

    products, product = [], int8_triton.product
    monkeypatch.setattr(
        int8_triton, "product", lambda *a, **k: products.append(a) or product(*a, **k)
    )
    sizes = dict(hidden_size=256, intermediate_size=mlp_width, num_attention_heads=8)
    llm = quantized_llm(choice, lora_r=16, device="cuda", initializer_range=0.02, **sizes)
    engine = Engine(llm, pad_id=1)
    assert_same(*both(engine, monkeypatch, *prompts(llm)))
    assert bool(products) == (choice == "8bit" and mlp_width == 384)
    with torch.no_grad():
        for parameter in trained(llm).values():
            parameter.mul_(1.5)
    assert_same(*both(engine, monkeypatch, *prompts(llm)))  # by the same graph
    engine.release()
    right, found = scored(llm, slow), scored(llm, fast)
    torch.testing.assert_close(found[:2], right[:2], atol=1e-4, rtol=0)
    for name, gradient in right[2].items():
        assert (found[2][name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
