"""What the kernels are held against computes the same: a step's compiled functions, a layer's."""

import pytest
import torch

from rl_train.engine import Engine
from rl_train.engine.decode import Decoder
from tests.engine.tiny import assert_same, fast, prompts, scored, tiny_llm, work
from tools.benchmarks import compiled, compiled_forward


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_llm(), pad_id=1, temperature=1.7)


def drawn(engine, make_graph=None):
    """20 tokens for three ragged prompts."""
    embeds, mask = prompts(engine.language_model)
    random = torch.Generator().manual_seed(0)
    uniforms = torch.rand(12, 20, generator=random, dtype=torch.float64)
    with fast(engine):
        engine._decoder = Decoder(engine.fused(embeds), make_graph)
        how = dict(num_generations=4, max_new_tokens=20, stop=None, uniforms=uniforms)
        return engine.generate(embeds, mask, **how)


@pytest.mark.parametrize(
    "attention, backend",
    [("products", "inductor"), ("flex", "aot_eager"), ("kernel", "aot_eager")],
)
def test_a_compiled_step_draws_the_same(engine, attention, backend):
    made = []

    def make_graph(*sizes):
        made.append(compiled.CompiledGraph(*sizes, attention=attention, backend=backend))
        return made[-1]

    assert_same(drawn(engine, make_graph), drawn(engine))
    assert len(made) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["ops", "flash"])
def test_a_compiled_layer_has_the_same_gradients(monkeypatch, name, checkpointing):
    llm = tiny_llm()
    logp, _, gradients = scored(llm, fast)
    engine = Engine(llm, pad_id=0, temperature=0.9, gradient_checkpointing=checkpointing)
    with fast(engine), compiled_forward.instead(name, engine.fused(logp), "aot_eager"):
        compiled_logp, _, compiled_gradients = scored(llm, fast, engine=engine)
    torch.testing.assert_close(compiled_logp, logp, atol=1e-4, rtol=0)
    for parameter, gradient in gradients.items():
        error = (compiled_gradients[parameter] - gradient).norm() / gradient.norm()
        assert error < 1e-4, parameter


def test_flex_attention_sees_what_the_project_sees():
    """Without gradient, which FlexAttention does not have on a CPU."""
    llm = tiny_llm()
    engine = Engine(llm, pad_id=0)
    embeds, *inputs = work(llm)
    with fast(engine), torch.no_grad():
        expected = engine.score(embeds, *inputs).logp
        with compiled_forward.instead("flex", engine.fused(embeds), "aot_eager"):
            found = engine.score(embeds, *inputs).logp
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert found.count_nonzero() == 14  # tokens
