"""Rows that share their prompt's forward score as rows on their own, with the same gradients; the vocabulary never stands whole."""

from types import SimpleNamespace

import pytest
import torch
from rl_train.engine.logprob import (
    follow,
    hidden_states,
    prepare_checkpointing,
    token_logps_from_hidden,
)

from rl_train import grpo
from rl_train.engine import logprob
from rl_train.engine.packing import pack
from rl_train.policies.sa2va import Policy, Prompts, Scores


def plain(model: Policy, images, prompts: Prompts, ids, valid) -> Scores:
    """A full sequence for each row, and all logits of the completions."""
    llm = model.model.language_model
    with model.autocast():
        embeds, mask = model.embed(images, prompts)
        length = mask.shape[1]
        hidden = hidden_states(
            llm, follow(llm, embeds, ids), torch.cat([mask, valid.to(mask.dtype)], dim=1)
        )
        logits = llm.lm_head(hidden[:, length - 1 : -1])
        latent_mean = model.model.text_hidden_fcs(hidden[:, length:][model.seg_tokens(ids, valid)])
    entropy = grpo.entropy_from_logits(logits, model.temperature).detach()
    return Scores(
        grpo.token_logps_from_logits(logits, ids, model.temperature), entropy, latent_mean.float()
    )


@pytest.fixture(scope="module")
def model(policy) -> Policy:
    """At a temperature that is not 1, with a LoRA that does something."""
    model = policy(temperature=0.8)
    for name, parameter in model.trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.fixture(scope="module")
def two_tiles(policy, prepare, scenes):
    """A policy of up to six tiles, and its images."""
    model = policy(max_tiles=6)
    batch = prepare(scenes[:2], model.processor)
    return (
        model,
        model.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes),
        batch,
    )


def completions(model, lengths, num_tokens, segs=()):
    """Random ids (n, num_tokens) and which are valid: the first lengths[r] of row r; [SEG] at the places `segs`."""
    ids = torch.randint(
        0, 500, (len(lengths), num_tokens), generator=torch.Generator().manual_seed(0)
    )
    for row, column in segs:
        ids[row, column] = model.model.seg_id
    valid = torch.arange(num_tokens) < torch.tensor(lengths)[:, None]
    return torch.where(valid, ids, model.pad_id), valid


def gradients(model, scores: Scores, valid) -> dict[str, torch.Tensor]:
    """Of a sum with random weights of what the loss reads."""
    random = torch.Generator().manual_seed(1)
    weight, slope = (
        torch.randn(valid.shape, generator=random),
        torch.randn(scores.latent_mean.shape, generator=random),
    )
    (
        torch.where(valid, weight * scores.logp, 0.0).sum() + (slope * scores.latent_mean).sum()
    ).backward()
    found = {name: p.grad for name, p in model.trainable.items()}
    for parameter in model.trainable.values():
        parameter.grad = None
    return found


def assert_alike(model, images, prompts, ids, valid, checkpointing=False):
    expected = plain(model, images, prompts, ids, valid)
    right = gradients(model, expected, valid)
    model.engine.gradient_checkpointing = checkpointing
    scores = model.score(images, prompts, ids, valid)
    found = gradients(model, scores, valid)
    model.engine.gradient_checkpointing = False
    assert (
        scores.logp.shape == scores.entropy.shape == ids.shape and not scores.entropy.requires_grad
    )
    torch.testing.assert_close(scores.logp[valid], expected.logp[valid], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy[valid], expected.entropy[valid], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.latent_mean, expected.latent_mean, atol=1e-5, rtol=0)
    assert (scores.logp[~valid] == 0).all() and (scores.entropy[~valid] == 0).all()
    assert {name for name, grad in found.items() if grad is not None} == {
        name for name, grad in right.items() if grad is not None
    }
    reached = [name for name, grad in right.items() if grad is not None]
    assert any("lora" in name for name in reached) and any("mlp1" in name for name in reached)
    for name in reached:
        assert (found[name] - right[name]).norm() <= 1e-4 * right[name].norm() + 1e-7, name


@pytest.fixture(params=["modules", "kernels"])
def how(request, monkeypatch):
    """By the model's modules, as on the CPU, or by `forward`, as on a GPU."""
    if request.param == "kernels":
        monkeypatch.setattr(logprob, "by_modules", logprob.by_kernels)


def describe(model, images, batch, image):
    return model.describe_prompts(images, image, [batch.inputs.grids[i] for i in image])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("task", ["describe", "segment"])
def test_equals_the_plain_forward(how, model, images, batch, task, checkpointing):
    """Three ragged prompts of three rows: ragged answers, an empty one, one of a single token, [SEG] at either end."""
    image = [0, 1, 3]
    prompts = (
        describe(model, images, batch, image)
        if task == "describe"
        else model.segment_prompts(images, image, [batch.captions[i] for i in image])
    )
    assert len({len(ids) for ids in prompts.ids}) == 3
    ids, valid = completions(
        model, [7, 3, 0, 1, 9, 2, 5, 9, 4], 9, segs=[(0, 0), (1, 2), (4, 3), (4, 7), (6, 3), (7, 8)]
    )
    assert model.seg_tokens(ids, valid).sum() == 4  # but those that end their row
    if checkpointing:
        prepare_checkpointing(model.model.language_model)
    assert_alike(model, images, prompts.repeat(3), ids, valid, checkpointing)


@pytest.mark.parametrize(
    "lengths, num_tokens",
    [([4] * 6, 4), ([1] * 6, 1), ([1] * 6, 3), ([0, 0, 0, 2, 0, 3], 3)],
    ids=["full", "one token", "one of three", "mostly empty"],
)
def test_lengths(how, model, images, batch, lengths, num_tokens):
    ids, valid = completions(model, lengths, num_tokens)
    assert_alike(model, images, describe(model, images, batch, [1, 2]).repeat(3), ids, valid)


@pytest.mark.parametrize("rows", [slice(0, 3), slice(3, 5), slice(2, 7), slice(5, 6), slice(0, 8)])
def test_micro_batches_may_cut_groups(how, model, images, batch, rows):
    """Of two groups of four rows; each row's scores are also what it gets among all rows."""
    prompts = describe(model, images, batch, [0, 1]).repeat(4)
    ids, valid = completions(model, [5, 2, 6, 4, 1, 6, 3, 5], 6, segs=[(0, 1), (3, 0), (5, 2)])
    assert_alike(model, images, prompts.select(range(8)[rows]), ids[rows], valid[rows])
    with torch.no_grad():
        whole, part = (
            model.score(images, prompts, ids, valid),
            model.score(images, prompts.select(range(8)[rows]), ids[rows], valid[rows]),
        )
    torch.testing.assert_close(part.logp, whole.logp[rows], atol=1e-5, rtol=0)


def test_tiles(how, two_tiles):
    """Images of one and of several tiles, whose prompts differ in length by hundreds of tokens."""
    model, images, batch = two_tiles
    assert max(images.tiles) > 1
    ids, valid = completions(model, [4, 2, 3, 4], 4, segs=[(1, 0)])
    assert_alike(model, images, describe(model, images, batch, [0, 1]).repeat(2), ids, valid)


def test_rows_of_other_prompts(how, model, images, batch):
    """The rows of a prompt need not be together, and prompts that differ in image or region alone are not one."""
    prompts = describe(model, images, batch, [0, 0, 1, 0])
    moved = prompts.grids[0].flip(1)
    assert not torch.equal(moved, prompts.grids[0])
    prompts.grids[1] = moved
    assert prompts.ids[0] == prompts.ids[1]
    assert prompts.distinct()[1] == [0, 1, 2, 3]
    ids, valid = completions(model, [4, 3, 2, 4], 4)
    assert_alike(model, images, prompts, ids, valid)
    same = model.segment_prompts(images, [0, 1], ["a circle"] * 2)
    assert (
        same.ids[0] == same.ids[1]
        and same.distinct()[1] == [0, 1]
        and same.repeat(2).distinct()[1] == [0, 0, 1, 1]
    )


def test_a_prompt_is_computed_once(model, images, batch, monkeypatch):
    seen, forward = [], logprob.hidden_states
    monkeypatch.setattr(
        logprob,
        "hidden_states",
        lambda llm, embeds, *rest: seen.append(embeds.shape) or forward(llm, embeds, *rest),
    )
    prompts = describe(model, images, batch, [0, 1])
    ids, valid = completions(model, [6] * 8, 6)
    with torch.no_grad():
        model.score(images, prompts.repeat(4), ids, valid)
    longest = max(map(len, prompts.ids))
    assert seen == [(2, (longest + 4 * 5 + 7) // 8 * 8, 128)]  # the sixth tokens are not read


def test_answers_may_together_be_longer_than_the_context(model, images, batch, monkeypatch):
    """Positions count within a row: only a prompt and one answer have to fit."""
    prompts = model.segment_prompts(images, [0], ["a circle"])
    ids, valid = completions(model, [4] * 8, 4)
    monkeypatch.setattr(model.model.config.llm, "max_position_embeddings", len(prompts.ids[0]) + 4)
    with torch.no_grad():
        model.score(images, prompts.repeat(8), ids, valid)
        with pytest.raises(ValueError, match="does not fit"):
            model.score(images, prompts.repeat(8), *completions(model, [4] * 8, 5))


def test_layout_by_hand():
    """Prompts of 3 and 2 tokens; rows of 3, 1 and 2 tokens, of which the last is not fed; a size that is a multiple of 8."""
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    ids = torch.tensor([[11, 12, 13], [21, 0, 0], [31, 32, 0]])
    valid = ids > 0
    packed = pack(mask, torch.tensor([0, 0, 1]), ids, valid, 9)
    assert packed.ids.tolist() == [[11, 12, 9, 9, 9], [31, 9, 9, 9, 9]]
    assert packed.position_ids[0, :5].tolist() == [0, 1, 2, 3, 4] and packed.position_ids[
        1, 1:4
    ].tolist() == [0, 1, 2]
    assert packed.before[valid].tolist() == [2, 3, 4, 2, 2, 3]
    seen = packed.bias(torch.float32)[:, 0] == 0
    assert seen[0, :5, :5].tolist() == torch.ones(5, 5).tril().bool().tolist()
    assert seen[1, 1:4, :4].int().tolist() == [
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 1],
    ]  # nobody sees the padding
    assert seen.any(-1).all() and not seen[:, :3, 3:].any()


def test_rows_do_not_see_each_other():
    mask, ids = torch.ones(1, 2, dtype=torch.long), torch.arange(1, 7).view(2, 3)
    packed = pack(mask, torch.tensor([0, 0]), ids, ids > 0, 0)
    bias = packed.bias(torch.bfloat16)
    assert bias.dtype == torch.bfloat16 and bias.shape == (1, 1, 8, 8)
    assert (bias[0, 0, :6, :6] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],  # prompt
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],  # first row
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]  # second row
    assert packed.position_ids[0, :6].tolist() == [0, 1, 2, 3, 2, 3]


# The head


@pytest.fixture
def head():
    random = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        hidden=torch.randn(7, 6, generator=random),
        weight=torch.randn(50, 6, generator=random),
        ids=torch.randint(50, (7,), generator=random),
        slope=torch.randn(7, generator=random),
    )


@pytest.mark.parametrize("chunk", [1, 100, 101, 150, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_chunks_of_the_head_equal_all_logits(head, monkeypatch, chunk, temperature):
    monkeypatch.setattr(logprob, "CHUNK", chunk)
    hidden = head.hidden.clone().requires_grad_()
    logits = (hidden @ head.weight.t())[None]
    expected = grpo.token_logps_from_logits(logits, head.ids[None], temperature)[0]
    (right,) = torch.autograd.grad(expected, hidden, head.slope)
    logp, entropy = token_logps_from_hidden(hidden, head.weight, head.ids, temperature)
    (found,) = torch.autograd.grad(logp, hidden, head.slope)
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, grpo.entropy_from_logits(logits, temperature)[0].detach())
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad


def test_the_head_in_bf16_is_as_close_as_plain(head):
    """bf16 logits and products, sums in float32: not further from the float64 truth than the plain way under autocast."""
    random = torch.Generator().manual_seed(2)
    hidden, weight = (
        torch.randn(200, 64, generator=random).bfloat16(),
        torch.randn(1000, 64, generator=random).bfloat16(),
    )
    ids, slope = torch.randint(1000, (200,), generator=random), torch.randn(200, generator=random)

    def gradient(function, dtype=None):
        leaf = hidden.to(dtype or hidden.dtype).requires_grad_()
        logp = function(leaf)
        logp.backward(slope.to(logp.dtype))
        return logp.detach().double(), leaf.grad.double()

    truth, right = gradient(
        lambda h: torch.log_softmax(h @ weight.double().t() / 0.7, -1).gather(-1, ids[:, None])[
            :, 0
        ],
        torch.float64,
    )
    with torch.autocast("cpu", torch.bfloat16):
        logp, grad = gradient(lambda h: token_logps_from_hidden(h, weight, ids, 0.7)[0])
        plain_logp, plain_grad = gradient(
            lambda h: grpo.token_logps_from_logits(
                torch.nn.functional.linear(h, weight)[None], ids[None], 0.7
            )[0]
        )
    assert (logp - truth).norm() < 1.01 * (plain_logp - truth).norm()
    assert (grad - right).norm() < 1.1 * (plain_grad - right).norm()


def test_rows_that_align_the_head_are_no_tokens(head):
    hidden, padded = (
        head.hidden.clone().requires_grad_(),
        torch.cat([head.weight, torch.zeros(14, 6)]),
    )
    expected = token_logps_from_hidden(hidden, head.weight, head.ids, 0.7)
    found = token_logps_from_hidden(hidden, padded, head.ids, 0.7, len(head.weight))
    torch.testing.assert_close(found, expected)
    for f, e in zip(
        *(torch.autograd.grad(out[0], hidden, head.slope) for out in (found, expected))
    ):
        torch.testing.assert_close(f, e)


def test_no_tokens(head):
    hidden = head.hidden[:0].requires_grad_()
    logp, entropy = token_logps_from_hidden(hidden, head.weight, head.ids[:0], 1.0)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert hidden.grad.shape == (0, 6)


def test_a_head_that_trains_is_refused(head):
    with pytest.raises(AssertionError, match="frozen"):
        token_logps_from_hidden(head.hidden, head.weight.requires_grad_(), head.ids, 1.0)


# Memory


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Size of the largest tensor of floats that any operation makes with the vocabulary as one of its dimensions."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.numel = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.is_floating_point()
                and self.vocabulary in tensor.shape
                and tensor.shape[-2:] != (self.vocabulary, 128)
                and tensor.shape[-2:] != (128, self.vocabulary)
            ):  # the weight
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(
    "function, fits", [(plain, False), (Policy.score, True)], ids=["plain", "ours"]
)
def test_memory_does_not_grow_with_the_vocabulary(
    model, images, batch, monkeypatch, function, fits
):
    """Nothing forward or backward makes, and nothing kept between them, holds more than CHUNK logits; plain scoring does."""
    ids, valid = completions(model, [20] * 8, 20)
    vocabulary = model.model.config.llm.vocab_size
    monkeypatch.setattr(logprob, "CHUNK", 10 * vocabulary)
    kept = []

    def keep(tensor):
        if (
            vocabulary in tensor.shape
            and tensor.data_ptr() != model.model.language_model.lm_head.weight.data_ptr()
        ):
            kept.append(tensor.numel())
        return tensor

    with Largest(vocabulary) as made:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scores = function(
                model, images, describe(model, images, batch, [0]).repeat(8), ids, valid
            )
        gradients(model, scores, valid)
    assert (made.numel <= logprob.CHUNK) == fits and (not kept) == fits
    assert made.numel >= (10 if fits else 160) * vocabulary  # it was seen
