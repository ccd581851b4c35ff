"""Rows that share their prompt's forward score as rows on their own, with the same gradients.

And the vocabulary never stands whole.
"""

import pytest
import torch

from rl_train import grpo
from rl_train.engine import Engine, hf_backend
from rl_train.engine import lm_head as head_module
from rl_train.engine.hf_backend import append_token_embeds, hidden_states
from rl_train.engine.packing import input_mask, positions
from tests.engine.tiny import fast, make, prompts, slow, tiny_llm, trained

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_llm(), pad_id=0, temperature=TEMPERATURE, gradient_checkpointing=True)


@pytest.fixture(params=[slow, fast])
def way(request):
    """The model's modules, as on the CPU, or the kernels' twins, as on a GPU."""
    return request.param


def answers(lengths, num_tokens):
    """Random ids (n, num_tokens) and which are valid: the first lengths[r] of row r."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 300, (len(lengths), num_tokens), generator=random)
    valid = torch.arange(num_tokens) < torch.tensor(lengths)[:, None]
    return torch.where(valid, ids, 0), valid


def plain(engine, embeds, mask, prompt, ids, valid):
    """(logp, entropy, hidden at the fed tokens) of a full sequence a row, with all logits."""
    llm, length = engine.language_model, mask.shape[1]
    mask = torch.cat([mask[prompt], valid.to(mask.dtype)], dim=1)
    hidden = hidden_states(
        llm, append_token_embeds(llm, embeds[prompt], ids), mask, positions(mask)
    )
    logits = llm.lm_head(hidden[:, length - 1 : -1])
    logp = grpo.token_logps_from_logits(logits, ids, TEMPERATURE)
    entropy = torch.distributions.Categorical(logits=logits / TEMPERATURE).entropy().detach()
    return logp, entropy, hidden[:, length:][input_mask(valid)]


def packed(engine, embeds, mask, prompt, ids, valid):
    found = engine.score(embeds, mask, prompt, ids, valid)
    assert found.logp.shape == found.entropy.shape == ids.shape and not found.entropy.requires_grad
    assert (found.logp[~valid] == 0).all() and (found.entropy[~valid] == 0).all()
    return found.logp, found.entropy, found.hidden_of(input_mask(valid))


def gradients(engine, embeds, valid, logp, hidden) -> list[torch.Tensor]:
    """Gradients at LoRA weights and prompts, of a random sum of all that carries one."""
    weight = make(*valid.shape, dtype=torch.float32, seed=1)
    slope = make(*hidden.shape, dtype=torch.float32, seed=2)
    loss = torch.where(valid, weight * logp, 0.0).sum() + (slope * hidden).sum()
    return torch.autograd.grad(loss, [*trained(engine.language_model).values(), embeds])


def assert_alike(engine, way, lengths, prompt, ids, valid):
    embeds, mask = prompts(engine.language_model, lengths)
    inputs = embeds.requires_grad_(), mask, torch.tensor(prompt), ids, valid
    logp, entropy, hidden = plain(engine, *inputs)
    right = gradients(engine, embeds, valid, logp, hidden)
    with way(engine):
        its_logp, its_entropy, its_hidden = packed(engine, *inputs)
        found = gradients(engine, embeds, valid, its_logp, its_hidden)
    torch.testing.assert_close(its_logp[valid], logp[valid], atol=1e-5, rtol=0)
    torch.testing.assert_close(its_entropy[valid], entropy[valid], atol=1e-5, rtol=0)
    torch.testing.assert_close(its_hidden, hidden, atol=1e-5, rtol=1e-5)
    for f, r in zip(found, right, strict=True):
        assert (f - r).norm() <= 1e-4 * r.norm() + 1e-7
    return its_logp.detach()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_equals_the_plain_forward(engine, way, checkpointing):
    """Three ragged prompts of three rows: ragged answers, an empty one, one of a single token."""
    engine.gradient_checkpointing = checkpointing
    inputs = answers([7, 3, 0, 1, 9, 2, 5, 9, 4], 9)
    assert_alike(engine, way, (7, 5, 9), [0, 0, 0, 1, 1, 1, 2, 2, 2], *inputs)


@pytest.mark.parametrize(
    "lengths, num_tokens",
    [([4] * 6, 4), ([1] * 6, 1), ([1] * 6, 3), ([0, 0, 0, 2, 0, 3], 3)],
    ids=["full", "one token", "one of three", "mostly empty"],
)
def test_lengths(engine, way, lengths, num_tokens):
    """Prompts differ in length by hundreds of tokens, too."""
    inputs = answers(lengths, num_tokens)
    assert_alike(engine, way, (6, 8), [0, 0, 0, 1, 1, 1], *inputs)
    assert_alike(engine, way, (6, 300), [0, 1, 1, 1, 1, 1], *inputs)


@pytest.mark.parametrize("rows", [slice(0, 3), slice(3, 5), slice(2, 7), slice(5, 6), slice(0, 8)])
def test_micro_batches_may_cut_groups(engine, way, rows):
    """Two groups of four rows; each row's scores are also what it gets among all rows."""
    prompt, lengths = [0] * 4 + [1] * 4, (7, 5)
    ids, valid = answers([5, 2, 6, 4, 1, 6, 3, 5], 6)
    part = assert_alike(engine, way, lengths, prompt[rows], ids[rows], valid[rows])
    embeds, mask = prompts(engine.language_model, lengths)
    with torch.no_grad(), way(engine):
        whole = engine.score(embeds, mask, torch.tensor(prompt), ids, valid).logp
    torch.testing.assert_close(part, whole[rows], atol=1e-5, rtol=0)


def test_a_prompt_is_computed_once(engine, monkeypatch):
    seen, real = [], hf_backend.hidden_states

    def counted(llm, embeds, *rest):
        seen.append(embeds.shape)
        return real(llm, embeds, *rest)

    monkeypatch.setattr(hf_backend, "hidden_states", counted)
    with torch.no_grad():
        prompt = torch.tensor([0] * 4 + [1] * 4)
        engine.score(*prompts(engine.language_model, (7, 5)), prompt, *answers([6] * 8, 6))
    assert seen == [(2, 7 + 4 * 5 + 5, 64)]  # the sixth tokens are not read; a multiple of 8


def test_a_failed_forward_leaves_no_layer_in_training_mode(engine):
    layers = engine.language_model.model.layers
    embeds, mask = prompts(engine.language_model)
    with pytest.raises(RuntimeError):
        hidden_states(engine.language_model, embeds[..., :-1], mask, positions(mask), True)
    assert not any(layer.training for layer in layers)


@pytest.mark.parametrize("num_last", [1, 4])
def test_reads_and_scores_without_gradient(engine, way, num_last):
    embeds, mask = prompts(engine.language_model)
    ids = answers([num_last] * 3, num_last)[0]
    with way(engine):
        hidden = engine.last_hidden_states(embeds, mask, num_last=num_last)
        logps = engine.logps(hidden.flatten(0, 1), ids.flatten())
    assert hidden.shape == (3, num_last, 64) and not logps.requires_grad
    expected = hidden_states(engine.language_model, embeds, mask, positions(mask))[:, -num_last:]
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=0)
    logits = engine.language_model.lm_head(expected)
    expected = grpo.token_logps_from_logits(logits, ids, TEMPERATURE).flatten()
    torch.testing.assert_close(logps, expected, atol=1e-5, rtol=0)


# Memory


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Size of the largest tensor of floats with the vocabulary as a dimension, but the weight."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.vocabulary, self.weight, self.numel = vocabulary, {vocabulary, width}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if self.vocabulary in tensor.shape and set(tensor.shape[-2:]) != self.weight:
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("function, fits", [(plain, False), (packed, True)])
def test_memory_does_not_grow_with_the_vocabulary(engine, monkeypatch, function, fits):
    """Nothing made forward or backward, nor kept between them, holds more than CHUNK logits.

    Plain scoring does.
    """
    monkeypatch.setattr(head_module, "CHUNK", 10 * 300)
    embeds, mask = prompts(engine.language_model, (7,))
    ids, valid = answers([20] * 8, 20)
    weight, kept = engine.language_model.lm_head.weight, []

    def keep(tensor):
        if 300 in tensor.shape and tensor.data_ptr() != weight.data_ptr():
            kept.append(tensor.numel())
        return tensor

    with Largest(300, 64) as made:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            inputs = embeds.requires_grad_(), mask, torch.zeros(8, dtype=torch.long), ids, valid
            logp, _, hidden = function(engine, *inputs)
        gradients(engine, embeds, valid, logp, hidden)
    assert (made.numel <= 10 * 300) == fits and (not kept) == fits
    assert made.numel >= (10 if fits else 160) * 300  # it was seen
