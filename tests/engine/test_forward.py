"""The forward by kernels, in their torch twins: its parts, what it keeps, what it follows.

`test_score` compares the whole with plain forwards, row by row, too.
"""

from types import SimpleNamespace

import pytest
import torch

from rl_train.engine import Engine, blocks, forward_torch
from rl_train.engine.fused import FusedLinears
from rl_train.engine.modules import prepare_checkpointing
from tests.engine.tiny import fast, make, scored, slow, tiny_llm, work

# The parts


def test_norm():
    residual, delta = (make(5, 8, seed=s).requires_grad_() for s in (0, 1))
    norm = SimpleNamespace(weight=make(8, seed=2), variance_epsilon=1e-6)

    def by_hand(residual, delta):
        total = residual + delta
        return total, torch.nn.functional.rms_norm(total, (8,), norm.weight, 1e-6)

    def ours(residual, delta):
        return blocks.AddNorm.apply(residual, delta, norm, forward_torch)

    for found, expected in zip(ours(residual, delta), by_hand(residual, delta)):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    slopes = make(5, 8, seed=3), make(5, 8, seed=4)
    for kept in (slice(0, 2), slice(1, 2)):  # the last norm's sum is not used
        found, expected = (
            torch.autograd.grad(f(residual, delta)[kept], (residual, delta), slopes[kept])
            for f in (ours, by_hand)
        )
        for f, e in zip(found, expected):
            torch.testing.assert_close(f, e, atol=1e-6, rtol=1e-5)


def test_rotation_turns_back():
    heads, angle = make(3, 5, 6, seed=1).requires_grad_(), make(3, 3, seed=2)

    def rotate(x):
        return blocks.Rotate.apply(x, angle.cos(), angle.sin(), 1, forward_torch)

    out = rotate(heads)
    plane = torch.view_as_complex(torch.stack(heads[:, :4].chunk(2, -1), -1))
    turned = plane * torch.exp(1j * angle[:, None])
    torch.testing.assert_close(out[:, :4], torch.cat([turned.real, turned.imag], -1))
    assert torch.equal(out[:, 4:], heads[:, 4:])
    assert torch.autograd.gradcheck(rotate, heads)


def test_gate():
    y = make(4, 9, seed=1).requires_grad_()  # two halves of 3, and 3 columns of something else
    d = make(4, 3, seed=2)
    gated = torch.nn.functional.silu(y[:, :3]) * y[:, 3:6]
    (expected,) = torch.autograd.grad(gated, y, d)
    dy, again = forward_torch.gate_backward(d, y.detach())
    torch.testing.assert_close(dy, expected[:, :6], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again, gated.detach())


def test_linears():
    """q, k and v together: base, bias and LoRA, and the gradients of all that trains."""
    attention = tiny_llm().model.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = make(5, 64, dtype=torch.float32).requires_grad_()
    for module in modules:
        module.base_layer.bias.data.normal_()
    expected = torch.cat([module(x) for module in modules], dim=1)
    linears = FusedLinears(modules)
    torch._foreach_copy_(linears.targets, [p.data for p in linears.sources])
    found = blocks.Linear.apply(x, linears, *linears.sources)
    slope = make(*expected.shape, dtype=torch.float32, seed=3)
    torch.testing.assert_close(found, expected)
    wanted = (x, *linears.sources)
    for f, e in zip(*(torch.autograd.grad(out, wanted, slope) for out in (found, expected))):
        torch.testing.assert_close(f, e, atol=1e-5, rtol=1e-4)


# Flash attention itself is not on a CPU: stand-ins of the same arguments


def flash(q, k, v, query_ends, key_ends, longest_query, longest_key, dropout, causal, *rest):
    """What flash attention computes: run by run, causal from the last query and key on."""
    assert causal and dropout == 0 and query_ends.dtype == key_ends.dtype == torch.int32
    outs, group = [], q.shape[1] // k.shape[1]
    for q0, q1, k0, k1 in zip(query_ends, query_ends[1:], key_ends, key_ends[1:]):
        assert 0 < q1 - q0 <= longest_query and k1 - k0 <= longest_key
        keys, values = (x[k0:k1].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * q.shape[-1] ** -0.5
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(int(k1 - k0 - (q1 - q0)))
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", p, values))
    return torch.cat(outs), *[torch.zeros(1) for _ in range(4)]


def flash_backward(d, q, k, v, out, sums, *ends_and_options):
    *options, state, unused = ends_and_options
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(flash(*leaves, *options)[0], leaves, d)


# The whole


@pytest.mark.parametrize("how", ["dense", "flash"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_kv_heads, lora", [(2, True), (4, True), (1, False)])
def test_equals_modules(num_kv_heads, lora, checkpointing, how, monkeypatch):
    if how == "flash":
        monkeypatch.setattr(blocks, "by_flash", lambda x: True)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    llm = tiny_llm(num_key_value_heads=num_kv_heads)
    if not lora:
        for module in [m for m in llm.modules() if hasattr(m, "base_layer")]:
            module.scaling["default"] = 0.0
    right, found = scored(llm, slow), scored(llm, fast, checkpointing)
    torch.testing.assert_close(found[:2], right[:2], atol=1e-5, rtol=0)
    assert set(found[2]) == set(right[2]) and len(found[2]) == 2 * 7 * 2 + 1
    for name, gradient in right[2].items():
        assert (found[2][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def test_bf16_is_as_close_to_float32_as_the_modules():
    llm = tiny_llm(dtype=torch.bfloat16, initializer_range=0.02)
    found = [scored(llm, way) for way in (slow, fast)]
    logp, _, gradients = scored(llm.float(), slow)
    errors = []
    for its_logp, _, its in found:
        squares = [(its[name].float() - g).norm() ** 2 for name, g in gradients.items()]
        errors.append(((its_logp - logp).norm(), sum(squares) ** 0.5))
    assert errors[1][0] < 1.3 * errors[0][0] and errors[1][1] < 1.3 * errors[0][1]


def test_follows_the_weights():
    """LoRA in use is read at each forward."""
    llm = tiny_llm()
    engine = Engine(llm, pad_id=0, temperature=0.9)
    before = scored(llm, fast, engine=engine)[0]
    with torch.no_grad():
        for name, parameter in llm.named_parameters():
            if "lora_B" in name:
                parameter.neg_()
    after = scored(llm, fast, engine=engine)[0]
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, scored(llm, slow)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "checkpointing, fault, message",
    [
        (False, RuntimeError, "modified by an inplace operation"),
        (True, AssertionError, "copied anew between a checkpointed forward and its backward"),
    ],
)
def test_a_lora_that_changed_under_a_graph_is_an_error(checkpointing, fault, message):
    """Not a wrong gradient: what is recomputed in the backward would be of other weights."""
    llm = tiny_llm()
    engine = Engine(llm, pad_id=0, gradient_checkpointing=checkpointing)
    with fast(engine):
        answers = engine.score(*work(llm))
        engine.score(*work(llm))
    with pytest.raises(fault, match=message):
        answers.logp.sum().backward()


def test_a_base_that_trains_takes_the_modules():
    """The kernels have no gradient for it."""
    llm = tiny_llm()
    weight = llm.model.layers[1].input_layernorm.weight.requires_grad_()
    engine = Engine(llm, pad_id=0)
    assert engine.fast_on == ()
    engine.score(*work(llm)).logp.sum().backward()
    assert weight.grad.norm() > 0


def test_keeps_little():
    """What is kept for the backward, under autocast and with an MLP as wide as real ones.

    Less than two thirds of what the modules keep. With layers recomputed in the backward less than
    a third of what is kept without, by either.
    """
    sizes = dict(intermediate_size=344, num_hidden_layers=6)
    llm = tiny_llm(dtype=torch.bfloat16, **sizes)
    prepare_checkpointing(llm)
    engine, inputs, kept = Engine(llm, pad_id=0), work(llm, prompt_length=200), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with fast(engine):  # moves the weights
        engine.score(*inputs)
    for way in (slow, fast):
        for engine.gradient_checkpointing in (False, True):
            weights, seen = {p.untyped_storage().data_ptr() for p in llm.parameters()}, {}
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with hooks, torch.autocast("cpu", torch.bfloat16), way(engine):
                engine.score(*inputs)
            kept[way, engine.gradient_checkpointing] = sum(seen.values())
        assert 0 < kept[way, True] < 1 / 3 * kept[way, False]
    assert 0 < kept[fast, False] < 2 / 3 * kept[slow, False]
