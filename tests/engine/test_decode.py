"""The fast way draws what the plain one draws: tokens alike, numbers to rounding, at any size."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from rl_train.engine import Engine, decode_torch, packing
from tests.engine.tiny import assert_same, both, ends_with, fast, prompts, tiny_llm, trained

STOP = ends_with(torch.arange(0, 300, 15))  # of 20 draws from a flat distribution about 1 ends


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_llm(), pad_id=1, temperature=1.7)


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(num_generations=1),
        dict(greedy=True, num_generations=1),
        dict(lengths=[5]),
        dict(steps=1),
        dict(steps=2),
        dict(lengths=[7, 5, 9, 2], num_generations=3, steps=70),
        dict(lengths=[130, 5], steps=48),
        dict(stop=STOP),
        dict(stop=STOP, steps=5),
    ],
    ids=lambda how: str({name: "STOP" if value is STOP else value for name, value in how.items()}),
)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_fast_equals_plain(engine, monkeypatch, temperature, how):
    """Ragged prompts, several sizes one after the other through one decoder."""
    engine.temperature = temperature
    how = dict(how)
    inputs = prompts(engine.language_model, how.pop("lengths", (7, 5, 9)))
    assert_same(*both(engine, monkeypatch, *inputs, **how))


def test_rows_stop_at_different_times_and_at_the_limit(engine, monkeypatch):
    inputs = prompts(engine.language_model)
    found, plain = both(engine, monkeypatch, *inputs, steps=48, stop=STOP)
    assert_same(found, plain)
    assert len({int(v.sum()) for v in found.valid}) > 2 and found.stopped.any()
    found, _ = both(engine, monkeypatch, *inputs, steps=5)
    assert found.valid.all() and not found.stopped.any() and found.ids.shape[1] == 5


def test_all_rows_done_ends_early(engine, monkeypatch):
    inputs = prompts(engine.language_model)
    stop = ends_with(torch.arange(0, 300, 2))
    found, plain = both(engine, monkeypatch, *inputs, steps=64, stop=stop)
    assert_same(found, plain)
    assert found.stopped.all() and found.ids.shape[1] < 64


@pytest.fixture
def tokens(engine, monkeypatch):
    """The number of tokens of each forward."""
    from rl_train.engine import packed_forward

    seen, real = [], packed_forward.hidden_states

    def counted(fused, embeds, layout, *args, **kwargs):
        seen.append(int((layout.part >= 0).sum()))
        return real(fused, embeds, layout, *args, **kwargs)

    monkeypatch.setattr(packed_forward, "hidden_states", counted)
    return seen


def test_prompts_that_begin_alike_share_their_forward(engine, monkeypatch, tokens):
    """Two that share 4 tokens, one alone, two more that share 3 with it, ragged: as if alone."""
    lengths, same = (7, 5, 6, 9, 4), [0, 4, 0, 3, 3]
    embeds, mask = beginning_alike(engine.language_model, lengths, same)
    how = dict(steps=20, num_generations=2, shared_prefix_lengths=same)
    shared, plain = both(engine, monkeypatch, embeds, mask, **how)
    assert_same(shared, plain)
    assert tokens == [sum(lengths) - sum(same)]
    with fast(engine):
        ends = engine.last_hidden_states(embeds, mask, num_last=2, shared_prefix_lengths=same)
        alone = engine.last_hidden_states(embeds, mask, num_last=2)
    assert tokens[1:] == [sum(lengths) - sum(same), sum(lengths)]
    plain = engine.last_hidden_states(embeds, mask, num_last=2)
    assert plain.shape == (5, 2, 64) and len(tokens) == 3
    torch.testing.assert_close(ends, plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(alone, plain, atol=1e-4, rtol=0)


def beginning_alike(model, lengths, same):
    """Prompts of which each has its first same[p] embeddings in common with the one before it."""
    embeds, mask = prompts(model, lengths)
    for prompt, common in enumerate(same):
        if common:
            start, before = (max(lengths) - lengths[p] for p in (prompt, prompt - 1))
            embeds[prompt, start : start + common] = embeds[prompt - 1, before : before + common]
    return embeds, mask


@pytest.mark.parametrize(
    "lengths, same, prefixes",
    [
        ((7, 5, 6, 4), [0, 4, 0, 3], 2),  # two of each
        ((7, 5, 6, 9, 4), [0, 4, 0, 3, 3], 2),  # two and three
        ((140, 133, 5), [0, 131, 0], 2),  # a longer prefix than a lone prompt
        ((5, 140, 7), [0, 4, 4], 1),  # a long rest
        ((4, 6, 4), [0, 4, 4], 1),  # all of a prompt is shared
    ],
)
@pytest.mark.parametrize("greedy", [False, True])
def test_single_rows_read_a_common_beginning_once(
    engine, monkeypatch, lengths, same, prefixes, greedy
):
    """Neighbouring prompts' tokens are as if alone, and the cache holds what they share once."""
    monkeypatch.setattr(packing, "SLOTS_PER_ROW", 0)  # unused rows do not count
    how = dict(steps=20, num_generations=1, stop=STOP, greedy=greedy)
    inputs = beginning_alike(engine.language_model, lengths, same)
    engine.free_cache()
    shared, plain = both(engine, monkeypatch, *inputs, shared_prefix_lengths=same, **how)
    (graph,) = engine._decoder.graphs.values()
    assert graph.prefix.shape[2] == prefixes and graph.rows_per_prefix > 1
    assert_same(shared, plain)
    alone, _ = both(engine, monkeypatch, *inputs, **how)
    assert torch.equal(shared.ids, alone.ids) and torch.equal(shared.stopped, alone.stopped)
    torch.testing.assert_close(shared.logp, alone.logp, atol=1e-5, rtol=0)


def test_a_beginning_is_not_shared_for_many_unused_rows(engine, monkeypatch):
    """Two of 5 prompts share 4 tokens: 3 more rows would cost more. They are as if alone."""
    same = [0, 4, 0, 0, 0]
    inputs = beginning_alike(engine.language_model, (7, 5, 6, 4, 5), same)
    how = dict(steps=9, num_generations=1)
    engine.free_cache()
    shared, plain = both(engine, monkeypatch, *inputs, shared_prefix_lengths=same, **how)
    assert_same(shared, plain)
    alone, _ = both(engine, monkeypatch, *inputs, **how)
    (graph,) = engine._decoder.graphs.values()
    assert graph.rows_per_prefix == 1
    assert torch.equal(shared.ids, alone.ids)
    torch.testing.assert_close(shared.logp, alone.logp, atol=1e-5, rtol=0)


def test_an_optimizer_step_changes_what_is_drawn(monkeypatch):
    """The matrices of the decoder hold a copy of the LoRA: it must be the newest, each role's."""
    model = tiny_llm()
    engine, inputs = Engine(model, pad_id=1), prompts(model)
    before, plain = both(engine, monkeypatch, *inputs)
    assert_same(before, plain)
    parameters = trained(model).values()
    own = [p.data for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=2e-2)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    for parameter, data in zip(parameters, own):
        parameter.data = data.clone()  # `own` stays as another role's
    optimizer.step()
    after, plain = both(engine, monkeypatch, *inputs)
    assert_same(after, plain)
    assert not torch.equal(before.ids, after.ids)
    for parameter, data in zip(parameters, own):
        parameter.data = data
    again, plain = both(engine, monkeypatch, *inputs)
    assert_same(again, plain)
    assert torch.equal(again.ids, before.ids)


def test_without_a_lora(monkeypatch):
    model = tiny_llm(lora_r=0)
    assert_same(*both(Engine(model, pad_id=1), monkeypatch, *prompts(model)))


def test_tied_embeddings(monkeypatch):
    model = tiny_llm(tie_word_embeddings=True)
    engine = Engine(model, pad_id=1)
    assert_same(*both(engine, monkeypatch, *prompts(model)))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_many_sizes_keep_few_graphs(engine, monkeypatch):
    """And a cache that grows takes the graphs with it that hold its address."""
    inputs = prompts(engine.language_model)
    for generations in range(1, 20):
        with fast(engine):
            engine.generate(*inputs, num_generations=generations, max_new_tokens=1, stop=None)
    assert 0 < len(engine._decoder.graphs) <= 16
    assert_same(*both(engine, monkeypatch, *inputs))


def test_choose_is_compiled_once_for_all_sizes(monkeypatch):
    """It is one graph: on a GPU a CUDA graph captures it, and compiling takes seconds."""
    torch._dynamo.reset()
    engine, counter = Engine(tiny_llm(), pad_id=1), CompileCounter()
    with fast(engine):
        fused = engine.fused(engine.language_model.lm_head.weight)
    compiled = torch.compile(decode_torch.choose, backend=counter, fullgraph=True)
    fused.decode_ops = SimpleNamespace(**vars(decode_torch) | dict(choose=compiled))
    for lengths, how in (
        ((7, 5, 9), dict()),
        ((7, 5, 9), dict(steps=70)),
        ((7, 5), dict(num_generations=3)),
    ):
        inputs = prompts(engine.language_model, lengths)
        assert_same(*both(engine, monkeypatch, *inputs, stop=STOP, **how))
    assert counter.frame_count == 1


# On the GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("in_torch", [True, False])
@pytest.mark.parametrize("kind", [Qwen2ForCausalLM, LlamaForCausalLM])
def test_graphs_equal_plain(monkeypatch, in_torch, kind):
    """float32, by CUDA graph: sizes that share a graph, need a larger cache, or go back."""
    model = tiny_llm(device="cuda", hidden_size=128, head_dim=32, kind=kind)
    engine = Engine(model, pad_id=1)
    fused = engine.fused(model.lm_head.weight)
    assert fused.decode_ops is not decode_torch
    if in_torch:
        fused.decode_ops = decode_torch
    for lengths, how in (
        ((7, 5, 9), dict()),
        ((7, 5, 9, 2), dict(steps=30)),
        ((7, 5, 9), dict(num_generations=8, steps=70)),
        ((7, 5, 9), dict(greedy=True, num_generations=1)),
        ((7, 5, 9), dict()),
        ((7, 5, 9), dict(stop=STOP, steps=64)),
    ):
        assert_same(*both(engine, monkeypatch, *prompts(model, lengths), **how))
    # Four prompts of two images, with ragged rests.
    same = [0, 131, 0, 4]
    inputs = beginning_alike(model, (140, 133, 5, 9), same)
    how = dict(num_generations=1, steps=70, stop=STOP, shared_prefix_lengths=same)
    assert_same(*both(engine, monkeypatch, *inputs, **how))
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.mul_(1.5)
    assert_same(*both(engine, monkeypatch, *prompts(model)))


def test_a_sampler_that_forgets_samples_the_same(engine, monkeypatch):
    inputs = prompts(engine.language_model)
    first, _ = both(engine, monkeypatch, *inputs, steps=3)
    engine.free_cache()
    assert not engine._decoder.graphs
    again, _ = both(engine, monkeypatch, *inputs, steps=3)
    assert_same(first, again)
    (graph,) = engine._decoder.graphs.values()
    assert graph.nbytes > graph.hiddens.nbytes > 0
