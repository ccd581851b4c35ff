"""Log-probs and entropies in chunks of the vocabulary are those of all logits at once."""

from types import SimpleNamespace

import pytest
import torch

from rl_train import grpo
from rl_train.engine import lm_head as head_module
from rl_train.engine.layers import mark_rows_dynamic
from rl_train.engine.lm_head import token_logps


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
    monkeypatch.setattr(head_module, "CHUNK", chunk)
    hidden = head.hidden.clone().requires_grad_()
    logits = (hidden @ head.weight.t())[None]
    expected = grpo.token_logps_from_logits(logits, head.ids[None], temperature)[0]
    (right,) = torch.autograd.grad(expected, hidden, head.slope)
    logp, entropy = token_logps(hidden, head.weight, head.ids, temperature, 50)
    (found,) = torch.autograd.grad(logp, hidden, head.slope)
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(logits=logits / temperature).entropy()[0].detach()
    )
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad


def test_the_head_of_a_bf16_model_does_not_round_its_logits():
    """Log-probs are the float64 truth's of the same bf16 numbers; the plain way's are not.

    Of the gradient only the probabilities and the result are rounded.
    """
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(200, 64, generator=random).bfloat16()
    weight = torch.randn(1000, 64, generator=random).bfloat16()
    ids, slope = torch.randint(1000, (200,), generator=random), torch.randn(200, generator=random)

    def gradient(function, dtype=None):
        leaf = hidden.clone().to(dtype or hidden.dtype).requires_grad_()
        logp = function(leaf)
        logp.backward(slope.to(logp.dtype))
        return logp.detach().double(), leaf.grad.double()

    def exactly(h):
        every = torch.log_softmax(h @ weight.double().t() / 0.7, -1)
        return every.gather(-1, ids[:, None])[:, 0]

    def plainly(h):
        logits = torch.nn.functional.linear(h, weight)
        return grpo.token_logps_from_logits(logits[None], ids[None], 0.7)[0]

    truth, right = gradient(exactly, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        logp, grad = gradient(lambda h: token_logps(h, weight, ids, 0.7, 1000)[0])
        plain_logp, plain_grad = gradient(plainly)
    assert (logp - truth).norm() < 1e-3 * (plain_logp - truth).norm()
    assert (grad - right).norm() < 0.3 * (plain_grad - right).norm()

    def entropy_exactly(h):
        every = torch.log_softmax(h @ weight.double().t() / 0.7, -1)
        return -(every.exp() * every).sum(-1)

    truth = entropy_exactly(hidden.double())
    entropy = token_logps(hidden, weight, ids, 0.7, 1000)[1]
    assert (entropy - truth).norm() < 1e-6 * truth.norm()


def test_rows_that_align_the_head_are_no_tokens(head):
    hidden = head.hidden.clone().requires_grad_()
    padded = torch.cat([head.weight, torch.zeros(14, 6)])
    expected = token_logps(hidden, head.weight, head.ids, 0.7, 50)
    found = token_logps(hidden, padded, head.ids, 0.7, 50)
    torch.testing.assert_close(found, expected)
    for f, e in zip(
        *(torch.autograd.grad(out[0], hidden, head.slope) for out in (found, expected))
    ):
        torch.testing.assert_close(f, e)


def test_compiled_for_mark_rows_dynamic_of_tokens(head):
    """One graph for all chunks, of one kind each; it stands for the backend of a GPU."""
    torch._dynamo.reset()  # recompilations by earlier tests count towards its limit
    padded, graphs = torch.cat([head.weight, torch.zeros(14, 6)]), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    kernel = torch.compile(head_module._logps_and_derivative, backend=backend)
    for many, dtype in enumerate((None, torch.bfloat16)):
        for rows in (7, 5, 2):
            logits, how = head.hidden[:rows] @ padded.t(), (0.7, 50, dtype)
            found = kernel(*mark_rows_dynamic(logits, head.ids[:rows].clone()), *how)
            torch.testing.assert_close(
                found, head_module._logps_and_derivative(logits, head.ids[:rows], *how)
            )
            assert len(found) == 2 + many and all(len(part) == rows for part in found)
            assert not any(by_logits[:, 50:].any() for by_logits in found[2:])
        assert len(graphs) == many + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_compiled_head_equals_the_plain(head, monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK", 192)  # three rows
    padded, results = torch.cat([head.weight, torch.zeros(14, 6)]), []
    for device in ("cpu", "cuda"):
        hidden, weight, ids, slope = (
            t.to(device) for t in (head.hidden, padded, head.ids, head.slope)
        )
        hidden = hidden.clone().requires_grad_()
        logp, entropy = token_logps(hidden, weight, ids, 0.7, 50)
        gradients = torch.autograd.grad(logp, hidden, slope)
        plain = token_logps(hidden.detach(), weight, ids, 0.7, 50)
        results.append([t.detach().cpu() for t in (logp, entropy, *gradients, *plain)])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_no_tokens(head):
    hidden = head.hidden[:0].requires_grad_()
    logp, entropy = token_logps(hidden, head.weight, head.ids[:0], 1.0, 50)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert hidden.grad.shape == (0, 6)


def test_a_head_that_trains_gets_the_gradient_of_the_full_logits(head, monkeypatch):
    """Supervised training wants it, by chunks too; log-probs are those of a frozen head."""
    monkeypatch.setattr("rl_train.engine.lm_head.CHUNK", 3 * 50)
    hidden, weight = (t.detach().requires_grad_() for t in (head.hidden, head.weight[:50]))
    logp, entropy = token_logps(hidden, weight, head.ids, 0.7, 50)
    full = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    own = full.gather(1, head.ids[:, None])[:, 0]
    torch.testing.assert_close(logp, own)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))
    assert not entropy.requires_grad
    of = torch.arange(1.0, 1 + len(own))
    found = torch.autograd.grad(logp @ of, (hidden, weight))
    for f, e in zip(found, torch.autograd.grad(own @ of, (hidden, weight))):
        torch.testing.assert_close(f, e)
