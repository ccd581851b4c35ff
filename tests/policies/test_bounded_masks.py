"""Masks are decoded a fixed number at a time, and of an answer so many: whatever a model says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train.policies import sa2va
from rl_train.policies.sa2va_queries import row_masks
from rl_train.utils.rng import RowRNG
from tests.updates import STEPS, backward, largest_difference, moved_policy, roll, task_of, work_of

CAP = 8  # masks of an answer, the default


model = pytest.fixture(scope="module")(moved_policy)


@pytest.fixture(scope="module")
def task(model):
    return task_of(model, 2, mask_loss_coef=1.0)


@pytest.fixture(scope="module")
def only_seg(scenes, prepare, model, task):
    """4 rows about two scenes that say nothing but [SEG], as often as they may."""
    rollout = roll(model, task, prepare(scenes[:2], model.processor))
    column = torch.arange(STEPS) % rollout.ids.shape[1]  # what was sampled may be shorter
    ids = torch.full((4, STEPS), model.model.seg_id)
    valid, hidden = torch.ones_like(ids, dtype=torch.bool), rollout.hidden[:, column]
    said = dict(ids=ids, valid=valid, hidden=hidden, logp=rollout.logp[:, column])
    rollout = replace(rollout, **said)
    rollout.latents = task.action.draw(rollout, RowRNG(0, 0, 1, [0, 1], 2))
    return rollout


def decoded(monkeypatch, model) -> list[int]:
    """A list that receives how many masks each call of the decoder makes."""
    real, sizes = model.model.decode_masks, []

    def watched(features, image, prompts):
        sizes.append(len(prompts))
        return real(features, image, prompts)

    monkeypatch.setattr(model.model, "decode_masks", watched)
    return sizes


def update(model, task, rollout):
    """(gradients, loss, bytes kept for the backward) of one update."""
    kept, work = [], work_of(model, task, rollout)

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gradients, _, loss = backward(model, work)
    return gradients, loss, sum(kept)


def test_chunks_have_the_gradient_of_the_whole_and_keep_little(
    model, task, only_seg, monkeypatch, chunk=5
):
    sizes = decoded(monkeypatch, model)
    whole, loss, kept = update(model, task, only_seg)
    assert sizes == [4 * CAP]  # MASKS_AT_ONCE: in one piece
    monkeypatch.setattr(sa2va, "MASKS_AT_ONCE", chunk)
    sizes.clear()
    parts, same_loss, kept_of_chunks = update(model, task, only_seg)
    assert len(sizes) == 7 + 6 and max(sizes) == chunk  # but the last, each again in the backward
    assert same_loss == pytest.approx(loss, rel=1e-5)
    largest = max(g.abs().max().item() for g in whole.values())
    assert largest_difference(whole, parts) < 3e-5 * largest  # rounding; a mask is 1/32
    sam2 = {n: g for n, g in whole.items() if model.group_of[n] == "sam2"}
    assert sum(bool(g.any()) for g in sam2.values()) > 0.8 * len(sam2)
    text = update(model, task_of(model, 2, mask_loss_coef=0.0), only_seg)[2]
    assert 0 < kept_of_chunks - text < (kept - text) * chunk / len(only_seg.latents.rows)


def test_what_fits_a_chunk_is_decoded_as_ever_bit_for_bit(model, task, only_seg, monkeypatch):
    """It is decoded in one piece, and not computed twice."""
    by_chunks, _, _ = update(model, task, only_seg)
    monkeypatch.setattr(sa2va, "by_chunks", lambda compute, *_: compute(slice(None)))
    monkeypatch.setattr("rl_train.tasks.latent_mask.by_chunks", sa2va.by_chunks)
    as_ever, _, _ = update(model, task, only_seg)
    assert all(torch.equal(by_chunks[name], as_ever[name]) for name in as_ever)


@pytest.mark.parametrize("side, at_once", [(64, 32), (256, 16), (288, 12), (2048, 1)])
def test_large_masks_with_gradient_come_in_smaller_chunks(side, at_once):
    images = SimpleNamespace(sam=[torch.empty(2, 1, side, side)])
    assert sa2va.masks_at_once(images) == at_once
    with torch.no_grad():
        assert sa2va.masks_at_once(images) == 32


def test_masks_without_gradient_come_in_chunks_too(model, images, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(7, model.model.config.prompt_size, generator=generator)
    rows, image = [0, 0, 1, 2, 2, 2, 3], [0, 1, 2, 3]
    whole = row_masks(model, images, image, rows, z).masks
    sizes = decoded(monkeypatch, model)
    monkeypatch.setattr(sa2va, "MASKS_AT_ONCE", 3)
    parts = row_masks(model, images, image, rows, z).masks
    assert sizes == [3, 3, 1]
    assert sum(int((a != b).sum()) for a, b in zip(whole, parts)) <= 2  # pixels at the edge
    [empty] = row_masks(model, images, [0], [], z[:0]).masks
    assert not empty.any() and len(sizes) == 3


def test_of_an_answer_only_the_first_are_masks(model, task, only_seg):
    """Sampling, scoring and counting agree; a row of just as many is not over the cap."""
    drawn = only_seg.latents
    assert drawn.rows.tolist() == [row for row in range(4) for _ in range(CAP)]
    assert model.seg_tokens(only_seg.ids, only_seg.valid)[0].tolist() == (
        [True] * CAP + [False] * (only_seg.ids.shape[1] - CAP)
    )
    with torch.no_grad():
        means = task.action.distribution_params(only_seg, slice(0, 4), model.score(only_seg))
    sampled = model.mask_embeddings(only_seg)[1]
    assert means.shape == sampled.shape == (4 * CAP, model.model.config.prompt_size)
    assert len(only_seg.latents.rows) == 4 * CAP
    assert model.too_many_masks(only_seg).all()
    ids = only_seg.ids.clone()
    ids[0, CAP:], ids[1, 2:] = 5, 5
    assert model.too_many_masks(replace(only_seg, ids=ids)).tolist() == [False, False, True, True]
