"""Layers that graphs launch compute what layers without graphs do, whatever runs in between.

On a CPU functions stand for the graphs, and stand-ins for flash attention's kernels. Buffers are
overwritten behind each call: nothing may read there what an earlier call has left.
"""

import gc
import weakref
from functools import partial

import pytest
import torch

from rl_train.engine import Engine, layer_graphs, varlen_attention
from rl_train.engine.layer_graphs import LayerGraphs
from rl_train.engine.varlen_attention import varlen_segments
from tests.engine.test_delayed import Roles
from tests.engine.test_packed_forward import flash, flash_backward
from tests.engine.tiny import (
    assert_same,
    fast,
    make,
    prompts,
    quantized_llm,
    scored,
    slow,
    tiny_llm,
    trained,
    work,
)

SIZES = dict(prompt_length=9, num_tokens=4, lengths=(4, 4, 2, 0, 1))
LONGER = dict(prompt_length=70, num_tokens=90, lengths=(90, 60, 0, 1, 75))


class Captured:
    """A function in place of its graph."""

    def __init__(self, function):
        self.replay = torch.no_grad()(function)


def capture(functions, pool, num_bytes):
    assert pool is None
    return [Captured(function) for function in functions]


class Overwriting(LayerGraphs):
    """Graphs whose memory holds NaN between two calls."""

    def _overwrite(self):
        for buffer in self.buffers.values():
            buffer.fill_(float("nan"))

    def forward(self, *inputs):
        results = super().forward(*inputs)
        self._overwrite()
        return results

    def backward(self, *inputs):
        results = super().backward(*inputs)
        self._overwrite()
        return results


def with_graphs(llm, monkeypatch):
    """(an engine whose layers have graphs, these)."""
    monkeypatch.setattr(varlen_attention, "by_flash", lambda x: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    engine = Engine(llm, pad_id=0, temperature=0.9, gradient_checkpointing=True)
    with fast(engine):
        fused = engine.fused(llm.lm_head.weight)
    fused.graphs = Overwriting(fused, capture)
    fused.graphs.most_tokens = 512  # small buffers
    monkeypatch.setattr(engine, "release", lambda: None)  # or each call made new ones
    return engine, fused.graphs


@pytest.fixture
def by_graphs(monkeypatch):
    return partial(with_graphs, monkeypatch=monkeypatch)


def captured(graphs):
    """(graphs forward, backward) of each size."""
    return [(len(g.forward_graphs), len(g.backward_graphs)) for g in graphs.of_sizes.values()]


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("lora_r", [4, 0])
def test_equals_modules(by_graphs, lora_r, checkpointing):
    """Layers that autograd would keep are launched by graphs, too."""
    check_equal(tiny_llm(lora_r=lora_r, num_hidden_layers=3), by_graphs, checkpointing)


def test_quantised_layers_equal_modules(by_graphs, choice):
    check_equal(quantized_llm(choice), by_graphs, checkpointing=True)


def check_equal(llm, by_graphs, checkpointing):
    """Compare graphs, from before their capture on, with the modules of three layers."""
    right = {len(sizes): scored(llm, slow, **sizes) for sizes in ({}, SIZES)}
    right[4] = scored(llm, slow, **LONGER)
    engine, graphs = by_graphs(llm)
    engine.gradient_checkpointing = checkpointing
    for number, sizes in enumerate([SIZES, SIZES, {}, LONGER, SIZES, LONGER, {}, LONGER]):
        found = scored(llm, fast, engine=engine, **sizes)
        expected = right[4 if sizes is LONGER else len(sizes)]
        torch.testing.assert_close(found[:2], expected[:2], atol=1e-5, rtol=0)
        assert found[2].keys() == expected[2].keys()
        for name, gradient in expected[2].items():
            assert (found[2][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
        if number == 0:  # sizes are new: nothing is captured
            assert captured(graphs) == [(0, 0)]
        if number == 1:
            assert captured(graphs) == [(3, 3)]
    assert captured(graphs) == [(3, 3), (3, 3)]  # short ones are padded to the same sizes


def test_many_tokens_have_no_graphs(by_graphs):
    llm = tiny_llm()
    engine, graphs = by_graphs(llm)
    with fast(engine):
        unbound = LayerGraphs(engine.fused(llm.lm_head.weight))
    assert (unbound.most_tokens, unbound.most_keys) == (2**26 // 192, 2**26 // 64)
    graphs.most_tokens = 128
    for _ in range(2):
        for sizes in (SIZES, LONGER):
            scored(llm, fast, engine=engine, **sizes)
    assert captured(graphs) == [(2, 2)] and next(iter(graphs.of_sizes))[0] == 128
    graphs.most_tokens, graphs.most_keys = 2**26, 255
    scored(llm, fast, engine=engine, **LONGER)
    assert len(graphs.of_sizes) == 1


def test_other_calls_between_a_forward_and_its_backward(by_graphs):
    """Of the same and of other sizes, with and without gradient, with another role's LoRA."""
    llm = tiny_llm()
    engine, graphs = by_graphs(llm)
    roles, gradients = Roles(llm), {}
    for others in (False, True, False, True):
        with fast(engine):
            answers = engine.score(*work(llm))
            if others:
                engine.score(*work(llm))
                with torch.no_grad(), roles.second():
                    engine.score(*work(llm, **SIZES))
                    engine.generate(*prompts(llm), num_generations=2, max_new_tokens=4, stop=None)
                    engine.score(*work(llm, **LONGER))
            answers.logp.sum().backward()
        gradients.setdefault(others, []).append([p.grad.clone() for p in trained(llm).values()])
        llm.zero_grad()
    assert (2, 2) in captured(graphs)
    expected = gradients[False][0]
    for found in (*gradients[False], *gradients[True]):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_one_backward_of_several_forwards(by_graphs):
    """Autograd keeps a gradient until the last of the same parameter is there."""
    llm = tiny_llm()
    engine, _ = by_graphs(llm)
    for _ in range(3):
        gradients = []
        for together in (True, False):
            with fast(engine):
                losses = [engine.score(*work(llm, **s)).logp.sum() for s in ({}, LONGER, {})]
                for loss in [sum(losses)] if together else losses:
                    loss.backward()
            gradients.append([parameter.grad for parameter in trained(llm).values()])
            llm.zero_grad()
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-5)


def test_a_gradient_is_no_memory_of_a_graph(by_graphs):
    llm = tiny_llm()
    engine, graphs = by_graphs(llm)
    for _ in range(3):
        llm.zero_grad()
        with fast(engine):
            engine.score(*work(llm)).logp.sum().backward()
    held = {buffer.untyped_storage().data_ptr() for buffer in graphs.buffers.values()}
    assert len(held) >= 8
    assert not held & {p.grad.untyped_storage().data_ptr() for p in trained(llm).values()}


def test_prompts_of_the_sampler(by_graphs):
    check_prompts_of_the_sampler(tiny_llm(), by_graphs)


def test_prompts_of_the_sampler_by_quantised_layers(by_graphs, choice):
    check_prompts_of_the_sampler(quantized_llm(choice), by_graphs)


def check_prompts_of_the_sampler(llm, by_graphs):
    """Of two roles, which are sampled together; when matrices move, graphs are captured anew."""
    engine, graphs = by_graphs(llm)
    roles, inputs = Roles(llm), prompts(llm)
    how = dict(num_generations=1, max_new_tokens=6, stop=None)
    with slow(engine):
        expected = engine.generate(*inputs, **how)
        with roles.second():
            of_second = engine.generate(*inputs, **how)
    with fast(engine):
        for _ in range(4):
            first = not graphs.of_sizes
            with roles.second():
                delayed = engine.generate(*inputs, **how, delay=True)
            assert bool(graphs.of_sizes) != first  # the matrices moved at the first one
            assert_same(engine.generate(*inputs, **how), expected)
            assert_same(delayed.read(), of_second)
    assert captured(graphs) == [(len(engine._fused.layers), 0)]
    engine.free_cache()
    assert not graphs.of_sizes and not graphs.buffers


def test_a_call_waits_for_its_backward_while_others_run(by_graphs):
    """The first of its sizes, whose inputs graphs must not have kept, and a later one."""
    llm = tiny_llm()
    lengths = [(4, 4, 2, 0, 1), (3, 4, 4, 2, 0), (1, 1, 1, 4, 4)]  # padded to the same sizes
    works = [SIZES | dict(lengths=one) for one in lengths]
    right = [scored(llm, slow, **sizes)[2] for sizes in works]
    engine, graphs = by_graphs(llm)
    for _ in range(2):
        with fast(engine):
            inputs = [work(llm, **sizes) for sizes in works]
            losses = []
            for one in inputs:
                logp = engine.score(*one).logp
                losses.append((logp * make(*logp.shape, dtype=torch.float32, seed=2)).sum())
        for loss, (embeds, *_), expected in zip(losses, inputs, right):
            loss.backward()
            found = {name: p.grad for name, p in trained(llm).items()} | {"embeds": embeds.grad}
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
            llm.zero_grad()
    assert captured(graphs) == [(2, 2)]


def test_sizes_unused_for_longest_go(by_graphs, monkeypatch):
    monkeypatch.setattr(layer_graphs, "MAX_SIZES", 2)
    llm = tiny_llm()
    works = [SIZES, LONGER, dict(prompt_length=9, num_tokens=130, lengths=(130, 4, 2, 0, 1))]
    right = [scored(llm, slow, **sizes)[2] for sizes in works]
    engine, graphs = by_graphs(llm)
    order = [1, 0, 1, 0, 2, 0, 2]
    for number in order:
        found = scored(llm, fast, engine=engine, **works[number])[2]
        for name, gradient in right[number].items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    assert captured(graphs) == [(2, 2), (2, 2)] and len(graphs.of_sizes) == 2
    with fast(engine):
        waiting = engine.score(*work(llm, **SIZES))
        for _ in range(2):
            engine.score(*work(llm, **LONGER))  # now those of 2 are gone
            engine.score(*work(llm, **works[2]))  # and those of SIZES
        logp = waiting.logp
        (logp * make(*logp.shape, dtype=torch.float32, seed=2)).sum().backward()
    for name, parameter in trained(llm).items():
        torch.testing.assert_close(parameter.grad, right[0][name], atol=1e-5, rtol=1e-4)


def test_a_larger_size_gets_memory_for_all(by_graphs):
    llm = tiny_llm()
    engine, graphs = by_graphs(llm)
    assert graphs.capacity == 0
    for sizes, capacity in ((SIZES, 128), (LONGER, 512), (SIZES, 512)):
        scored(llm, fast, engine=engine, **sizes)
        assert graphs.capacity == capacity
    assert captured(graphs) == [(0, 0), (0, 0)]  # those of SIZES began anew
    held = {
        shape[1]
        for shape in graphs.buffers
        if shape[0] in ("residual", "d_out", "out", "attn_output")
    }
    assert held == {512}


def test_a_released_engine_frees_its_matrices(by_graphs):
    llm = tiny_llm()
    engine, graphs = by_graphs(llm)
    for _ in range(2):
        scored(llm, fast, engine=engine)
    fused = weakref.ref(engine._fused)
    graphs = weakref.ref(graphs)
    gc.disable()
    try:
        Engine.release(engine)
        assert fused() is None and graphs() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("num_slots", [3, 60, 127, 128, 400])
def test_padding_has_segments_of_its_own(num_slots):
    """No token sees padding, padding sees padding only, and all sizes are of a few."""
    random = torch.Generator().manual_seed(num_slots)
    part = torch.randint(1, 4, (2, num_slots), generator=random).sort(1).values
    part[:, : num_slots // 3] = 0
    part[1, num_slots // 2 :] = -1
    plain = varlen_segments(part)
    padded = plain.padded()
    m, size = plain.num_tokens, padded.num_tokens
    assert size > m and size % 128 == 0 and torch.equal(padded.slots, plain.slots)
    assert torch.equal(padded.keys[: len(plain.keys)], plain.keys)
    num_segments = len(plain.cu_seqlens_q)
    for ends in ("cu_seqlens_q", "cu_seqlens_k"):
        longer = getattr(padded, ends)
        assert longer.dtype == torch.int32 and (longer.diff() >= 0).all()
        assert torch.equal(longer[:num_segments], getattr(plain, ends))
    assert padded.cu_seqlens_q[-1] == size and padded.cu_seqlens_k[-1] == len(padded.keys)
    assert (padded.keys[len(plain.keys) :] >= m).all() and padded.keys.max() < size
    queries, keys = padded.cu_seqlens_q.diff(), padded.cu_seqlens_k.diff()
    assert ((queries > 0) == (keys > 0)).all() and (queries <= keys).all()
    assert queries.max() <= padded.max_seqlen_q and keys.max() <= padded.max_seqlen_k
    sizes = len(padded.keys), len(padded.cu_seqlens_q) - 1, padded.max_seqlen_q, padded.max_seqlen_k
    assert all(number & (number - 1) == 0 for number in sizes)
