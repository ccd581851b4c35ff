"""A decode step's compiled functions, yardstick of the kernels, compute the same."""

import pytest
import torch

from rl_train.engine import Engine
from rl_train.engine.decode import Decoder
from tests.engine.tiny import assert_same, fast, prompts, tiny_llm
from tools.benchmarks import compiled


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

    def make_graph(*args, **sizes):
        made.append(compiled.CompiledGraph(*args, **sizes, attention=attention, backend=backend))
        return made[-1]

    assert_same(drawn(engine, make_graph), drawn(engine))
    assert len(made) == 1
