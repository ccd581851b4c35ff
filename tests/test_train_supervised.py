"""Supervised training: its loss against the encoding rule by hand, and through the entry point."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_train import cli, memory, parts, train
from rl_train.config import PolicyConfig
from rl_train.data.loader import Batches, StepSampler, side_by_side
from rl_train.distributed import Ranks
from rl_train.engine import Engine
from rl_train.files import read_json
from rl_train.points.answers import Answer, Form
from rl_train.policies import qwen_worst_case, worst_case
from rl_train.policies.families import build_policy
from rl_train.rewards.points import deepest_points
from rl_train.stand_ins import LongestExamples
from rl_train.supervised_config import SUPERVISED_PARTS
from rl_train.tasks.supervised import ReferringSegmentation, RegionCaptions, true_answer
from rl_train.trained_policy import load_policy, open_policy
from sa2va_hf.losses import mask_loss
from sa2va_hf.prompts import DESCRIBE, SEGMENT_ANSWERS, SEGMENT_WORDINGS
from sa2va_hf.templates import template_map, video_lisa_encode_fn
from tests.policies.tiny_points import write_qwen, write_sam
from tests.ranks import forked
from tests.runs import CHECKPOINT, curve, distance, events, flags, on_one_core, weights
from tools import train_supervised
from tools.demo_unsettle import Decided

one_core = pytest.fixture(autouse=True)(on_one_core)
ALL = "vision mlp1 embeddings language_model text_hidden_fcs sam2 sam2_encoder".split()


def line(data, output, **changes):
    """The command line of a short run."""
    absent = dict(num_generations=None, micro_batch_size=None, mask_sigma=None)
    return flags(data, output, **absent | dict(max_completion_length=24) | changes)


def run(data, output, **changes):
    train.main(line(data, output, **changes), train_supervised.PROGRAM, train_supervised.train)
    return output


def built(data, output, **changes):
    """The parts of a run that does not begin."""
    config = cli.parse(line(data, output, **changes), train_supervised.PROGRAM)
    return parts.build(config, Ranks(0, 1, torch.device("cpu")))


def losses(made, index):
    """(loss, statistics, batch, examples) of samples `index` in the first step."""
    batch = Batches(made.train_set, made.state.policy.inputs(24))[index]
    features = made.state.policy.encode(batch)
    examples = train_supervised.examples_of(made, batch, features)
    totals = train_supervised.step_totals([(features, examples)], 1)
    objective = train_supervised.SupervisedLoss(made.state.policy)
    return *objective(features, examples, totals, False), batch, examples


def test_the_loss_is_that_of_the_encoding_rule(data, tmp_path):
    """Cross-entropy of the labels and the masks' loss, by the model's own forward."""
    made = built(data, tmp_path, caption_weight=0.5, seed=3)
    index = [0, 7, 30]
    loss, statistics, batch, _ = losses(made, index)
    policy, model = made.state.policy, made.state.policy.model
    sums, counts, masks = {"captions": 0, "masks": 0}, {"captions": 0, "masks": 0}, []
    for k, i in enumerate(index):
        rng = np.random.default_rng([3, 0, 1, i])
        wording = SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))]
        answer = SEGMENT_ANSWERS[rng.integers(len(SEGMENT_ANSWERS))]
        said = batch.captions[k].lower().removesuffix(".")
        grid = batch.inputs.grids[k]
        asked = dict(
            captions=(DESCRIBE, [int(grid.sum())], batch.captions[k]),
            masks=(wording.replace("{x}", said), None, answer),
        )
        for name, (question, cells, output) in asked.items():
            turn = {"input": policy.prompts.question(question, 1, cells), "output": output}
            encoded = template_map({"conversation": [turn]}, policy.prompts.template)
            encoded = video_lisa_encode_fn(encoded, policy.tokenizer, max_length=8192)
            ids, labels = (torch.tensor([encoded[key]]) for key in ("input_ids", "labels"))
            region = dict(prompt_masks=[grid[None]], vp_overall_mask=torch.tensor([True]))
            pixels = batch.inputs.pixel_values[k]
            out = model(ids, torch.ones_like(ids), pixels, **region if cells else {})
            shifted = labels[0, 1:]
            sums[name] += F.cross_entropy(out.logits[0, :-1], shifted, reduction="sum")
            counts[name] += int((shifted >= 0).sum())
            if name == "masks":
                hidden = out.hidden_states[-1][ids == model.seg_id]
                prompts = model.text_hidden_fcs(hidden)
                logits = model.mask_logits(batch.inputs.sam_pixels[[k]], prompts)
                masks.append(mask_loss(logits, [batch.masks[k]]))
    text = {name: sums[name] / counts[name] for name in sums}
    mask = torch.cat(masks).mean()
    for name in text:
        torch.testing.assert_close(statistics[name]["text_loss"], text[name], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(statistics["masks"]["mask_loss"], mask, atol=1e-5, rtol=1e-5)
    expected = 0.5 * text["captions"] + text["masks"] + mask
    torch.testing.assert_close(loss, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("chosen", [[], ALL, ["lora", "embeddings"]])
def test_all_that_trains_gets_a_gradient(data, tmp_path, chosen):
    """From both tasks; but for keys' biases, which a softmax does not see."""
    made = built(data, tmp_path, train=chosen or None)
    loss, *_ = losses(made, [0, 7, 30])
    loss.backward()
    policy = made.state.policy
    wanted = chosen or ["lora", "mlp1", "text_hidden_fcs", "sam2"]
    assert {policy.group_of(name) for name in policy.trainable} == set(wanted)
    still = [n for n, p in policy.trainable.items() if p.grad is None or not p.grad.any()]
    # B of a fresh LoRA is 0, and one of three masks is each sample's best
    excused = ("lora_A", "k_proj.bias", "hypernetworks_mlps", "key.bias")
    assert not [name for name in still if not any(part in name for part in excused)], still


class TakesNothing(ReferringSegmentation):
    """A task of a user, which reads what only the user's data say."""

    asks_reference = True

    def examples(self, batch, features, rngs):
        raise ValueError(batch.image_ids[0])


def test_a_copy_is_kept_for_whom_asks_it(data, tmp_path):
    """Of the project's own tasks none; a user's class says so."""
    made = built(data, tmp_path)
    assert made.state.roles.banks == {}
    with pytest.raises(ValueError, match="classes say: asks_teacher, asks_reference"):
        with made.state.roles.use("reference"):
            pass
    copies = {
        asks: parts.kept_copies(SimpleNamespace(samples=samples, kinds=dict(task=kind)))
        for asks, samples, kind in (
            ("reinforcement", True, RegionCaptions),
            ("a user's", False, TakesNothing),
            ("the demo's", False, Decided),
            ("a teacher's", False, SimpleNamespace(asks_teacher=True)),
        )
    }
    assert copies == {
        "reinforcement": ("reference",),
        "a user's": ("reference",),
        "the demo's": ("reference",),
        "a teacher's": ("teacher", "reference"),
    }


def test_the_worst_step_is_tried_and_moves_nothing(data, tmp_path, monkeypatch):
    """Captions of all tokens, answers with [SEG] of all of theirs, the longest prompts."""
    monkeypatch.setattr(worst_case, "PIXELS", 64 * 64)
    how = dict(max_caption_length=60, gradient_accumulation_steps=3, other_regions="")
    made = built(data, tmp_path, **how, train=["lora", "text_hidden_fcs", "vision"])
    tried, held, policy = [], [], made.state.policy
    forward = train_supervised.SupervisedLoss.forward

    def trying(module, *args):
        tried.append(args)
        assert torch.rand(1) >= 0  # which are put back
        return forward(module, *args)

    monkeypatch.setattr(train_supervised.SupervisedLoss, "forward", trying)
    monkeypatch.setattr(memory, "held_bytes", lambda given: held.append(list(given)) or 0)
    before = {name: p.detach().clone() for name, p in policy.trainable.items()}
    generator = torch.get_rng_state()
    assert set(memory.worst_step(made, train_supervised.train)) == {"encode", "update"}
    assert torch.equal(torch.get_rng_state(), generator)
    for name, p in policy.trainable.items():
        assert torch.equal(p, before[name]) and p.grad is None
    assert made.state.step == 0 and not made.state.optimizer.state
    ((features, (captions, masks), totals, last),) = tried
    assert held[0][0][0] is features and held[0][0][1] == [captions, masks]  # other batches' too
    assert features.vision.requires_grad and all(grid.all() for grid in features.grids)
    assert captions.valid.shape == (2, 24) and captions.valid.all()
    answers = [len(policy.prompts.answer(answer)) for answer in SEGMENT_ANSWERS]
    assert masks.valid.shape == (2, max(answers)) and masks.valid.all()
    assert ((masks.ids == policy.model.seg_id).sum(1) == 1).all()
    shortest = len(policy.prompts.segment("", features.tiles[0], SEGMENT_WORDINGS[0]))
    assert min(map(len, masks.prompts.ids)) > shortest + 35  # of 60, with the wording's own
    assert len(masks.batch.others) == 2


def test_a_task_that_takes_no_made_up_sample_trains_all_the_same(
    data, tmp_path, monkeypatch, capsys
):
    """Its memory is not announced. All but a refusal is a fault, and so is one of our own task."""
    monkeypatch.setattr(worst_case, "PIXELS", 64 * 64)
    name = f"{TakesNothing.__module__}:TakesNothing"
    made = built(data, tmp_path, tasks=name, max_caption_length=60)
    assert list(made.state.roles.banks) == ["reference"]
    on_gpu = replace(made, ranks=Ranks(0, 1, torch.device("cuda", 0)))
    assert memory.announce(on_gpu, train_supervised.train) == ""
    said = f"is not known: --tasks {name} does not take made-up samples (worst)"
    assert said in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(TakesNothing, "__module__", "rl_train.tasks.supervised")
        with pytest.raises(RuntimeError, match="by a fault of the program"):
            memory.announce(on_gpu, train_supervised.train)
    monkeypatch.setattr(TakesNothing, "examples", lambda *_: {}["no refusal"])
    with pytest.raises(KeyError):
        memory.announce(on_gpu, train_supervised.train)


def test_longest_answers_by_hand():
    asked = SimpleNamespace(name="t", weight=1.0, examples=lambda *_: ("prompts", [[5, 6], [7]]))
    assert LongestExamples(asked, 4, 0).examples() == ("prompts", [[5, 6, 0, 0], [7, 0, 0, 0]])
    asked.longest_answer = 2
    assert LongestExamples(asked, 4, 0).examples() == ("prompts", [[5, 6], [7, 0]])


def test_examples_follow_from_seed_step_and_sample(data, tmp_path):
    """Not from the batch that a sample is in; other seeds and steps have other wordings."""
    made = built(data, tmp_path)

    def asked(index, step=0):
        made.state.step = step
        (_, masks) = losses(made, index)[-1]
        return dict(zip(index, map(tuple, masks.prompts.ids)))

    together, apart = asked([0, 7, 30]), asked([30, 7])
    assert {i: together[i] for i in apart} == apart
    assert asked([0, 7, 30], step=1) != together


def test_a_resumed_run_is_the_one_that_did_not_stop(data, tmp_path, monkeypatch):
    """Bit for bit, with its curves; the merged model says what the checkpoint says."""
    same = dict(max_steps=4, save_steps=2, batch_size=4, regions_per_image=2, train=ALL)
    whole = run(data, tmp_path / "whole", **same)
    asked = []
    monkeypatch.setattr(Engine, "forget", lambda engine: asked.append("evaluation"))
    for step in (2, 4):
        assert (whole / f"checkpoint_step_{step}").is_dir()
    again = run(data, tmp_path / "again", **same)
    for late in ("checkpoint_step_4", "final_model"):
        (again / late).rename(tmp_path / late)
    base = again / "evaluation" / "step_0.json"
    base.unlink()
    asked.clear()
    run(data, again, **same, resume="")
    assert asked == 2 * ["evaluation"]  # of the base and at the end: nothing is kept to sample with
    measured = [read_json(one / "evaluation" / "step_0.json") for one in (whole, again)]
    ious = [measured[run]["means"]["seg_iou"] for run in (0, 1)]
    assert ious[0] == ious[1] != curve(again, "eval/seg_iou")[4]  # of weights that nobody kept
    a, b = weights(whole, 4), weights(again, 4)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not (whole / "checkpoint_step_4" / "adapter").exists()  # nor a LoRA
    assert "LoRA is merged" not in (whole / "final_model" / "README.md").read_text()
    for tag in ("captions/text_loss", "masks/text_loss", "masks/mask_loss", "masks/mask_iou"):
        assert set(curve(whole, tag)) == {1, 2, 3, 4}
    assert set(curve(whole, "eval/seg_iou")) == {0, 4}
    policy = load_policy(whole / "checkpoint_step_4", "policy", None, "cpu", dtype="float32")
    merged = open_policy(whole / "final_model", None, "policy", "cpu", dtype="float32").model
    own = policy.model.state_dict()
    for name, weight in merged.state_dict().items():  # in the base's bfloat16
        if "lora_" not in name:
            name = name.replace(".base_layer", "")
            torch.testing.assert_close(weight, own[name].bfloat16().float())


def test_two_processes_train_as_one(data, tmp_path):
    """All weights, those of the encoders too; of several batches each is encoded for its own."""
    same = dict(max_steps=3, learning_rate=1e-5, eval_samples=2, seed=1, train=ALL)
    halves = dict(batch_size=1, gradient_accumulation_steps=2)
    job = lambda: run(data, tmp_path / "two", **halves, **same)  # noqa: E731
    ended = forked(tmp_path, job, job)
    assert [status for status, _ in ended] == [0, 0], ended
    one = run(data, tmp_path / "one", batch_size=4, **same)
    assert distance(weights(tmp_path / "two", 3), weights(one, 3)) < 1e-5
    for tag in ("captions/text_loss", "masks/mask_loss", "masks/mask_iou"):
        of_two, of_one = curve(tmp_path / "two", tag), curve(one, tag)
        assert of_two == pytest.approx(of_one, abs=1e-4)


@pytest.mark.parametrize("chosen, second", [(["vision"], [True, True]), (["lora"], [])])
def test_the_activations_of_one_batch_are_held(data, tmp_path, monkeypatch, chosen, second):
    """An encoder that trains computes again in the update, with gradient; a frozen one never."""
    made = built(data, tmp_path, train=chosen, gradient_accumulation_steps=2, max_steps=1)
    gradient = []
    made.state.policy.model.vision_model.register_forward_pre_hook(
        lambda *_: gradient.append(torch.is_grad_enabled())
    )
    batches = [Batches(made.train_set, made.state.policy.inputs(24))[[i]] for i in (0, 7)]
    train_supervised.train(made, batches, lambda *_: None)
    assert gradient == [False, False, *second]


def test_it_learns_what_it_is_shown(data, tmp_path):
    """The demo knows one answer of five; the others become likelier."""
    out = run(data, tmp_path, max_steps=14, batch_size=4, learning_rate=3e-3)
    values = list(curve(out, "masks/text_loss").values())
    assert np.mean(values[-4:]) < 0.8 * np.mean(values[:4])


def test_points_are_taught_in_the_form_that_is_asked_for(data, tmp_path):
    """A tiny Qwen2.5-VL that knew no JSON says the answers' form after some steps."""
    out = run(
        data,
        tmp_path / "run",
        model_path=write_qwen(tmp_path / "qwen"),
        sam_path=write_sam(tmp_path / "sam"),
        tasks="point_answers",
        answer_style="points",
        image_side=56,
        max_completion_length=64,
        max_steps=12,
        learning_rate=3e-3,
    )
    values = list(curve(out, "points/text_loss").values())
    assert np.mean(values[-3:]) < 0.9 * values[0]
    assert "eval/parsable" in events(out).Tags()["scalars"]
    assert (out / "final_model" / "model.safetensors").is_file()


def test_the_worst_step_of_points(data, tmp_path, monkeypatch):
    monkeypatch.setattr(qwen_worst_case, "MASK_PIXELS", 64 * 64)
    folders = dict(model_path=write_qwen(tmp_path / "qwen"), sam_path=write_sam(tmp_path / "sam"))
    how = dict(tasks="point_answers", answer_style="points", image_side=56)
    made = built(data, tmp_path, **folders, **how, max_completion_length=64)
    assert made.state.roles.banks == {}
    assert set(memory.worst_step(made, train_supervised.train)) == {"encode", "update"}


def test_true_answers_by_hand():
    """Two blocks, the left one deeper; what is confused counts from a twentieth of the target."""
    target, confused = torch.zeros(2, 12, 20).bool()
    target[1:8, 1:8] = target[2:5, 11:14] = True  # centres (4, 4) and (12, 3)
    assert deepest_points(target) == ((4.0, 4.0), (12.0, 3.0))
    confused[9:11, 15:18] = True  # 6 of 58
    segzero = true_answer(Form("segzero", "optional"), target, confused)
    assert segzero == Answer(((1.0, 1.0, 14.0, 8.0),), ((4.0, 4.0), (12.0, 3.0)), segzero.negative)
    ((x, y),) = segzero.negative
    assert confused[int(y), int(x)]
    confused[9:11, 16:] = False
    assert true_answer(Form("visionreasoner"), target, confused) == Answer(
        ((1.0, 1.0, 14.0, 8.0),), ((4.0, 4.0),)
    )
    assert true_answer(Form("points"), target, confused).boxes == ()


@pytest.mark.parametrize("frame", ["pixels", "unit", "thousand"])
def test_what_is_stated_is_read_again(frame):
    form = Form("segzero", "optional", frame)
    answer = Answer(((10.0, 20.0, 300.0, 200.0),), ((50.0, 60.0), (90.0, 150.0)), ((310.0, 20.0),))
    text = form.format(form.stated(answer, (840, 840), (240, 320)), "so")
    read, reason = form.read(text, (840, 840), (240, 320))
    assert reason == ""
    for kind in ("boxes", "positive", "negative"):
        for a, b in zip(getattr(read, kind), getattr(answer, kind), strict=True):
            assert a == pytest.approx(b, abs=0.4)


def test_regions_of_an_image_stand_together_and_all_once():
    keys = np.array([5, 5, 5, 1, 1, 2, 2, 2, 2, 9])
    order = side_by_side(np.arange(10), 2, keys, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(10))
    pairs = [tuple(keys[order[i : i + 2]]) for i in range(0, 10, 2)]
    assert sorted(pairs) == [(1, 1), (2, 2), (2, 2), (5, 5), (5, 9)]
    sampler = StepSampler(10, 4, 1, seed=0, together=(2, keys))
    first, second = (indices for indices, _ in zip(sampler, range(2)))
    assert len({*first, *second}) == 8


def test_features_of_regions_of_one_image_are_made_once(data, tmp_path, monkeypatch):
    made = built(data, tmp_path, batch_size=4, regions_per_image=2)
    policy = made.state.policy
    keys = made.sampler.together[1]
    index = [*np.flatnonzero(keys == keys[0])[:2], *np.flatnonzero(keys == keys[-1])[:2]]
    index, inputs = [int(i) for i in index], policy.inputs(24)
    encoded, features_of = [], policy.model.sam_features
    monkeypatch.setattr(
        policy.model, "sam_features", lambda x: encoded.append(len(x)) or features_of(x)
    )
    apart = policy.encode(Batches(made.train_set, inputs)[index])
    together = policy.encode(Batches(made.train_set, inputs, regions_per_image=2)[index])
    assert encoded == [4, 2]
    torch.testing.assert_close(together.vision, apart.vision)
    for a, b in zip(together.sam, apart.sam, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (dict(train="eyes"), "--train eyes: unknown; known: lora, mlp1"),
        (dict(train=["lora", "language_model"]), "--train lora language_model: one of them"),
        (
            dict(train=["sam2_encoder", "lora"], tasks="region_captions"),
            "--train sam2_encoder: no l",
        ),
        (dict(max_completion_length=11), r"--max_completion_length 11: cuts .* of up to 12 tokens"),
        (dict(regions_per_image=3), "--regions_per_image 3: does not divide --batch_size 2"),
    ],
)
def test_flags_that_make_no_run(data, tmp_path, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        built(data, tmp_path, **changes)


def test_what_cannot_train_is_refused(tmp_path):
    """All weights of a base that ranks share out, or of a Qwen2.5-VL."""
    shared = PolicyConfig(model_path=str(CHECKPOINT))
    with pytest.raises(ValueError, match="--shard_base: not with --train vision, of which"):
        build_policy(shared, {}, ["mlp1", "vision"], 24, "cpu", shards=object())
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(ValueError, match="--train embeddings: of --model_path .* only lora trains"):
        build_policy(PolicyConfig(model_path=str(tmp_path)), {}, ["embeddings"], 24, "cpu")


def test_frozen_encoders_have_no_gradient(data, tmp_path):
    """Or, of a base that is shared out, one rank could not encode while another samples."""
    made = built(data, tmp_path)
    asked = []
    made.state.policy.model.vision_model.register_forward_pre_hook(
        lambda *_: asked.append(torch.is_grad_enabled())
    )
    made.state.policy.encode(Batches(made.train_set, made.state.policy.inputs(24))[[0]])
    assert asked == [False]


def test_what_to_lower_is_a_flag_of_it(data, tmp_path):
    config = cli.parse(line(data, tmp_path), train_supervised.PROGRAM)
    found = {phase: memory.remedy(phase, config) for phase in ("rollout", "update")}
    assert found["rollout"].startswith("lower --batch_size or --max_completion_length (and raise")
    assert found["update"].startswith("lower --batch_size or --max_masks_per_answer or --max_comp")


@pytest.mark.parametrize(
    "changes, advice",
    [
        ({}, "share it out by --shard_base"),
        (dict(train=["vision", "mlp1"]), "--train less than vision, of which no part"),
        (dict(shard_base=""), "start more processes"),
        (dict(tasks="point_answers"), "it needs a GPU with more"),
    ],
)
def test_what_is_advised_of_a_model_that_does_not_fit_can_be_done(data, tmp_path, changes, advice):
    config = cli.parse(line(data, tmp_path, **changes), train_supervised.PROGRAM)
    assert memory.remedy("start", config).startswith(f"the model itself does not fit: {advice}")


def test_its_flags_are_those_of_supervised_training(capsys):
    names = set()
    for kind in SUPERVISED_PARTS.values():
        names |= set(kind.__dataclass_fields__)
    assert {"train", "regions_per_image", "learning_rate", "lora_r"} <= names
    assert not {"num_generations", "kl_coef", "ema_half_life", "control"} & names
    with pytest.raises(SystemExit):
        cli.parse(["--tasks", "mask_caption_mask"], train_supervised.PROGRAM)
    assert (
        "known: region_captions, referring_segmentation, point_answers" in capsys.readouterr().err
    )
