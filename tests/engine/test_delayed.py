"""Completions of two roles that are sampled together are those that each samples alone."""

import contextlib

import pytest
import torch

from rl_train.engine import Engine, decode, decode_torch, packing
from tests.engine.test_decode import STOP, beginning_alike
from tests.engine.tiny import (
    assert_same,
    fast,
    prompts,
    quantized_llm,
    slow,
    tiny_llm,
    trained,
)

STEPS = 20


class Roles:
    """The model's LoRA and another one, which `second` puts in its place."""

    def __init__(self, model):
        self.parameters = list(trained(model).values())
        generator = torch.Generator().manual_seed(3)
        self.others = [
            (0.1 * torch.randn(p.shape, generator=generator)).to(p.device) for p in self.parameters
        ]

    @contextlib.contextmanager
    def second(self):
        own = [p.data for p in self.parameters]
        self._use(self.others)
        yield
        self._use(own)

    def _use(self, weights):
        for parameter, weight in zip(self.parameters, weights):
            parameter.data = weight


def uniforms_of(num_rows, steps=STEPS):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(num_rows, steps, generator=generator, dtype=torch.float64)


def sampled(num_prompts, num_generations=4, **how):
    """Settings of the first role's call."""
    uniforms = uniforms_of(num_prompts * num_generations, how.get("max_new_tokens", STEPS))
    both = dict(num_generations=num_generations, max_new_tokens=STEPS, uniforms=uniforms, stop=STOP)
    return both | how


def written(**how):
    """Settings of the second role's call, which is greedy."""
    return dict(num_generations=1, max_new_tokens=STEPS, stop=STOP) | how


@pytest.fixture
def sizes(monkeypatch):
    """(rows of a prefix, LoRAs) of each graph that was run; unused rows do not count."""
    monkeypatch.setattr(packing, "SLOTS_PER_ROW", 0)
    seen, real = [], decode.DecodeGraph.run

    def run(graph, *args):
        seen.append((graph.rows_per_prefix, graph.num_loras))
        return real(graph, *args)

    monkeypatch.setattr(decode.DecodeGraph, "run", run)
    return seen


def check(engine, first, own, second, other, sizes, expected_sizes, roles=None, way=fast):
    """Both calls together are, by each way, what the model's own modules sample in turns."""
    roles = roles or Roles(engine.language_model)
    with slow(engine):
        alone = engine.generate(*first, **own)
        with roles.second():
            alone_second = engine.generate(*second, **other)
    sizes.clear()
    with way(engine):
        with roles.second():
            delayed = engine.generate(*second, **other, delay=True)
        engine.last_hidden_states(*first)  # another forward of the first role in between
        together = engine.generate(*first, **own)
        answered = delayed.completions is not None
        second_found = delayed.read()
    assert_same(together, alone)
    assert_same(second_found, alone_second)
    assert sizes == expected_sizes
    assert answered == (len(expected_sizes) == 1)
    assert not torch.equal(alone.ids[:1, :4], alone_second.ids[:1, :4])  # two LoRAs indeed


def inputs_of_second(model, lengths=(8, 6, 7, 9, 5), same=(0, 4, 0, 3, 3)):
    return beginning_alike(model, lengths, list(same)), list(same)


def test_two_roles_together(sizes):
    engine = Engine(tiny_llm(), pad_id=1, temperature=1.3)
    model = engine.language_model
    inputs, same = inputs_of_second(model)
    other = written(shared_prefix_lengths=same)
    check(engine, prompts(model), sampled(3), inputs, other, sizes, [(4, 2)])
    # Other numbers of rows.
    inputs, same = inputs_of_second(model, (8, 6, 7, 9), (0, 4, 0, 3))
    other = written(shared_prefix_lengths=same)
    check(engine, prompts(model, (7, 5)), sampled(2, 2), inputs, other, sizes, [(2, 2)])


def test_prefixes_are_repeated_for_single_rows(sizes):
    """Prompts without a common beginning are prefixes of a row each: the others' then are too."""
    engine = Engine(tiny_llm(), pad_id=1)
    model = engine.language_model
    inputs = prompts(model, (8, 6, 7), seed=5)
    check(engine, prompts(model), sampled(3), inputs, written(), sizes, [(1, 2)])


def test_what_does_not_fit_is_sampled_alone(sizes, monkeypatch):
    engine = Engine(tiny_llm(), pad_id=1)
    model = engine.language_model
    inputs = prompts(model, (8, 6, 7), seed=5)
    longer = written(max_new_tokens=STEPS + 1)
    check(engine, prompts(model), sampled(3), inputs, longer, sizes, [(4, 1), (1, 1)])
    monkeypatch.setattr(decode, "memory_of", lambda device: 1e6)  # bytes: the cache may not grow
    check(engine, prompts(model), sampled(3), inputs, written(), sizes, [(4, 1), (1, 1)])


def test_of_quantised_layers(choice, sizes):
    engine = Engine(quantized_llm(choice), pad_id=1)
    inputs = prompts(engine.language_model, (8, 6, 7), seed=5)
    check(engine, prompts(engine.language_model), sampled(3), inputs, written(), sizes, [(1, 2)])


def test_without_a_lora(sizes):
    engine = Engine(tiny_llm(lora_r=0), pad_id=1)
    inputs = prompts(engine.language_model, (8, 6, 7), seed=5)
    check(engine, prompts(engine.language_model), sampled(3), inputs, written(), sizes, [(1, 2)])


def test_each_by_the_weights_of_its_time():
    """An update, and other calls that are delayed, do not change what is waited for."""
    engine = Engine(tiny_llm(), pad_id=1)
    model, roles = engine.language_model, Roles(engine.language_model)
    inputs = prompts(model, (8, 6, 7), seed=5)
    with slow(engine), roles.second():
        expected = engine.generate(*inputs, **written())
    with fast(engine):
        with roles.second():
            first = engine.generate(*inputs, **written(), delay=True)
            second = engine.generate(*inputs, **written(), delay=True)
        assert first.completions is not None and second.completions is None
        with torch.no_grad():
            for parameter, other in zip(roles.parameters, roles.others):
                parameter.add_(0.1)
                other.add_(0.1)
        found = second.read()
        after = engine.generate(*prompts(model), **sampled(3))
    assert_same(first.read(), expected)
    assert_same(found, expected)
    with slow(engine):
        assert_same(after, engine.generate(*prompts(model), **sampled(3)))


def test_a_released_engine_has_no_delayed_completions():
    engine = Engine(tiny_llm(), pad_id=1)
    inputs = prompts(engine.language_model, (8, 6, 7), seed=5)
    with fast(engine):
        delayed = engine.generate(*inputs, **written(), delay=True)
        engine.release()
    with pytest.raises(RuntimeError, match="released before"):
        delayed.read()


def test_without_the_fast_path_nothing_waits():
    engine = Engine(tiny_llm(), pad_id=1)
    inputs = prompts(engine.language_model)
    delayed = engine.generate(*inputs, **written(), delay=True)
    assert_same(delayed.completions, engine.generate(*inputs, **written()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("in_torch", [True, False])
def test_two_roles_by_cuda_graphs(sizes, in_torch):
    model = tiny_llm(device="cuda", hidden_size=128, head_dim=32, lora_r=16)
    engine, roles = Engine(model, pad_id=1), Roles(model)
    fused = engine.fused(model.lm_head.weight)
    assert fused.decode_ops is not decode_torch
    if in_torch:
        fused.decode_ops = decode_torch
    inputs, same = inputs_of_second(model)
    other = written(shared_prefix_lengths=same)
    for _ in range(2):  # the second time the graph is there
        check(engine, prompts(model), sampled(3, 8), inputs, other, sizes, [(4, 2)], roles)
    check(engine, prompts(model), sampled(3), inputs, written(), sizes, [(1, 2)], roles)
