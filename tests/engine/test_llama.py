"""Layers of Llama's type (InternLM2): no biases; the engine computes what the modules do."""

import pytest
import torch
from transformers import LlamaForCausalLM

from rl_train.engine import Engine
from rl_train.engine.fused_weights import unsupported
from tests.engine.tiny import assert_same, both, fast, prompts, scored, slow, tiny_llm

DYNAMIC = dict(rope_type="dynamic", rope_theta=1e6, factor=2.0)


@pytest.fixture(scope="module")
def llm():
    llm = tiny_llm(
        kind=LlamaForCausalLM, max_position_embeddings=64, rope_parameters=DYNAMIC, head_dim=16
    )
    assert unsupported(llm) is None
    assert all(linear.bias is None for linear in llm.modules() if type(linear) is torch.nn.Linear)
    return llm


def test_other_biases_are_not_known():
    llm = tiny_llm(kind=LlamaForCausalLM, attention_bias=True)
    assert unsupported(llm) == "linears beside q, k and v have a bias"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_and_gradients_equal_the_modules(llm, checkpointing):
    right, computed = scored(llm, slow), scored(llm, fast, checkpointing)
    torch.testing.assert_close(computed[:2], right[:2], atol=1e-5, rtol=0)
    assert set(computed[2]) == set(right[2]) and len(computed[2]) == 2 * 7 * 2 + 1
    for name, gradient in right[2].items():
        assert (computed[2][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("greedy", [False, True])
def test_samples_equal_the_modules(llm, greedy, monkeypatch):
    engine = Engine(llm, pad_id=0)
    computed, right = both(engine, monkeypatch, *prompts(llm), greedy=greedy)
    assert_same(computed, right)
    torch.testing.assert_close(computed.logp, right.logp, atol=1e-5, rtol=0)
    engine.release()


def test_a_long_call_of_the_modules_changes_nothing(llm):
    """Dynamic rotary embeddings stretch in the modules; the engine stays below their limit."""
    engine, (embeds, mask) = Engine(llm, pad_id=0), prompts(llm)
    with fast(engine):
        before = engine.last_hidden_states(embeds, mask)
    engine.release()
    rotary = llm.model.rotary_emb
    llm(input_ids=torch.zeros(1, 100, dtype=torch.long))
    assert not torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    with fast(engine):
        assert torch.equal(engine.last_hidden_states(embeds, mask), before)
        with pytest.raises(ValueError, match="70 tokens .* max_position_embeddings of 64"):
            engine.last_hidden_states(embeds[:1, :1].expand(1, 70, -1), mask.new_ones(1, 70))
    engine.release()
