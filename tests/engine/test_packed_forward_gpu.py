"""The compiled forward with flash attention equals the modules on a GPU."""

import pytest
import torch

from tests.engine.tiny import fast, scored, slow, tiny_llm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_flash_equals_modules(num_kv_heads, checkpointing):
    """Flash in compiled bf16 is no further off float32 than the modules in bf16."""
    sizes = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=num_kv_heads)
    sizes |= dict(initializer_range=0.02)
    llm = tiny_llm(lora_r=16, dtype=torch.bfloat16, device="cuda", **sizes)
    sizes = dict(prompt_length=150, num_tokens=140, lengths=(140, 2, 0, 1, 129))
    by = {slow: scored(llm, slow, **sizes), fast: scored(llm, fast, checkpointing, **sizes)}
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
