"""On a GPU: the forward's Triton kernels equal their twins; with flash attention, the modules."""

import pytest
import torch

from rl_train.engine import Engine, forward_torch
from tests.engine.tiny import fast, make, scored, slow, tiny_llm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "tokens, width, heads, size, rank",
    [(7, 64, 6, 32, 4), (70_000, 96, 6, 32, 0), (300, 2048, 20, 128, 128)],
)
def test_triton_equals_torch(dtype, tokens, width, heads, size, rank):
    """Each kernel against plain torch in float32, on the same numbers of `dtype`."""
    from rl_train.engine import forward_triton

    seeds = iter(range(100))

    def new(*shape):
        return make(*shape, dtype=dtype, device="cuda", seed=next(seeds))

    inner, m = 3 * width + 5, tokens
    qkv = new(m, heads * size + rank)[:, : heads * size].unflatten(1, (heads, size))
    cases = dict(
        add_norm=[(new(m, width), new(m, width + rank)[:, :width], new(width), 1e-6)],
        add_norm_backward=[
            (new(m, width), new(m, width), new(m, width), new(width), 1e-6),
            (new(m, width), None, new(m, width), new(width), 1e-6),
        ],
        rotate=[(qkv, new(m, size // 2), new(m, size // 2), heads - 1)],
        gate=[(new(m, 2 * inner + rank), inner)],
        gate_backward=[(new(m, inner), new(m, 2 * inner + rank))],
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, calls in cases.items():
        for arguments in calls:
            exact = [a.float() if torch.is_tensor(a) else a for a in arguments]
            exact = getattr(forward_torch, name)(*exact)
            found = getattr(forward_triton, name)(*arguments)
            for f, e in zip(*(out if isinstance(out, tuple) else (out,) for out in (found, exact))):
                assert f.dtype == dtype and f.shape == e.shape
                assert (f.float() - e).abs().max() <= tolerance * e.abs().max(), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_flash_equals_modules(num_kv_heads, checkpointing):
    """bf16 by flash attention and Triton: no further off float32 than the modules in bf16."""
    sizes = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=num_kv_heads)
    sizes |= dict(initializer_range=0.02)
    llm = tiny_llm(lora_r=16, dtype=torch.bfloat16, device="cuda", **sizes)
    assert Engine(llm, pad_id=0).fused(llm.lm_head.weight).forward_ops is not forward_torch
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
