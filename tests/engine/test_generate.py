"""Sampled tokens follow the distribution that is scored, whatever else is in the batch."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config

from rl_train.engine import Engine, StopText, hf_backend
from rl_train.engine.hf_backend import append_token_embeds, hidden_states
from rl_train.engine.packing import positions
from rl_train.engine.sampling import SamplingParams
from tests.engine.tiny import DEMO, ends_with, fast, prompts, slow, tiny_llm
from tests.pretend import Gpu

STEPS = 16


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_llm(), pad_id=0, temperature=1.7)


@pytest.fixture(params=[slow, fast])
def way(request):
    return request.param


def uniforms(rows, steps=STEPS):
    generator = torch.Generator().manual_seed(3)
    return torch.rand(rows, steps, generator=generator, dtype=torch.float64)


def generate(engine, way, inputs, num_generations=1, **how):
    how = dict(max_new_tokens=STEPS, stop=None) | how
    with way(engine):
        return engine.generate(*inputs, num_generations=num_generations, **how)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_sampled_log_probs_are_the_scored_ones(engine, way, temperature):
    """Ragged prompts and answers: what sampling returns is what a full forward recomputes."""
    engine.temperature = temperature
    inputs = prompts(engine.language_model)
    stop = ends_with(torch.arange(0, 300, 10))
    drawn = generate(engine, way, inputs, 2, uniforms=uniforms(6), stop=stop)
    assert drawn.valid.any(1).all() and drawn.stopped.any() and not drawn.valid.all()
    prompt = torch.arange(3).repeat_interleave(2)
    with torch.no_grad(), way(engine):
        scored = engine.score(*inputs, prompt, drawn.ids, drawn.valid).logp
    torch.testing.assert_close(scored, drawn.logp, atol=1e-4, rtol=0)
    assert (drawn.logp[drawn.valid] < -1e-3).any()  # something was uncertain


ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_the_logits_of_a_bf16_model_are_not_rounded(way, device):
    """Log-probs of sampler and scorer are those of float64 logits of the same hidden states.

    Rounded to bfloat16, such logits are .01 off. On CUDA by graph and kernels, and by the modules.
    """
    check_that_logits_are_not_rounded(bf16_llm(device), way, device)


def test_the_same_check_mixes_no_devices(way):
    """A pretended GPU finds a tensor that the check leaves on the CPU."""
    gpu = Gpu()
    llm = bf16_llm("cpu")
    gpu.take(llm)
    with gpu:
        check_that_logits_are_not_rounded(llm, way, "meta")


def bf16_llm(device):
    llm = tiny_llm(dtype=torch.bfloat16, device=device, hidden_size=128)
    with torch.no_grad():
        llm.lm_head.weight.mul_(4)
    return llm


def check_that_logits_are_not_rounded(llm, way, device):
    engine = Engine(llm, pad_id=0, temperature=0.9)
    embeds, mask = prompts(llm)
    numbers = uniforms(6).to(device)
    with torch.autocast(device, torch.bfloat16):
        drawn = generate(engine, way, (embeds, mask), 2, uniforms=numbers)
        prompt = torch.arange(3, device=device).repeat_interleave(2)
        with torch.no_grad(), way(engine):
            scores = engine.score(embeds, mask, prompt, drawn.ids, drawn.valid)

    def exact(hidden, ids):
        logits = hidden.double() @ llm.lm_head.weight.double().t()
        rounded = logits.bfloat16().double()
        tokens = ids[..., None].to(logits.device)  # the engine returns ids on the CPU
        return (
            torch.log_softmax(x / 0.9, -1).gather(-1, tokens)[..., 0] for x in (logits, rounded)
        )

    before = scores.packed.hidden_before(scores.hidden, drawn.valid)
    for logp, hidden, ids in (
        (drawn.logp[:, 1:], drawn.hidden[:, :-1], drawn.ids[:, 1:]),
        (scores.logp[drawn.valid], before, drawn.ids[drawn.valid]),
    ):
        expected, rounded = exact(hidden, ids)
        torch.testing.assert_close(logp.double().cpu(), expected.cpu(), atol=1e-4, rtol=0)
        assert (rounded - expected).abs().max().item() > 1e-2


def test_greedy_is_argmax(engine, way):
    embeds, mask = prompts(engine.language_model)
    drawn, llm = generate(engine, way, (embeds, mask), max_new_tokens=6), engine.language_model
    for t in range(drawn.ids.shape[1]):
        with torch.no_grad():
            longer = append_token_embeds(llm, embeds, drawn.ids[:, :t])
            seen = torch.cat([mask, torch.ones(3, t, dtype=mask.dtype)], 1)
            logits = llm.lm_head(hidden_states(llm, longer, seen, positions(seen))[:, -1])
        assert torch.equal(drawn.ids[:, t], logits.argmax(-1))


def test_greedy_repeats_itself_over_generations(engine, way):
    drawn = generate(engine, way, prompts(engine.language_model, (5,)), 3)
    assert (drawn.ids == drawn.ids[:1]).all()


def test_a_row_does_not_depend_on_its_neighbours(engine, way):
    """The same uniforms give the same tokens alone, in company, and in another order."""
    embeds, mask = prompts(engine.language_model)
    numbers = uniforms(6)
    together = generate(engine, way, (embeds, mask), 2, uniforms=numbers).ids
    order = [2, 0, 1]
    rows = [4, 5, 0, 1, 2, 3]
    turned = generate(engine, way, (embeds[order], mask[order]), 2, uniforms=numbers[rows]).ids
    alone = generate(engine, way, (embeds[1:2], mask[1:2]), 2, uniforms=numbers[2:4]).ids
    assert torch.equal(together[rows], turned) and torch.equal(together[2:4], alone)
    assert not torch.equal(together[0], together[1])  # rows of a prompt have numbers of their own


def test_uniforms_need_their_shape(engine):
    with pytest.raises(ValueError, match="expected \\(2, 16\\)"):
        generate(engine, slow, prompts(engine.language_model, (5,)), 2, uniforms=uniforms(1))


# Stopping


class Script(torch.nn.Module):
    """A language model that says `rows` (N lists of ids), whatever it hears.

    Its logits are one-hot at the next scripted token.
    """

    def __init__(self, rows, vocab_size):
        super().__init__()
        self.rows, self.vocab_size, self.step = rows, vocab_size, 0
        self.lm_head = SimpleNamespace(weight=50.0 * torch.eye(vocab_size))
        self.model, self.config = self._forward, Qwen2Config(num_hidden_layers=1)
        self.embedding = torch.nn.Embedding(vocab_size, 1)

    def get_input_embeddings(self):
        return self.embedding

    def _forward(self, inputs_embeds, past_key_values, attention_mask, **_):
        """A hidden state has a place for each token, and is 1 at the one that lm_head shall say."""
        hidden = torch.zeros(*inputs_embeds.shape[:2], self.vocab_size)
        for row, ids in enumerate(self.rows):
            hidden[row, -1, ids[min(self.step, len(ids) - 1)]] = 1.0
        self.step += 1
        self.mask = attention_mask
        return SimpleNamespace(last_hidden_state=hidden)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def say(tokenizer, texts, steps=STEPS):
    """(a scripted model, its completions), one prompt a row."""
    stop = StopText(tokenizer, ["<|end|>"], len(tokenizer))
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    script, mask = Script(rows, len(tokenizer)), torch.ones(len(texts), 2, dtype=torch.long)
    embeds, draws = torch.zeros(*mask.shape, 1), SamplingParams(1, steps, stop, 0, 1.0, None)
    return script, hf_backend.generate(script, embeds, mask, positions(mask), draws)


def test_each_row_stops_by_itself(tokenizer):
    texts = [
        "a cat<|end|> foo",
        "a red dog.<|end|> foo foo",
        "a very small cat in the picture and then no end at all in this",
    ]
    script, drawn = say(tokenizer, texts)
    kept = [tokenizer.decode(ids[valid].tolist()) for ids, valid in zip(drawn.ids, drawn.valid)]
    # Through the token that completes the stop text; the third was cut at the length limit.
    assert kept[:2] == ["a cat<|end|>", "a red dog.<|end|>"]
    assert drawn.stopped.tolist() == [True, True, False]
    assert drawn.valid[2].all() and drawn.ids.shape == (3, STEPS)
    for row in range(2):
        end = int(drawn.valid[row].sum())
        assert drawn.valid[row, :end].all() and not drawn.valid[row, end:].any()
        assert (drawn.ids[row, end:] == 0).all() and (drawn.logp[row, end:] == 0).all()
    # Nobody attends to a stopped row's padding.
    assert torch.equal(script.mask[:, 2:].bool(), drawn.valid[:, :-1])


def test_the_batch_ends_with_its_last_row(tokenizer):
    _, drawn = say(tokenizer, ["a cat<|end|>", "a red dog.<|end|>"])
    assert drawn.ids.shape[1] == int(drawn.valid.sum(1).max()) < STEPS
    assert drawn.stopped.all()


def test_stop_at_the_length_limit_is_not_truncated(tokenizer):
    length = len(tokenizer.encode("a cat<|end|>", add_special_tokens=False))
    assert say(tokenizer, ["a cat<|end|>"], steps=length)[1].stopped.tolist() == [True]
    assert say(tokenizer, ["a cat<|end|>"], steps=length - 1)[1].stopped.tolist() == [False]
