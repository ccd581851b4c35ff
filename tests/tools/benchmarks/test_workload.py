"""The step that benchmarks measure: as long as they say, the training's own, and TRL's."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from rl_train.loss import reference_scores
from rl_train.run.build import Run
from rl_train.train import train
from tools.benchmarks import roofline, trl_style, workload

FLAGS = "--batch_size 2 --num_generations 3 --max_completion_length 6 --lora_r 4 "
FLAGS += "--micro_batch_size 3"
OPTIONS = workload.Options(
    device="cpu", sizes="tiny", prompt_length=200, answer_tokens=4, flags=FLAGS.split()
)


@pytest.fixture(scope="module")
def tiny():
    return workload.build(OPTIONS)


@pytest.fixture(scope="module")
def full():
    return trl_style.build_trl_style(OPTIONS)


def weights(work):
    """{name: tensor} of the policy and of its teacher."""
    teacher = work.state.roles.copies["teacher"]
    return {n: p.detach().clone() for n, p in work.policy.trainable.items()} | {
        f"teacher {n}": t.clone() for n, t in teacher.items()
    }


def test_lengths_are_forced(tiny, monkeypatch):
    """Prompts of L tokens, captions of T, answers of A with one [SEG], N masks to describe."""
    seen, embed = [], tiny.policy.embed

    def watched(images, prompts, *rest):
        seen.append(list(map(len, prompts.ids)))
        return embed(images, prompts, *rest)

    monkeypatch.setattr(tiny.policy, "embed", watched)
    before = weights(tiny)
    tiny.step()  # asserts what it left behind
    assert seen[0] == [200, 200] and max(map(len, seen)) == 6  # rollouts share their prompt,
    assert seen.count([200, 200]) == 2 and [200] * 6 in seen  # the teacher has one a row
    after = weights(tiny)
    moved = {name for name, p in after.items() if not torch.equal(p, before[name])}
    trainable = set(tiny.policy.trainable)
    assert len(moved & trainable) > 0.9 * len(trainable) and moved - trainable  # and the teacher's


def test_an_answer_has_one_seg_even_if_another_is_sampled(full, monkeypatch):
    """A [SEG] that random weights happen to sample does not give a row a second mask."""
    policy, sample = full.policy, full.policy.engine.generate

    def with_seg_in_front(*args, **options):
        completions = sample(*args, **options)
        if not options["delay"]:  # of an answer with a mask
            completions.ids[0, 0] = policy.model.seg_id
        return completions

    monkeypatch.setattr(policy.engine, "generate", with_seg_in_front)
    full.step()  # asserts one [SEG] a row


def test_the_step_is_the_trainings():
    """It computes what `train` does, to the last bit, with the masks that were drawn."""
    mine, theirs = workload.build(OPTIONS), workload.build(OPTIONS)
    mine.masks = None
    mine.step()
    state = theirs.state
    state.scheduler = SimpleNamespace(step=lambda: None)
    parts = Run(theirs.config, theirs.ranks, None, None, None, state, max_steps=1, phases=None)

    def end_of_step(state, *_):
        state.step += 1

    train(parts, [theirs.batch], end_of_step)
    assert state.step == mine.state.step == 1
    expected, differing = weights(theirs), []
    for name, tensor in weights(mine).items():
        differing += [] if torch.equal(tensor, expected[name]) else [name]
    assert not differing


def test_trl_scores_the_same_tokens_alike(full):
    """Its log-probs and [SEG] embeddings are the project's, to bf16, on the same weights."""
    ours, theirs = workload.build(OPTIONS), full.policy
    ours.policy.model.load_state_dict(theirs.model.state_dict())
    task, batch = ours.state.tasks[1], ours.batch
    with torch.no_grad():
        features = ours.policy.encode(batch)
        prompts = task.prompts(batch, features)
        rollout = ours.policy.sample(batch, features, prompts, 3, 6, torch.rand(6, 6).double())
        own = reference_scores(ours.policy, task, rollout, 3)
        per_row = dataclasses.replace(rollout, features=theirs.encode(batch))
        of_trl = reference_scores(theirs, full.state.tasks[1], per_row, 3)
    assert own.action_params.shape[0] == 6  # a [SEG] in each row
    assert torch.allclose(own.logp, of_trl.logp, atol=0.05)
    assert torch.allclose(own.action_params, of_trl.action_params, atol=0.05)


def test_trl_samples_greedily_alike(full):
    """transformers' generate gives the engine's tokens and their hidden states."""
    policy, batch = full.policy, full.batch
    engine = super(trl_style.FullEngine, policy.engine)
    how = dict(num_generations=1, max_new_tokens=4, stop=None)
    with policy.autocast(), torch.no_grad():
        features = policy.encode(batch)
        prompts = policy.segment_prompts(features, [0, 1], batch.captions)
        inputs = policy.embed(features, prompts)[:2]
        ours, theirs = engine.generate(*inputs, **how), policy.engine.generate(*inputs, **how)
        how |= dict(num_generations=2, uniforms=torch.rand(4, 4))
        drawn = policy.engine.generate(*inputs, **how)
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.allclose(ours.hidden.float(), theirs.hidden.float(), atol=0.1)
    assert drawn.ids.shape == (4, 4) and (drawn.logp < 0).all()


def test_what_trl_encodes(full, monkeypatch):
    """Vision for each row of a forward, SAM2's features for each mask of the teacher's."""
    model, calls = full.policy.model, dict(vision_features=[], sam_features=[])
    for name, sizes in calls.items():
        real = getattr(model, name)
        monkeypatch.setattr(
            model, name, lambda pixels, r=real, s=sizes: (s.append(len(pixels)), r(pixels))[1]
        )
    full.step()
    assert calls["sam_features"] == [2, 6]
    # encode; then of each loop: rollout, old log-probs in micro-batches of 3, reference, teacher
    loop = [2, 3, 3, 3, 3, 6]
    assert calls["vision_features"] == [2, *loop, *loop, 3, 3, 3, 3]


def test_floor_of_a_step_by_hand(tiny):
    """Operations of loop 1's log-probs.

    Shared prompts, causal pairs, no gradient of frozen weights.
    """
    model = roofline.LanguageModel(tiny.policy.model.language_model)
    width, inner, kv, layers = 128, 352, 64, 4
    assert model.base == layers * (2 * width * width + 2 * width * kv + 3 * width * inner)
    lora = 2 * 2 * width + 2 * (width + kv) + 3 * (width + inner)
    assert model.lora == layers * 4 * lora
    assert (model.attention, model.slot) == (layers * width, 2 * 2 * layers * kv)
    tokens, scored, pairs = 2 * 200 + 6 * 6, 6 * 6, 2 * 200**2 / 2 + 6 * 6 * (200 + 3)
    forward = 2 * tokens * (model.base + model.lora) + 4 * model.attention * pairs
    forward += 2 * model.head * scored
    tiny.step()
    least = roofline.step_floor(tiny, 1.0, 1e30)
    assert least["reference1"] == pytest.approx(forward) and least["update"] > 2 * forward
    trainable = sum(p.numel() for p in tiny.policy.trainable.values())
    assert roofline.step_floor(tiny, 1e30, 1.0)["update"] >= 40 * trainable
