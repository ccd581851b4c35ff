"""The compiled forward with flash attention equals the modules on a GPU."""

import pytest
import torch

from rl_train.engine import Engine
from tests.engine.tiny import fast, prompts, quantized_llm, scored, slow, tiny_llm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def scored_without_graphs(llm, checkpointing, **sizes):
    engine = Engine(llm, pad_id=0, temperature=0.9, gradient_checkpointing=checkpointing)
    engine.fused(llm.lm_head.weight).graphs = None
    return scored(llm, fast, engine=engine, **sizes)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_flash_equals_modules(num_kv_heads, checkpointing):
    """Flash in compiled bf16 is no further off float32 than the modules in bf16."""
    sizes = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=num_kv_heads)
    sizes |= dict(initializer_range=0.02)
    llm = tiny_llm(lora_r=16, dtype=torch.bfloat16, device="cuda", **sizes)
    sizes = dict(prompt_length=150, num_tokens=140, lengths=(140, 2, 0, 1, 129))
    by_fast = scored_without_graphs(llm, checkpointing, **sizes)
    by = {slow: scored(llm, slow, **sizes), fast: by_fast}
    llm = llm.float()
    logp, entropy, gradients = scored(llm, slow, **sizes)
    exact = scored(llm, fast, checkpointing, **sizes)
    torch.testing.assert_close(exact[:2], (logp, entropy), atol=1e-4, rtol=0)
    errors = {}
    for way, (its_logp, _, its) in by.items():
        squares = [(its[name].float() - g).norm() ** 2 for name, g in gradients.items()]
        errors[way] = (its_logp - logp).norm(), sum(squares) ** 0.5
    assert all(ours < 1.3 * theirs for ours, theirs in zip(errors[fast], errors[slow])), errors
    for name, gradient in gradients.items():
        assert (exact[2][name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
        ours = by[fast][2][name].flatten().float()
        assert torch.cosine_similarity(ours, gradient.flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize(
    "num_kv_heads, quantized", [(1, None), (2, None), (2, "8bit"), (2, "4bit")]
)
def test_cuda_graphs_give_the_same(num_kv_heads, quantized, monkeypatch):
    """As without graphs. The first call runs without them, the second captures them."""
    if quantized == "4bit":
        pytest.importorskip("bitsandbytes", reason="it is not installed (extra: quantize)")
    shape = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=num_kv_heads)
    shape |= dict(dtype=torch.bfloat16, device="cuda", initializer_range=0.02, lora_r=16)
    llm = quantized_llm(quantized, **shape) if quantized else tiny_llm(**shape)
    engine = Engine(llm, pad_id=0, temperature=0.9, gradient_checkpointing=True)
    monkeypatch.setattr(engine, "release", lambda: None)
    fused = engine.fused(llm.lm_head.weight)
    graphs, sizes = fused.graphs, dict(prompt_length=150, num_tokens=140)
    answers = [(140, 2, 0, 1, 129), (131, 20, 1, 0, 120)]  # padded to the same sizes
    fused.graphs = None
    expected = [scored(llm, fast, engine=engine, lengths=lengths, **sizes) for lengths in answers]
    fused.graphs = graphs
    for number in range(6):
        logp, _, gradients = scored(llm, fast, engine=engine, lengths=answers[number % 2], **sizes)
        right_logp, _, right = expected[number % 2]
        assert (logp - right_logp).abs().max() < 1e-2
        for name, gradient in right.items():
            found, gradient = (g.flatten().float() for g in (gradients[name], gradient))
            assert torch.cosine_similarity(found, gradient, dim=0) > 0.99, name
            assert 0.97 < found.norm() / gradient.norm() < 1.03, name
    (of_sizes,) = graphs.of_sizes.values()
    num_layers = len(fused.layers)
    assert len(of_sizes.forward_graphs) == len(of_sizes.backward_graphs) == num_layers


def test_prompts_by_cuda_graphs():
    """The sampler's prompts: the same completions by the first call and by graphs."""
    sizes = dict(hidden_size=128, head_dim=32, initializer_range=0.02)
    llm = tiny_llm(lora_r=16, dtype=torch.bfloat16, device="cuda", **sizes)
    engine = Engine(llm, pad_id=0)
    uniforms = torch.rand(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    how = dict(num_generations=4, max_new_tokens=8, stop=None, uniforms=uniforms)
    calls = [engine.generate(*prompts(llm), **how) for _ in range(3)]
    (graphs,) = engine.fused(llm.lm_head.weight).graphs.of_sizes.values()
    assert len(graphs.forward_graphs) == 2 and not graphs.backward_graphs
    for completions in calls[1:]:
        torch.testing.assert_close(completions.logp, calls[0].logp, atol=0.05, rtol=0)
