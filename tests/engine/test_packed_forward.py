"""The packed forward and its backward: their parts, what they keep, what they follow.

`test_score` compares the whole with plain forwards, row by row, too.
"""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from rl_train.engine import Engine, layer_vjp, varlen_attention
from rl_train.engine.hf_backend import prepare_checkpointing
from rl_train.roles import Roles
from tests.engine.tiny import fast, scored, slow, tiny_llm, trained, work

# Flash attention itself is not on a CPU: stand-ins of the same arguments


def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout, causal, *rest):
    """Compute flash attention: segment by segment, causal from the last query and key on."""
    assert causal and dropout == 0 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    outs, sums, group = [], [], q.shape[1] // k.shape[1]
    for q0, q1, k0, k1 in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:]):
        assert 0 <= q1 - q0 <= max_seqlen_q and k1 - k0 <= max_seqlen_k
        keys, values = (x[k0:k1].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * q.shape[-1] ** -0.5
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(int(k1 - k0 - (q1 - q0)))
        scores = scores.masked_fill(~seen, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1), *[torch.zeros(1) for _ in range(3)]


def flash_backward(d, q, k, v, out, sums, *ends_and_options):
    *options, state, unused = ends_and_options
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        its_out, its_sums, *_ = flash(*leaves, *options)
        torch.testing.assert_close((out, sums), (its_out, its_sums))  # those of its forward
        return torch.autograd.grad(its_out, leaves, d)


# The whole


@pytest.mark.parametrize("how", ["dense", "flash"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_kv_heads, lora", [(2, True), (4, True), (1, False)])
def test_equals_modules(num_kv_heads, lora, checkpointing, how, monkeypatch):
    if how == "flash":
        monkeypatch.setattr(varlen_attention, "by_flash", lambda x: True)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    llm = tiny_llm(lora_r=4 * lora, num_key_value_heads=num_kv_heads)
    right, found = scored(llm, slow), scored(llm, fast, checkpointing)
    torch.testing.assert_close(found[:2], right[:2], atol=1e-5, rtol=0)
    assert set(found[2]) == set(right[2]) and len(found[2]) == 2 * 7 * 2 * lora + 1
    for name, gradient in right[2].items():
        assert (found[2][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def test_a_compiled_backward_computes_no_product_that_nobody_reads():
    """Nor compiles again for other lengths; its gradients are those of the plain functions.

    Forward W and A are one product: 1 + 3 before attention, 2 + 3 + 2 behind it. Of a linear with
    its LoRA [W; A, B], the backward of what lies behind attention needs: forward
    all of `out` and `gate_up` (3 + 5 products) and of `down` A's; backward 5 + 8 + 5, as a LoRA has
    3 more than W. Before attention it is A's for q, k and v together, then 3 x 2 + 3.
    """
    llm = tiny_llm()
    engine, products = Engine(llm, pad_id=0, temperature=0.9, gradient_checkpointing=True), {}
    sizes = [{}, dict(prompt_length=9, num_tokens=4, lengths=(4, 4, 2, 0, 1))]
    right = [scored(llm, fast, engine=engine, **one) for one in sizes]
    with fast(engine):
        fused = engine.fused(llm.lm_head.weight)

    def compiled(function):
        def count(graph, inputs):
            targets = [str(node.target) for node in graph.graph.nodes]
            products.setdefault(function.__name__, []).append(
                sum(target in ("aten.mm.default", "aten.addmm.default") for target in targets)
            )
            return make_boxed_func(graph.forward)

        return torch.compile(function, backend=aot_autograd(fw_compiler=count))

    fused.functions = layer_vjp.LayerFunctions(*map(compiled, layer_vjp.FUNCTIONS))
    release, engine.release = engine.release, lambda: None
    found = [scored(llm, fast, engine=engine, **one) for one in sizes]
    release()
    for f, r in zip(found, right):
        torch.testing.assert_close(f, r, atol=1e-5, rtol=1e-4)
    assert products.pop("norm")
    assert products == dict(
        before_attention=[4],
        after_attention=[7],
        before_attention_vjp=[10],
        after_attention_vjp=[27],
    )


def test_bf16_is_as_close_to_float32_as_the_modules():
    llm = tiny_llm(dtype=torch.bfloat16, initializer_range=0.02)
    found = [scored(llm, way) for way in (slow, fast)]
    logp, _, gradients = scored(llm.float(), slow)
    errors = []
    for its_logp, _, its in found:
        squares = [(its[name].float() - g).norm() ** 2 for name, g in gradients.items()]
        errors.append(((its_logp - logp).norm(), sum(squares) ** 0.5))
    assert errors[1][0] < 1.3 * errors[0][0] and errors[1][1] < 1.3 * errors[0][1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_follows_the_weights(checkpointing, monkeypatch):
    """LoRA in use is read at each forward."""
    llm = tiny_llm()
    engine = Engine(llm, pad_id=0, temperature=0.9, gradient_checkpointing=checkpointing)
    monkeypatch.setattr(engine, "release", lambda: None)  # or all were copied anew
    before = scored(llm, fast, engine=engine)[0]
    with torch.no_grad():
        for name, parameter in llm.named_parameters():
            if "lora_B" in name:
                parameter.neg_()
    after = scored(llm, fast, engine=engine)[0]
    monkeypatch.undo()
    engine.release()
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, scored(llm, slow)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change, fault, message",
    [
        (lambda own: own.clone(), AssertionError, "another LoRA"),
        (lambda own: own.mul_(2), RuntimeError, "modified by an inplace operation"),
    ],
    ids=["place", "numbers"],
)
def test_a_lora_that_changed_under_a_checkpoint_is_an_error(change, fault, message):
    """A recomputation in the backward would be of other weights: no wrong gradient is given."""
    llm = tiny_llm()
    engine = Engine(llm, pad_id=0, gradient_checkpointing=True)
    first = next(iter(trained(llm).values()))
    with fast(engine):
        answers = engine.score(*work(llm))
    with torch.no_grad():
        changed = change(first)
    if changed is not first:
        first.data = changed
    with pytest.raises(fault, match=message):
        answers.logp.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("role", ["policy", "teacher"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_in_between_change_no_gradient(checkpointing, role, grad):
    llm = tiny_llm()
    engine, gradients = Engine(llm, pad_id=0, gradient_checkpointing=checkpointing), []
    roles = Roles(trained(llm))
    for bank in roles.copies["teacher"].values():
        bank.neg_()
    for others in (False, True):
        with fast(engine):
            answers = engine.score(*work(llm))
            if others:
                with roles.use(role), torch.set_grad_enabled(grad):
                    engine.score(*work(llm, num_tokens=4, lengths=(4, 2, 0, 1, 1)))
            answers.logp.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in trained(llm).values()])
        llm.zero_grad()
    assert all(map(torch.equal, *gradients))


def test_a_base_that_trains_takes_the_modules():
    """The kernels have no gradient for it."""
    llm = tiny_llm()
    weight = llm.model.layers[1].input_layernorm.weight.requires_grad_()
    engine = Engine(llm, pad_id=0)
    assert engine.fast_on == ()
    engine.score(*work(llm)).logp.sum().backward()
    assert weight.grad.norm() > 0


def test_keeps_little():
    """Bytes kept for the backward, under autocast and with an MLP as wide as real ones.

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
        fused = engine.fused(inputs[0])
        # As on a GPU, where torch.compile decides what is kept.
        partition = dict(backend="aot_eager_decomp_partition")
        compiled = [torch.compile(function, **partition) for function in fused.functions]
        fused.functions = layer_vjp.LayerFunctions(*compiled)
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
