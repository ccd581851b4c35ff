"""The forward by kernels: its parts, what it keeps, what it follows. `test_logprob` compares the whole with the modules too."""

import pytest
import torch
from rl_train.engine.logprob import by_kernels, by_modules, prepare_checkpointing, score_answers
from rl_train.engine.sampler import decoder_of
from transformers import Qwen2Config

from rl_train.engine import forward, forward_torch, logprob
from rl_train.engine.fused import Fused
from rl_train.engine.packing import pack
from tools.benchmarks.common import random_llm

SIZES = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def make(*shape, dtype=torch.float64, device="cpu", seed=0):
    return torch.randn(
        *shape,
        generator=torch.Generator(device).manual_seed(seed),
        device=device,
        dtype=torch.float32,
    ).to(dtype)


@pytest.fixture
def llm():
    return random_llm(Qwen2Config(**SIZES), 4, "cpu").float()


def work(llm, device="cpu", prompt_length=7, num_tokens=6, lengths=(6, 2, 0, 1, 5)):
    """Two prompts, the second shorter, of two and three rows."""
    mask = torch.ones(2, prompt_length, dtype=torch.long, device=device)
    mask[1, :3] = 0
    embeds = make(
        2, prompt_length, llm.config.hidden_size, dtype=llm.lm_head.weight.dtype, device=device
    ).requires_grad_()
    ids = torch.randint(
        llm.config.vocab_size, (5, num_tokens), generator=torch.Generator().manual_seed(1)
    ).to(device)
    valid = torch.arange(num_tokens, device=device) < torch.tensor(lengths, device=device)[:, None]
    return embeds, mask, torch.tensor([0, 0, 1, 1, 1], device=device), ids, valid


def scored(llm, how, checkpointing=False, **sizes):
    """(log-probs, entropy, {name: gradient of the LoRA, "embeds"}) of a weighted sum of the log-probs."""
    embeds, mask, prompt, ids, valid = work(llm, llm.device, **sizes)
    with torch.autocast(llm.device.type, torch.bfloat16, enabled=llm.dtype == torch.bfloat16):
        answers = score_answers(
            llm,
            embeds,
            mask,
            prompt,
            ids,
            valid,
            pad_id=0,
            temperature=0.9,
            gradient_checkpointing=checkpointing,
            how=how,
        )
    (
        answers.logp * make(*ids.shape, dtype=torch.float32, device=llm.device.type, seed=2)
    ).sum().backward()
    found = {name: p.grad for name, p in llm.named_parameters() if p.requires_grad} | {
        "embeds": embeds.grad
    }
    for parameter in llm.parameters():
        parameter.grad = None
    return answers.logp.detach(), answers.entropy, found


# The parts


def test_norm():
    residual, delta = (make(5, 8, seed=s).requires_grad_() for s in (0, 1))
    weight = make(8, seed=2)

    def by_hand(residual, delta):
        total = residual + delta
        return total, torch.nn.functional.rms_norm(total, (8,), weight, 1e-6)

    for found, expected in zip(
        forward._AddNorm.apply(residual, delta, weight, 1e-6, forward_torch),
        by_hand(residual, delta),
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    slopes = make(5, 8, seed=3), make(5, 8, seed=4)
    for slope in (slopes, (None, slopes[1])):  # the last norm's sum is not used
        outs = (
            forward._AddNorm.apply(residual, delta, weight, 1e-6, forward_torch),
            by_hand(residual, delta),
        )
        found, expected = (
            torch.autograd.grad(
                out if slope[0] is not None else out[1],
                (residual, delta),
                slope if slope[0] is not None else slope[1],
            )
            for out in outs
        )
        for f, e in zip(found, expected):
            torch.testing.assert_close(f, e, atol=1e-6, rtol=1e-5)


def test_rotation_turns_back():
    qkv, angle = make(3, 5, 6, seed=1).requires_grad_(), make(3, 3, seed=2)
    out = forward._Rotate.apply(qkv, angle.cos(), angle.sin(), 1, forward_torch)
    turned = torch.view_as_complex(torch.stack(qkv[:, :4].chunk(2, -1), -1)) * torch.exp(
        1j * angle[:, None]
    )
    torch.testing.assert_close(out[:, :4], torch.cat([turned.real, turned.imag], -1))
    assert torch.equal(out[:, 4:], qkv[:, 4:])
    assert torch.autograd.gradcheck(
        lambda x: forward._Rotate.apply(x, angle.cos(), angle.sin(), 1, forward_torch), qkv
    )


def test_gate():
    y = make(4, 9, seed=1).requires_grad_()  # two halves of 3, and 3 columns of something else
    d = make(4, 3, seed=2)
    gated = torch.nn.functional.silu(y[:, :3]) * y[:, 3:6]
    (expected,) = torch.autograd.grad(gated, y, d)
    dy, again = forward_torch.gate_backward(d, y.detach())
    torch.testing.assert_close(dy, expected[:, :6], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again, gated.detach())


def test_linears(llm):
    """q, k and v together: base, bias and LoRA, and the gradients of all that trains."""
    modules = [
        getattr(llm.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj", "v_proj")
    ]
    x = make(5, 64, dtype=torch.float32).requires_grad_()
    for module in modules:
        module.base_layer.bias.data.normal_()
    expected = torch.cat([module(x) for module in modules], dim=1)
    fused = Fused(modules)
    torch._foreach_copy_(fused.targets, [p.data for p in fused.sources])
    found, slope = (
        forward._Linear.apply(x, fused, *fused.sources),
        make(*expected.shape, dtype=torch.float32, seed=3),
    )
    torch.testing.assert_close(found, expected)
    for f, e in zip(
        *(torch.autograd.grad(out, (x, *fused.sources), slope) for out in (found, expected))
    ):
        torch.testing.assert_close(f, e, atol=1e-5, rtol=1e-4)


def test_runs_by_hand():
    """Prompts of 2 and 1 tokens behind padding; rows of 2 and 1 fed tokens, and one of 1."""
    runs = forward.runs(torch.tensor([[0, 0, 1, 1, 2], [-1, 0, 3, -1, -1]]))
    assert runs.slots.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert runs.query_ends.tolist() == [0, 2, 4, 5, 6, 7]
    assert runs.key_ends.tolist() == [0, 2, 6, 9, 10, 12]
    assert runs.keys.tolist() == [0, 1] + [0, 1, 2, 3] + [0, 1, 4] + [5] + [5, 6]
    assert runs.longest == (2, 4)


def test_runs_are_the_bias(llm):
    """A token sees the keys of its run up to itself: what the bias says."""
    _, mask, prompt, ids, valid = work(llm)
    packed = pack(mask, prompt, ids, valid, 0)
    runs = forward.runs(packed.part)
    seen = torch.zeros(len(runs.slots), len(runs.slots), dtype=torch.bool)
    for q0, q1, k0, k1 in zip(
        runs.query_ends, runs.query_ends[1:], runs.key_ends, runs.key_ends[1:]
    ):
        for i in range(q1 - q0):  # the last query sees all keys
            seen[q0 + i, runs.keys[k0 : k1 - (q1 - q0) + i + 1]] = True
    bias = torch.block_diag(*(packed.bias(torch.float32)[:, 0] == 0))
    assert torch.equal(seen, bias[runs.slots][:, runs.slots])


def flash(q, k, v, query_ends, key_ends, longest_query, longest_key, dropout, causal, *rest):
    """What flash attention computes: run by run, causal from the last query and key on."""
    assert causal and dropout == 0 and query_ends.dtype == key_ends.dtype == torch.int32
    outs, group = [], q.shape[1] // k.shape[1]
    for q0, q1, k0, k1 in zip(query_ends, query_ends[1:], key_ends, key_ends[1:]):
        assert 0 < q1 - q0 <= longest_query and k1 - k0 <= longest_key
        scores = (
            torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1].repeat_interleave(group, 1))
            * q.shape[-1] ** -0.5
        )
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(int(k1 - k0 - (q1 - q0)))
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", p, v[k0:k1].repeat_interleave(group, 1)))
    return torch.cat(outs), *[torch.zeros(1) for _ in range(4)]


def flash_backward(
    d,
    q,
    k,
    v,
    out,
    sums,
    query_ends,
    key_ends,
    longest_query,
    longest_key,
    dropout,
    causal,
    state,
    unused,
):
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(
            flash(*leaves, query_ends, key_ends, longest_query, longest_key, dropout, causal)[0],
            leaves,
            d,
        )


# The whole


@pytest.mark.parametrize("attention", ["dense", "flash"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_kv_heads, lora", [(2, True), (4, True), (1, False)])
def test_equals_modules(num_kv_heads, lora, checkpointing, attention, monkeypatch):
    """Flash attention itself is not on a CPU: here a stand-in of the same arguments."""
    if attention == "flash":
        monkeypatch.setattr(forward, "by_flash", lambda x: True)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    llm = random_llm(
        Qwen2Config(**SIZES | dict(num_key_value_heads=num_kv_heads)), 4, "cpu"
    ).float()
    if not lora:
        for module in [m for m in llm.modules() if hasattr(m, "base_layer")]:
            module.scaling["default"] = 0.0
    right, found = scored(llm, by_modules), scored(llm, by_kernels, checkpointing)
    torch.testing.assert_close(found[:2], right[:2], atol=1e-5, rtol=0)
    assert set(found[2]) == set(right[2]) and len(found[2]) == 2 * 7 * 2 + 1
    for name, gradient in right[2].items():
        assert (found[2][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def test_bf16_is_as_close_to_float32_as_the_modules():
    llm = random_llm(Qwen2Config(**SIZES), 4, "cpu")
    errors = []
    found = [scored(llm, how) for how in (by_modules, by_kernels)]
    right = scored(llm.float(), by_modules)
    for logp, _, gradient in found:
        errors.append(
            [
                (logp - right[0]).norm(),
                sum((gradient[n].float() - g).norm() ** 2 for n, g in right[2].items()) ** 0.5,
            ]
        )
    assert errors[1][0] < 1.3 * errors[0][0] and errors[1][1] < 1.3 * errors[0][1]


def test_follows_the_weights(llm):
    """LoRA in use is read at each forward."""
    before = scored(llm, by_kernels)[0]
    with torch.no_grad():
        for name, parameter in llm.named_parameters():
            if "lora_B" in name:
                parameter.neg_()
    after = scored(llm, by_kernels)[0]
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, scored(llm, by_modules)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "checkpointing, fault",
    [
        (False, (RuntimeError, "modified by an inplace operation")),
        (True, (AssertionError, "copied anew between a checkpointed forward and its backward")),
    ],
)
def test_a_lora_that_changed_under_a_graph_is_an_error(llm, checkpointing, fault):
    """Not a wrong gradient: what is recomputed in the backward would be of other weights."""
    embeds, mask, prompt, ids, valid = work(llm)
    answers = score_answers(
        llm,
        embeds,
        mask,
        prompt,
        ids,
        valid,
        pad_id=0,
        temperature=1.0,
        gradient_checkpointing=checkpointing,
        how=by_kernels,
    )
    scored(llm, by_kernels)
    with pytest.raises(fault[0], match=fault[1]):
        answers.logp.sum().backward()


def test_a_base_that_trains_takes_the_modules(llm, monkeypatch):
    """The kernels have no gradient for it."""
    llm.model.layers[1].input_layernorm.weight.requires_grad_()
    with pytest.raises(AssertionError, match="no gradient"):
        scored(llm, by_kernels)
    monkeypatch.setattr(logprob, "decoder_for", lambda llm, embeds: decoder_of(llm))  # as on a GPU
    assert scored(llm, None)[2]["model.layers.1.input_layernorm.weight"].norm() > 0


def test_keeps_little():
    """What is kept for the backward, under autocast and with an MLP as wide as real ones: less than two thirds of what the modules keep.

    With layers recomputed in the backward less than a third of what is kept without, by either.
    """
    llm = random_llm(
        Qwen2Config(**SIZES | dict(intermediate_size=344, num_hidden_layers=6)), 4, "cpu"
    )
    prepare_checkpointing(llm)
    (embeds, mask, prompt, ids, valid), kept = work(llm, prompt_length=200), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    scored(llm, by_kernels)  # moves the weights
    for how in (by_modules, by_kernels):
        for checkpointing in (False, True):
            weights, seen = {p.untyped_storage().data_ptr() for p in llm.parameters()}, {}
            with (
                torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
                torch.autocast("cpu", torch.bfloat16),
            ):
                score_answers(
                    llm,
                    embeds,
                    mask,
                    prompt,
                    ids,
                    valid,
                    pad_id=0,
                    temperature=1.0,
                    gradient_checkpointing=checkpointing,
                    how=how,
                )
            kept[how, checkpointing] = sum(seen.values())
        assert 0 < kept[how, True] < 1 / 3 * kept[how, False]
    assert 0 < kept[by_kernels, False] < 2 / 3 * kept[by_modules, False]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "tokens, width, heads, size, rank",
    [(7, 64, 6, 32, 4), (70_000, 96, 6, 32, 0), (300, 2048, 20, 128, 128)],
)
def test_triton_equals_torch(dtype, tokens, width, heads, size, rank):
    """Each kernel against plain torch in float32, on the same numbers of `dtype`."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from rl_train.engine import forward_triton

    seeds = iter(range(100))

    def new(*shape):
        return make(*shape, dtype=dtype, device="cuda", seed=next(seeds))

    inner, m = 3 * width + 5, tokens
    cases = dict(
        add_norm=[(new(m, width), new(m, width + rank)[:, :width], new(width), 1e-6)],
        add_norm_backward=[
            (new(m, width), new(m, width), new(m, width), new(width), 1e-6),
            (new(m, width), None, new(m, width), new(width), 1e-6),
        ],
        rotate=[
            (
                new(m, heads * size + rank)[:, : heads * size].unflatten(1, (heads, size)),
                new(m, size // 2),
                new(m, size // 2),
                heads - 1,
            )
        ],
        gate=[(new(m, 2 * inner + rank), inner)],
        gate_backward=[(new(m, inner), new(m, 2 * inner + rank))],
    )
    for name, calls in cases.items():
        for arguments in calls:
            exact = getattr(forward_torch, name)(
                *[a.float() if torch.is_tensor(a) else a for a in arguments]
            )
            found = getattr(forward_triton, name)(*arguments)
            for f, e in zip(*(out if isinstance(out, tuple) else (out,) for out in (found, exact))):
                assert f.dtype == dtype and f.shape == e.shape
                assert (f.float() - e).abs().max() <= (
                    1e-5 if dtype == torch.float32 else 2e-2
                ) * e.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_flash_equals_modules(num_kv_heads, checkpointing):
    """bf16 by flash attention and Triton, against the modules in float32: no further off than the modules in bf16."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    config = Qwen2Config(
        **SIZES | dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=num_kv_heads)
    )
    llm, sizes = (
        random_llm(config, 16, "cuda"),
        dict(prompt_length=150, num_tokens=140, lengths=(140, 2, 0, 1, 129)),
    )
    found = {
        how: scored(llm, how, checkpointing and how is by_kernels, **sizes)
        for how in (by_modules, by_kernels)
    }
    llm = llm.float()
    right = scored(llm, by_modules, **sizes)
    exact = scored(llm, by_kernels, checkpointing, **sizes)
    torch.testing.assert_close(exact[:2], right[:2], atol=1e-4, rtol=0)
    error = {}
    for how, (logp, _, gradient) in found.items():
        error[how] = (
            (logp - right[0]).norm(),
            sum((gradient[n].float() - g).norm() ** 2 for n, g in right[2].items()) ** 0.5,
        )
    assert all(mine < 1.3 * theirs for mine, theirs in zip(error[by_kernels], error[by_modules])), (
        error
    )
    for name, gradient in right[2].items():
        assert (exact[2][name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
        assert (
            torch.cosine_similarity(
                found[by_kernels][2][name].flatten().float(), gradient.flatten(), dim=0
            )
            > 0.99
        ), name
