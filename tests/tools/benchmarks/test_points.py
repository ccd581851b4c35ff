"""The step of Qwen2.5-VL that benchmarks measure: as long as said, the training's, and TRL's."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from rl_train.loss import reference_scores
from rl_train.policies.qwen_vl_model import TextModel
from rl_train.run.build import Run
from rl_train.run.memory_estimate import standing_memory
from rl_train.train import train
from tools.benchmarks import __main__, memory, qwen, roofline, trl_style, workload

L, T = 130, 6
FLAGS = f"--image_size 48 --batch_size 2 --num_generations 3 --max_completion_length {T} "
FLAGS += "--lora_r 4 --micro_batch_size 3"
OPTIONS = workload.Options(device="cpu", sizes="qwen-tiny", prompt_length=L, flags=FLAGS.split())


@pytest.fixture(scope="module")
def tiny():
    return workload.build(OPTIONS)


@pytest.fixture(scope="module")
def full():
    return trl_style.build_trl_style(OPTIONS)


def weights(work):
    return {name: p.detach().clone() for name, p in work.policy.trainable.items()}


def test_the_published_shapes():
    # Of the model cards; that of Qwen3-VL counts its embeddings once, for lm_head too.
    for sizes, number in (("qwen3-4b", 4_437_815_808 + 151936 * 2560), ("qwen-7b", 8_292_166_656)):
        shapes = qwen.SHAPES[sizes]
        with torch.device("meta"):
            model = qwen.random_qwen(shapes, "meta")
        assert sum(p.numel() for p in model.parameters()) == number
    assert shapes.preprocessing(840).max_tokens == 900
    with pytest.raises(ValueError, match="--image_size 0"):
        shapes.preprocessing(0)


def test_lengths_and_answers_are_forced(tiny, monkeypatch):
    """Prompts of L tokens, answers of T that can be read, masks with and without a negative."""
    embed, point_masks, seen, drawn = tiny.policy.embed, tiny.policy.point_masks, [], []

    def watched(images, prompts, *rest):
        seen.append(list(map(len, prompts.ids)))
        return embed(images, prompts, *rest)

    def drawing(images, image, answers, *rest):
        drawn.extend(answers)
        return point_masks(images, image, answers, *rest)

    monkeypatch.setattr(tiny.policy, "embed", watched)
    monkeypatch.setattr(tiny.policy, "point_masks", drawing)
    before = weights(tiny)
    phases = tiny.step().seconds  # asserts what it left behind
    assert list(phases) == ["encode", "rollout1", "reference1", "ask1", "teacher1", "update"]
    assert seen[0] == [L, L] and {length for lengths in seen for length in lengths} == {L}
    answers = [answer for answer in drawn if answer.negative]
    assert len(answers) == 6 and len(answers[0].boxes) == 1 and len(answers[0].positive) == 2
    after = weights(tiny)
    assert not [name for name, weight in after.items() if torch.equal(weight, before[name])]


def test_unequal_answers():
    """End where they are to, and are cut at T; all of them can be read."""
    made = workload.build(dataclasses.replace(OPTIONS, answer_lengths=(4.0, 3.0)))
    made.step()
    (sampled,) = made.requests["rollout1"]
    assert sampled.valid.sum(1).tolist() == made.policy.lengths.of(6, T)
    assert 0 < made.wasted()["rollout1"] < 1


def test_a_prompt_that_is_too_short_is_refused(tiny):
    larger = dataclasses.replace(tiny.policy.encode(tiny.batch), grids=[(16, 16)])
    with pytest.raises(ValueError, match=f"--prompt_length {L}: must be at least"):
        tiny.policy.point_questions(larger, [0], [""])


def test_the_step_is_the_trainings():
    """It computes what `train` does, to the last bit."""
    mine, theirs = workload.build(OPTIONS), workload.build(OPTIONS)
    mine.step()
    state = theirs.state
    state.scheduler = SimpleNamespace(step=lambda: None)
    parts = Run(theirs.config, theirs.ranks, None, None, None, state, max_steps=1, phases=None)

    def end_of_step(state, *_):
        state.step += 1

    train(parts, [theirs.batch], end_of_step)
    expected = weights(theirs)
    differing = [n for n, weight in weights(mine).items() if not torch.equal(weight, expected[n])]
    assert state.step == mine.state.step == 1 and not differing


def test_trl_computes_the_same(full):
    """Log-probs and greedy answers are the project's, in float32 on the same weights."""
    ours, theirs = workload.build(OPTIONS), full.policy
    ours.policy.model.float()
    kept = {name: weight.clone() for name, weight in theirs.model.state_dict().items()}
    theirs.model.float().load_state_dict(ours.policy.model.state_dict())
    ours.policy.base_dtype = theirs.base_dtype = torch.float32  # or autocast rounds to bfloat16
    task, batch = ours.state.tasks[0], ours.batch
    features, per_row = ours.policy.encode(batch), theirs.encode(batch)
    prompts = task.prompts(batch, features)
    uniforms = torch.rand(6, T, dtype=torch.float64)
    rollout = ours.policy.sample(batch, features, prompts, 3, T, uniforms)
    with torch.no_grad():
        own = reference_scores(ours.policy, task, rollout, 3).logp
        of_trl = reference_scores(
            theirs, task, dataclasses.replace(rollout, features=per_row), 3
        ).logp
    torch.testing.assert_close(of_trl, own, atol=1e-4, rtol=0)
    greedy = ours.policy.complete(features, prompts, 1, T)[0].ids
    assert torch.equal(theirs.complete(per_row, prompts, 1, T)[0].ids, greedy)
    theirs.model.to(torch.bfloat16).load_state_dict(kept)
    theirs.base_dtype = torch.bfloat16
    for parameter in theirs.trainable.values():
        parameter.data = parameter.data.float()


def test_trl_sees_the_image_of_every_row(full, monkeypatch):
    """And recomputes the layers of the update, but of nothing else."""
    vlm, images, trained = full.policy.model.vlm, [], []
    visual, layer = vlm.model.visual, vlm.model.language_model.layers[0]
    forward, inner = visual.forward, layer.mlp.forward
    monkeypatch.setattr(
        visual,
        "forward",
        lambda values, **how: images.append(len(how["grid_thw"])) or forward(values, **how),
    )
    monkeypatch.setattr(layer.mlp, "forward", lambda x: trained.append(layer.training) or inner(x))
    before = weights(full)
    phases = full.step().seconds
    expected = ["encode", "rollout1", "old1", "reference1", "ask1", "teacher1", "update"]
    assert list(phases) == expected
    assert images == [6, 3, 3, 3, 3, 3, 3]  # rollout, old, reference and update, each by row
    assert trained == [False] * (T + 4) + [True, False] * 2  # each update once more, in backward
    moved = [
        name for name, weight in weights(full).items() if not torch.equal(weight, before[name])
    ]
    assert len(moved) == len(before)


def test_floor_by_hand(tiny):
    text = tiny.policy.model.vlm.model.language_model
    model = roofline.LanguageModel(TextModel(text, tiny.policy.model.vlm.lm_head))
    width, inner, kv, layers = 128, 192, 64, 4
    assert model.base == layers * (2 * width * width + 2 * width * kv + 3 * width * inner)
    tokens, scored = 2 * L + 6 * T, 6 * T
    pairs = 2 * L**2 / 2 + 6 * T * (L + T / 2)
    forward = 2 * tokens * (model.base + model.lora) + 4 * model.attention * pairs
    forward += 2 * model.head * scored
    tiny.step()
    least = roofline.step_floor(tiny, 1.0, 1e30)
    assert least["reference1"] == pytest.approx(forward) and least["update"] > 2 * forward
    assert list(least) == ["encode", "rollout1", "ask1", "teacher1", "reference1", "update"]
    assert least["encode"] > 0 and least["teacher1"] > 0
    reads = roofline.step_floor(tiny, 1e30, 1.0)
    slots = 2 * L + 6 * T / 2
    assert reads["rollout1"] == pytest.approx(model.read(0) + (T - 1) * model.read(slots))


def test_memory_counts_the_sets_that_there_are(tiny):
    """Trainables have themselves, Adam's two states and the reference; there is no teacher."""
    policy = tiny.policy
    named = policy.model.named_parameters()
    frozen = sum(p.numel() for name, p in named if name not in policy.trainable)
    trainable = sum(p.nbytes for p in policy.trainable.values())
    assert memory.base_bytes(tiny.state) == 2 * frozen + 4 * trainable
    standing = standing_memory(policy, tiny.state.roles.copies)
    assert standing["reference"] == trainable


@pytest.mark.parametrize("sizes", ["qwen-tiny", "qwen3-tiny"])
def test_decode(tmp_path, capsys, sizes):
    command = f"decode --device cpu --sizes {sizes} --num_generations 2 --lora_r 4 --rounds 1 "
    command += (
        "--warmup 0 --prompt_length 5 --num_tokens 4 --num_prompts 2 --matmul_size 64 --copy_mib 1"
    )
    __main__.main([*command.split(), "--output", str(tmp_path / "figures.json")])
    (size,) = json.loads((tmp_path / "figures.json").read_text())["sizes"]
    assert size["rows"] == 4 and list(size["samplers"]) == ["decoder", "generate"]
    assert "4 rows, generate" in capsys.readouterr().out
