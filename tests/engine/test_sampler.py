"""The sampler draws from the distribution that is scored, row by row, whatever else is in the batch."""

import pytest
import torch
from transformers import Qwen2Config

from rl_train.engine.logprob import follow, hidden_states
from rl_train.engine.sampler import generate
from rl_train.engine.tokens import StopText
from rl_train.objective import token_logps
from rl_train.policies.sa2va import load_tokenizer
from sa2va_hf.prompts import PromptBuilder
from rl_train.rollout import noise, sample
from tools.make_demo import SHIPPED_CHECKPOINT

STEPS = 16


def describe_prompts(model, images, batch, which):
    return model.describe_prompts(images, which, [batch.inputs.grids[i] for i in which])


def draw(model, images, prompts, num_generations=1, steps=STEPS, uniforms=None, stop=None):
    with torch.no_grad():
        embeds, mask = model.embed(images, prompts)
        return generate(
            model.model.language_model,
            embeds,
            mask,
            num_generations=num_generations,
            max_new_tokens=steps,
            stop=stop or model.stop,
            pad_id=model.pad_id,
            temperature=model.temperature,
            uniforms=uniforms,
        )


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_sampled_log_probs_are_the_scored_ones(policy, images, batch, temperature):
    """Both loops, ragged prompts and answers: what the sampler returns is what a full forward recomputes."""
    model = policy(temperature=temperature)
    for prompts, sigma in (
        (describe_prompts(model, images, batch, [0, 1, 2]), None),
        (model.segment_prompts(images, [0, 1, 2], batch.captions[:3]), 0.3),
    ):
        random = noise(0, 0, 0, [0, 1, 2], 2, STEPS, model.model.config.prompt_size)
        rollout = sample(model, batch, images, prompts, 2, STEPS, random, sigma)
        assert rollout.valid.any(1).all() and len({len(ids) for ids in prompts.ids}) > 1
        with torch.no_grad():
            scores = token_logps(model, rollout)
        gap = ((scores.logp - rollout.logp).abs() * rollout.valid).max()
        assert gap < 1e-4
        assert (rollout.logp[rollout.valid] < -1e-3).any()  # something was uncertain
        if sigma is not None:
            torch.testing.assert_close(
                scores.latent_mean, rollout.latent.z - rollout.latent.offset, atol=1e-4, rtol=0
            )


def test_greedy_is_argmax(model, images, batch):
    prompts = describe_prompts(model, images, batch, [0, 1])
    completions, llm = draw(model, images, prompts, steps=6), model.model.language_model
    for t in range(completions.ids.shape[1]):
        with torch.no_grad():
            embeds, mask = model.embed(images, prompts, t)
            embeds = follow(llm, embeds, completions.ids[:, :t])
            mask = torch.cat([mask, torch.ones(2, t, dtype=mask.dtype)], 1)
            logits = llm.lm_head(hidden_states(llm, embeds, mask)[:, -1])
        rows = completions.valid[:, t]
        assert torch.equal(completions.ids[rows, t], logits.argmax(-1)[rows])


def test_greedy_repeats_itself_over_generations(model, images, batch):
    completions = draw(
        model, images, describe_prompts(model, images, batch, [0]), num_generations=3
    )
    assert (completions.ids == completions.ids[:1]).all()


def test_a_row_does_not_depend_on_its_neighbours(model, images, batch):
    """The same uniforms give the same tokens alone, in company, and in another order."""
    uniforms, _ = noise(3, 1, 0, [0, 1, 2], 2, STEPS, 0)
    together = draw(
        model, images, describe_prompts(model, images, batch, [0, 1, 2]), 2, uniforms=uniforms
    )
    turned = draw(
        model,
        images,
        describe_prompts(model, images, batch, [2, 0, 1]),
        2,
        uniforms=uniforms[[4, 5, 0, 1, 2, 3]],
    )
    alone = draw(
        model, images, describe_prompts(model, images, batch, [1]), 2, uniforms=uniforms[2:4]
    )
    for row, (a, b) in enumerate([(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)]):
        assert torch.equal(together.ids[a][together.valid[a]], turned.ids[b][turned.valid[b]]), row
    for row in range(2):
        assert torch.equal(
            together.ids[2 + row][together.valid[2 + row]], alone.ids[row][alone.valid[row]]
        )
    assert not torch.equal(
        together.ids[0], together.ids[1]
    )  # G rows of a prompt have uniforms of their own


def test_uniforms_need_their_shape(model, images, batch):
    with pytest.raises(ValueError, match="expected \\(2, 16\\)"):
        draw(
            model,
            images,
            describe_prompts(model, images, batch, [0]),
            2,
            uniforms=torch.zeros(1, STEPS),
        )


# Stopping


class Script(torch.nn.Module):
    """A language model that says `rows` (N lists of ids), whatever it hears: one-hot logits at the next scripted token."""

    def __init__(self, rows, vocab_size):
        super().__init__()
        self.rows, self.vocab_size, self.step = rows, vocab_size, 0
        self.model, self.config = self._forward, Qwen2Config(num_hidden_layers=1)
        self.embedding = torch.nn.Embedding(vocab_size, 1)

    def get_input_embeddings(self):
        return self.embedding

    def lm_head(self, hidden):
        logits = torch.zeros(len(self.rows), self.vocab_size)
        for row, ids in enumerate(self.rows):
            logits[row, ids[min(self.step, len(ids) - 1)]] = 50.0
        self.step += 1
        return logits

    def _forward(self, inputs_embeds, past_key_values, attention_mask, **_):
        class Out:
            last_hidden_state = torch.zeros(len(inputs_embeds), inputs_embeds.shape[1], 1)

        self.mask = attention_mask
        return Out


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED_CHECKPOINT)


def say(tokenizer, texts, steps=STEPS):
    """Completions of a scripted model, one prompt a row."""
    stop = StopText(tokenizer, ["<|end|>"], len(tokenizer))
    script = Script(
        [tokenizer.encode(text, add_special_tokens=False) for text in texts], len(tokenizer)
    )
    n = len(texts)
    return script, generate(
        script,
        torch.zeros(n, 2, 1),
        torch.ones(n, 2, dtype=torch.long),
        num_generations=1,
        max_new_tokens=steps,
        stop=stop,
        pad_id=tokenizer.pad_token_id,
    )


def test_each_row_stops_by_itself(tokenizer):
    texts = [
        "a cat<|end|> foo",
        "a red dog.<|end|> foo foo",
        "a very small cat in the picture and then no end at all in this",
    ]
    script, completions = say(tokenizer, texts)
    builder = PromptBuilder(tokenizer, "phi3_chat", 64)
    kept = [
        tokenizer.decode(ids[valid].tolist())
        for ids, valid in zip(completions.ids, completions.valid)
    ]
    assert (
        kept[0] == "a cat<|end|>" and kept[1] == "a red dog.<|end|>"
    )  # through the token that completes the stop text
    assert [
        builder.completion_text(ids[valid].tolist())
        for ids, valid in zip(completions.ids, completions.valid)
    ][:2] == ["a cat", "a red dog."]
    assert completions.stopped.tolist() == [
        True,
        True,
        False,
    ]  # the third was cut at the length limit
    assert completions.valid[2].all() and completions.ids.shape == (3, STEPS)
    for row in range(2):
        end = int(completions.valid[row].sum())
        assert completions.valid[row, :end].all() and not completions.valid[row, end:].any()
        assert (completions.ids[row, end:] == tokenizer.pad_token_id).all() and (
            completions.logp[row, end:] == 0
        ).all()
    assert torch.equal(
        script.mask[:, 2:].bool(), completions.valid[:, :-1]
    )  # nobody attends to a stopped row's padding


def test_the_batch_ends_with_its_last_row(tokenizer):
    _, completions = say(tokenizer, ["a cat<|end|>", "a red dog.<|end|>"])
    assert completions.ids.shape[1] == int(completions.valid.sum(1).max()) < STEPS
    assert completions.stopped.all()


def test_stop_at_the_length_limit_is_not_truncated(tokenizer):
    length = len(tokenizer.encode("a cat<|end|>", add_special_tokens=False))
    assert say(tokenizer, ["a cat<|end|>"], steps=length)[1].stopped.tolist() == [True]
    assert say(tokenizer, ["a cat<|end|>"], steps=length - 1)[1].stopped.tolist() == [False]


def test_real_rows_stop_apart(model, images, batch):
    """Demo captions of several lengths: each ends in its own stop text, none goes on behind it."""
    uniforms, _ = noise(0, 0, 0, [0, 1, 2], 2, 48, 0)
    completions = draw(
        model,
        images,
        describe_prompts(model, images, batch, [0, 1, 2]),
        2,
        steps=48,
        uniforms=uniforms,
    )
    texts = [
        model.tokenizer.decode(ids[valid].tolist())
        for ids, valid in zip(completions.ids, completions.valid)
    ]
    assert completions.stopped.any() and len({int(v.sum()) for v in completions.valid}) > 1
    for text, stopped in zip(texts, completions.stopped.tolist()):
        assert (
            (text.count("<|end|>") == 1 and text.endswith("<|end|>"))
            if stopped
            else "<|end|>" not in text
        )
