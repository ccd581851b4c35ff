"""Qwen2.5-VL and Qwen3-VL as policies: what trains, and that it is what transformers computes."""

import pytest
import torch
from peft import PeftModel

from rl_train.data.loader import Batches
from rl_train.loss import reference_scores
from rl_train.policies.qwen_vl_model import VERSIONS
from sa2va_hf.qwen_images import patches
from tests.engine.tiny import fast, slow
from tests.policies.tiny_points import WRITERS, samples, tiny_policy

QUESTIONS = ["Where?", "Where is the thing, then?", "Box."]
T, G = 12, 2


@pytest.fixture(scope="module", params=WRITERS)
def version(request):
    """Value of model_type in config.json."""
    return request.param


@pytest.fixture(scope="module")
def qwen(qwens, version):
    return qwens[version]


both_ways = pytest.mark.parametrize("way", [slow, fast])


@pytest.fixture(scope="module")
def batch(points):
    """Images of three shapes."""
    return Batches(samples([(60, 90), (120, 64), (84, 84)]), points.preprocessor(T))[[0, 1, 2]]


@pytest.fixture(scope="module")
def images(points, batch):
    return points.encode(batch)


def prompts_of(points, images, image=(0, 1, 2)):
    return points.point_questions(images, list(image), [QUESTIONS[i] for i in image])


def answers(num_rows, seed=0):
    """(ids, valid) of ragged answers, one of a single token."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, T + 1, (num_rows,), generator=random)
    lengths[-1], lengths[0] = 1, T
    ids = torch.randint(0, 256, (num_rows, T), generator=random)
    return ids, torch.arange(T) < lengths[:, None]


def of_transformers(points, batch, prompts, row, answer=()):
    """transformers' inputs of one prompt and an answer, its patches from its own processor."""
    image = prompts.image_index[row]
    ids = torch.tensor([[*prompts.ids[row], *answer]])
    pixels = batch.inputs.pixels[image]
    patch = points.preprocessing.patch
    grid = torch.tensor([[1, pixels.shape[1] // patch, pixels.shape[2] // patch]])
    return dict(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=patches(pixels, points.preprocessing),
        image_grid_thw=grid,
        mm_token_type_ids=(ids == points.image_token).int(),
    )


def full_forward(points, batch, prompts, ids, valid) -> list[torch.Tensor]:
    """Log-probs of each row's answer by transformers' own forward, image and all."""
    found = []
    for row in range(len(ids)):
        answer = ids[row, valid[row]]
        inputs = of_transformers(points, batch, prompts, row, answer.tolist())
        logits = points.model.vlm(**inputs).logits[0, len(prompts.ids[row]) - 1 : -1].float()
        found.append(torch.log_softmax(logits, -1).gather(1, answer[:, None])[:, 0])
    return found


def gradients(points, value) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(value, list(points.trainable.values()))
    return dict(zip(points.trainable, found))


# What it computes


@both_ways
def test_scores_as_transformers_full_forward(points, batch, images, way):
    """Log-probs to 1e-5, and the gradient of every LoRA weight."""
    prompts = prompts_of(points, images).repeat(G)
    ids, valid = answers(len(prompts))
    expected = torch.cat(full_forward(points, batch, prompts, ids, valid))
    with way(points.engine):
        found = points.score_answers(images, prompts, ids, valid).logp
    torch.testing.assert_close(found[valid], expected, atol=1e-5, rtol=0)
    slope = torch.linspace(-1, 1, len(expected))
    right, mine = (gradients(points, x @ slope) for x in (expected, found[valid]))
    for name, gradient in right.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient"
        assert (mine[name] - gradient).norm() < 1e-4 * gradient.norm(), name


@both_ways
def test_answers_greedily_as_transformers_generates(points, batch, images, way):
    prompts = prompts_of(points, images)
    how = dict(max_new_tokens=T, do_sample=False, pad_token_id=points.pad_id)
    expected = []
    for row in range(3):
        out = points.model.vlm.generate(**of_transformers(points, batch, prompts, row), **how)
        expected.append(out[0, len(prompts.ids[row]) :].tolist())
    with way(points.engine):
        done, texts = points.complete(images, prompts, 1, T)
    rows = zip(done.ids, done.valid)
    assert [ids[valid].tolist() for ids, valid in rows] == expected
    assert texts == [points.completion_text(ids) for ids in expected]


@both_ways
def test_what_is_sampled_is_what_is_scored(points, batch, images, way):
    prompts = prompts_of(points, images)
    uniforms = torch.rand(6, T, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with way(points.engine):
        rollout = points.sample(batch, images, prompts, G, T, uniforms)
        logp = reference_scores(points, type("Task", (), dict(action=None)), rollout, 4).logp
    assert (
        len(rollout) == 6
        and len(set(rollout.texts)) > 3
        and rollout.prompts.image_index[:3] == [0] * 2 + [1]
    )
    torch.testing.assert_close(logp.detach(), rollout.logp, atol=1e-4, rtol=0)


def test_an_answer_ends_with_the_turn(points):
    ids = [*points.encode_text("{}"), *points.encode_text("<|im_end|>")]
    state = torch.zeros(1, dtype=torch.long)
    ends = []
    for token in ids:
        state, end = points.stop.step(state, torch.tensor([token]))
        ends.append(end.item())
    assert ends == [False, False, True] and points.completion_text(ids) == "{}"


def test_the_image_is_seen(points, images):
    """Another image of the same size, the same answer: other log-probs."""
    other = Batches(samples([(60, 90)], seed=7), points.preprocessor(T))[[0]]
    prompts = prompts_of(points, images, [0])
    ids, valid = answers(1)
    with torch.no_grad():
        here, there = (
            points.score_answers(seen, prompts, ids, valid).logp
            for seen in (images, points.encode(other))
        )
    assert (here - there).abs().max() > 1e-2


# What trains


def test_lora_on_the_language_model_alone(points):
    names = list(points.trainable)
    layers = points.model.vlm.config.text_config.num_hidden_layers
    assert len(names) == 2 * 7 * layers
    assert all(name.startswith("vlm.model.language_model.layers.") for name in names)
    trains = {name for name, p in points.model.named_parameters() if p.requires_grad}
    assert trains == set(names) and {points.group_of[name] for name in names} == {"lora"}
    assert all(parameter.dtype == torch.float32 for parameter in points.trainable.values())


def test_every_lora_weight_moves_in_a_step(qwen, sam):
    """A, too, once B is no longer 0."""
    points = tiny_policy(qwen, sam, std=0.05)
    batch = Batches(samples([(60, 90), (84, 84)]), points.preprocessor(T))[[0, 1]]
    images = points.encode(batch)
    prompts = prompts_of(points, images, [0, 1])
    before = {name: p.detach().clone() for name, p in points.trainable.items()}
    optimizer = torch.optim.AdamW(points.trainable.values(), lr=1e-3)
    points.score_answers(images, prompts, *answers(2)).logp.sum().backward()
    optimizer.step()
    for name, parameter in points.trainable.items():
        moved = (parameter != before[name]).float().mean().item()
        assert moved == 1, f"{moved:.3f} of {name}"


def test_recomputed_layers_have_the_same_gradient(qwen, sam):
    found = []
    for recomputed in (False, True):
        points = tiny_policy(qwen, sam, gradient_checkpointing=recomputed)
        batch = Batches(samples([(60, 90), (84, 84)]), points.preprocessor(T))[[0, 1]]
        images = points.encode(batch)
        logp = points.score_answers(images, prompts_of(points, images, [0, 1]), *answers(2)).logp
        found.append(gradients(points, logp.sum()))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5)


def test_the_adapter_is_one_of_the_native_class(points, batch, images, qwen, version, tmp_path):
    points.peft.save_pretrained(tmp_path)
    native = VERSIONS[version].model_class.from_pretrained(qwen, dtype=torch.float32)
    native = PeftModel.from_pretrained(native, tmp_path).eval()
    prompts = prompts_of(points, images, [0])
    ids, valid = answers(1)
    inputs = of_transformers(points, batch, prompts, 0, ids[0].tolist())
    with torch.no_grad():
        logits = native(**inputs).logits[0, len(prompts.ids[0]) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, ids[0][:, None])[:, 0]
        found = points.score_answers(images, prompts, ids, valid).logp[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_half_precision_is_of_what_is_large(qwen, sam):
    """LoRA and SAM2's decoder stay float32; both ways compute."""
    points = tiny_policy(qwen, sam, dtype="bfloat16")
    kinds = {n.split(".")[1]: p.dtype for n, p in points.model.named_parameters()}
    assert kinds["vision_encoder"] == torch.bfloat16 and kinds["mask_decoder"] == torch.float32
    assert points.model.vlm.lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for p in points.trainable.values()} == {torch.float32}
    batch = Batches(samples([(60, 90)]), points.preprocessor(T))[[0]]
    images = points.encode(batch)
    assert {f.dtype for f in images.sam} == {torch.float32}
    assert images.vision[0].dtype == torch.bfloat16
    done, _ = points.complete(images, prompts_of(points, images, [0]), 1, T)
    logp = points.score_answers(images, prompts_of(points, images, [0]), done.ids, done.valid).logp
    torch.testing.assert_close(logp, done.logp, atol=0.05, rtol=0)
