"""Supervised training: its loss against the encoding rule by hand, and through the entry point."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_train import cli, sft
from rl_train.config.grpo_config import PolicyConfig
from rl_train.config.sft_config import SFT_CONFIG_CLASSES
from rl_train.data.loader import Batches
from rl_train.points.parser import AnswerFormat, PointPrompt
from rl_train.policies.registry import build_policy
from rl_train.rewards.points import deepest_points
from rl_train.rollout import Batch
from rl_train.run.error_report import remedy
from rl_train.tasks.base import TaskContext
from rl_train.tasks.sft_tasks import PointAnswers, true_answer
from sa2va_hf.losses import mask_loss
from sa2va_hf.processing_sa2va import normalise_tiles
from sa2va_hf.prompts import (
    DESCRIBE,
    GROUNDED_CAPTION,
    NO_TARGET_ANSWER,
    SEGMENT_ANSWERS,
    SEGMENT_WORDINGS,
)
from sa2va_hf.templates import template_map, video_lisa_encode_fn
from tests.data.image_file_sets import write_gcg
from tests.data.parquet_rows import visionreasoner_solution
from tests.policies.tiny_points import write_qwen, write_sam
from tests.runs import curve, events, on_one_core
from tests.supervised import ALL, built, line, losses, run
from tools.demo.refcoco_writer import drawn_scenes, write_refcoco

one_core = pytest.fixture(autouse=True)(on_one_core)


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
        grid = batch.inputs.prompt_masks[k]
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
            pixels = normalise_tiles(batch.inputs.tiles[k])
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


def test_several_turns_are_those_of_the_encoding_rule(data, tmp_path):
    """Three questions about an image: only answers are learnt, and each has its region's mask."""
    made = built(data, tmp_path, tasks="referring_segmentation", turns=3, seed=3)
    index = [0, 7]
    loss, statistics, batch, [examples] = losses(made, index, turns=3)
    policy, model, dataset = made.state.policy, made.state.policy.model, made.data.train_set
    assert examples.num_turns == [3, 3]
    text, count, masks = 0, 0, []
    for k, i in enumerate(index):
        rng = np.random.default_rng([3, 0, 0, i])
        asked = [batch.captions[k], *batch.companion_captions[k]]
        targets = [batch.masks[k], *batch.companion_masks[k]]
        of_image = np.flatnonzero(dataset.image_keys == dataset.image_keys[i])
        known = {dataset.caption(j): dataset.mask(j, targets[0].shape) for j in of_image}
        assert all((known[c] == m.numpy()).all() for c, m in zip(asked, targets, strict=True))
        turns = []
        for caption in asked:
            wording = SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))]
            question = wording.replace("{x}", caption.lower().removesuffix("."))
            if not turns:  # the image stands in front of the first
                question = policy.prompts.question(question, 1)
            answer = SEGMENT_ANSWERS[rng.integers(len(SEGMENT_ANSWERS))]
            turns.append({"input": question, "output": answer})
        encoded = template_map({"conversation": turns}, policy.prompts.template)
        encoded = video_lisa_encode_fn(encoded, policy.tokenizer, max_length=8192)
        ids, labels = (torch.tensor([encoded[key]]) for key in ("input_ids", "labels"))
        out = model(ids, torch.ones_like(ids), normalise_tiles(batch.inputs.tiles[k]))
        text += F.cross_entropy(out.logits[0, :-1], labels[0, 1:], reduction="sum")
        count += int((labels >= 0).sum())
        prompts = model.text_hidden_fcs(out.hidden_states[-1][ids == model.seg_id])
        pixels = batch.inputs.sam_pixels[[k] * 3]
        masks.append(mask_loss(model.mask_logits(pixels, prompts), targets))
    mask = torch.cat(masks).mean()
    torch.testing.assert_close(statistics["masks"]["mask_loss"], mask, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, text / count + mask, atol=2e-5, rtol=1e-5)


def test_turns_have_the_room_that_there_is(data, tmp_path):
    """Images of one region have one turn; the context ends a conversation; masks have a limit."""
    made = built(data, tmp_path, tasks="referring_segmentation", turns=8)
    policy = made.state.policy
    _, _, _, [whole] = losses(made, [0], turns=8)
    assert whole.num_turns[0] == len(whole.batch.companion_captions[0]) + 1 > 3
    context = policy.model.config.llm
    context.max_position_embeddings = len(whole.prompts.ids[0]) + int(whole.valid.sum()) - 1
    _, _, _, [cut] = losses(made, [0], turns=8)
    assert cut.num_turns[0] == whole.num_turns[0] - 1
    assert torch.equal(cut.ids[0], whole.ids[0, : cut.ids.shape[1]])
    with pytest.raises(ValueError, match="--turns 9: of an example at most 8 masks are decoded"):
        built(data, tmp_path, turns=9)


def test_a_run_of_several_turns(data, tmp_path):
    """Two tasks, of which one has several turns, in a worker of the loader."""
    out = run(data, tmp_path / "run", turns=5, num_workers=1, max_steps=2)
    assert len(curve(out, "masks/mask_loss")) == 2 == len(curve(out, "captions/loss"))


def test_boxes_and_points_of_a_published_set_are_taught():
    """Samples without masks: the answer is the data set's own solution, in the model's frame."""
    task = PointAnswers(
        PointAnswers.Options(answer_style="visionreasoner", negative_points="off", thought="so"),
        TaskContext(Speller(), None, 300),
    )
    empty = torch.zeros(60, 90, dtype=torch.bool)
    batch = Batch([0], [empty], ["a cup"], ["i"], [], None, solutions=[visionreasoner_solution()])
    features = SimpleNamespace(sizes=[(60, 90)], seen_sizes=[(420, 420)])
    _, [answer] = task.examples(batch, features, [])
    assert answer == (
        '<think>so</think><answer>[{"bbox_2d": [50, 100, 250, 300], "point_2d": [150, 200]}, '
        '{"bbox_2d": [300, 300, 400, 400], "point_2d": [350, 350]}]</answer><|im_end|>'
    )
    task.format = AnswerFormat("segzero")
    with pytest.raises(ValueError, match="--answer_style segzero: cannot say the solution of i, 2"):
        task.examples(batch, features, [])


class Speller:
    """A policy whose tokens are letters."""

    device, coordinates = torch.device("cpu"), "pixels"

    def encode_text(self, text):
        return text

    def point_questions(self, features, image, questions):
        return questions


def test_a_phrase_that_names_nothing_is_answered_without_seg(tmp_path):
    """Its text is learnt and no mask; with such phrases alone there is no mask term."""
    write_refcoco(drawn_scenes("grefcoco", 3, 4, 1), tmp_path / "data", "grefcoco")
    how = dict(dataset="grefcoco", tasks="referring_segmentation", max_completion_length=80)
    how |= dict(data_dir=tmp_path / "data", eval_data_dir=tmp_path / "data")
    made = built(tmp_path, tmp_path / "run", **how)
    dataset, policy = made.data.train_set, made.state.policy
    none = [i for i in range(len(dataset)) if not dataset[i]["mask"].any()]
    some = [i for i in range(len(dataset)) if dataset[i]["mask"].any()]
    _, statistics, _, [mixed] = losses(made, [none[0], some[0], none[0]])
    texts = [policy.prompts.completion_text(ids.tolist()) for ids in mixed.ids]
    assert texts[0] == texts[2] == NO_TARGET_ANSWER and "[SEG]" in texts[1]
    _, alone, _, _ = losses(made, [some[0]])
    mask_loss, of_one = (float(s["masks"]["mask_loss"]) for s in (statistics, alone))
    assert mask_loss == pytest.approx(of_one / 3, rel=1e-4)  # of three examples one has a mask
    loss, statistics, _, _ = losses(made, [none[0]])
    loss.backward()
    assert statistics["masks"]["mask_loss"] == 0 and loss > 0


def test_grounded_captions_are_taught_with_a_mask_for_each_phrase(tmp_path):
    """The m-th [SEG] learns the m-th phrase's mask, and an answer's masks count as one."""
    write_gcg(tmp_path / "data")
    how = dict(dataset="gcg", data_dir=tmp_path / "data", eval_data_dir=tmp_path / "data")
    how |= dict(tasks="grounded_captions", max_bad_fraction=1, train_eval_overlap="keep")
    made = built(tmp_path, tmp_path / "run", max_completion_length=80, **how)
    loss, statistics, batch, [examples] = losses(made, [0, 1])
    policy = made.state.policy
    texts = [policy.prompts.completion_text(ids.tolist()) for ids in examples.ids]
    answers = ["the red <p> cup </p> [SEG]", "<p> a d </p> [SEG]og on <p> the </p> [SEG] right"]
    assert texts == answers
    assert all(GROUNDED_CAPTION in policy.tokenizer.decode(ids) for ids in examples.prompts.ids)
    scores = policy.score_answers(examples.features, examples.prompts, examples.ids, examples.valid)
    prompts = policy.scored_mask_embeddings(scores, examples.ids, examples.valid)
    logits = policy.decode_masks(examples.features, [0, 1, 1], prompts)
    one, left, right = mask_loss(logits, [*batch.objects[0], *batch.objects[1]])
    expected = (one + (left + right) / 2) / 2
    torch.testing.assert_close(statistics["gcg"]["mask_loss"], expected.detach())
    loss.backward()
    groups = {policy.group_of[n] for n, p in policy.trainable.items() if p.grad is not None}
    assert groups == {"lora", "mlp1", "text_hidden_fcs", "sam2"}
    short = examples.ids[:, :4], examples.valid[:, :4]  # without any [SEG]
    examples.ids, examples.valid = short
    scores = policy.score_answers(examples.features, examples.prompts, *short)
    terms, measured = made.state.tasks[0].loss_terms(examples, examples.features, scores, 2.0)
    assert terms == [] and measured["mask_loss"] == 0


def test_grounded_captions_need_phrases(data, tmp_path):
    made = built(data, tmp_path / "run", tasks="grounded_captions")
    with pytest.raises(ValueError, match="--tasks grounded_captions: .* give --dataset gcg"):
        losses(made, [0, 1])


@pytest.mark.parametrize("chosen", [[], ALL, ["lora", "embeddings"]])
def test_all_that_trains_gets_a_gradient(data, tmp_path, chosen):
    """Both tasks give it; but for keys' biases, which a softmax does not see."""
    made = built(data, tmp_path, trainable_modules=chosen or None)
    loss, *_ = losses(made, [0, 7, 30])
    loss.backward()
    policy = made.state.policy
    wanted = chosen or ["lora", "mlp1", "text_hidden_fcs", "sam2"]
    assert {policy.group_of[name] for name in policy.trainable} == set(wanted)
    still = [n for n, p in policy.trainable.items() if p.grad is None or not p.grad.any()]
    # B of a fresh LoRA is 0, and one of three masks is each sample's best
    excused = ("lora_A", "k_proj.bias", "hypernetworks_mlps", "key.bias")
    assert not [name for name in still if not any(part in name for part in excused)], still


def test_examples_follow_from_seed_step_and_sample(data, tmp_path):
    """The batch that a sample is in changes nothing; other seeds and steps change wordings."""
    made = built(data, tmp_path)

    def asked(index, step=0):
        made.state.step = step
        (_, masks) = losses(made, index)[-1]
        return dict(zip(index, map(tuple, masks.prompts.ids)))

    together, apart = asked([0, 7, 30]), asked([30, 7])
    assert {i: together[i] for i in apart} == apart
    assert asked([0, 7, 30], step=1) != together


@pytest.mark.parametrize("chosen, second", [(["vision"], [True, True]), (["lora"], [])])
def test_the_activations_of_one_batch_are_held(data, tmp_path, chosen, second):
    """An encoder that trains computes again in the update, with gradient; a frozen one never."""
    made = built(
        data, tmp_path, trainable_modules=chosen, gradient_accumulation_steps=2, max_steps=1
    )
    gradient = []
    made.state.policy.model.vision_model.register_forward_pre_hook(
        lambda *_: gradient.append(torch.is_grad_enabled())
    )
    batches = [
        Batches(made.data.train_set, made.state.policy.preprocessor(24))[[i]] for i in (0, 7)
    ]
    sft.train(made, batches, lambda *_: None)
    assert gradient == [False, False, *second]


def test_it_learns_what_it_is_shown(data, tmp_path):
    """The demo knows one answer of five; the others become likelier."""
    out = run(data, tmp_path, max_steps=14, batch_size=4, learning_rate=3e-3)
    values = list(curve(out, "masks/text_loss").values())
    assert np.mean(values[-4:]) < 0.8 * np.mean(values[:4])
    assert not (out / "rollouts").exists()  # no answer was sampled


def test_points_are_taught_in_the_form_that_is_asked_for(data, tmp_path):
    """A tiny Qwen2.5-VL that knew no JSON says the answers' form after some steps."""
    out = run(
        data,
        tmp_path / "run",
        model_path=write_qwen(tmp_path / "qwen"),
        sam_path=write_sam(tmp_path / "sam"),
        tasks="point_answers",
        answer_style="points",
        image_size=56,
        max_completion_length=64,
        max_steps=12,
        learning_rate=3e-3,
    )
    values = list(curve(out, "points/text_loss").values())
    assert np.mean(values[-3:]) < 0.9 * values[0]
    assert "eval/parsable" in events(out).Tags()["scalars"]
    assert (out / "final_model" / "model.safetensors").is_file()


def test_true_answers_by_hand():
    """Two blocks, the left one deeper; what is confused counts from a twentieth of the target."""
    target, confused = torch.zeros(2, 12, 20).bool()
    target[1:8, 1:8] = target[2:5, 11:14] = True  # centres (4, 4) and (12, 3)
    assert deepest_points(target) == ((4.0, 4.0), (12.0, 3.0))
    confused[9:11, 15:18] = True  # 6 of 58
    segzero = true_answer(AnswerFormat("segzero", "optional"), target, confused)
    assert segzero == PointPrompt(
        ((1.0, 1.0, 14.0, 8.0),), ((4.0, 4.0), (12.0, 3.0)), segzero.negative
    )
    ((x, y),) = segzero.negative
    assert confused[int(y), int(x)]
    confused[9:11, 16:] = False
    assert true_answer(AnswerFormat("visionreasoner"), target, confused) == PointPrompt(
        ((1.0, 1.0, 14.0, 8.0),), ((4.0, 4.0),)
    )
    assert true_answer(AnswerFormat("points"), target, confused).boxes == ()


@pytest.mark.parametrize("frame", ["pixels", "unit", "thousand"])
def test_what_is_stated_is_read_again(frame):
    form = AnswerFormat("segzero", "optional", frame)
    answer = PointPrompt(
        ((10.0, 20.0, 300.0, 200.0),), ((50.0, 60.0), (90.0, 150.0)), ((310.0, 20.0),)
    )
    text = form.format(form.in_frame(answer, (840, 840), (240, 320)), "so")
    read = form.parse_in_pixels(text, (840, 840), (240, 320)).prompt
    for kind in ("boxes", "positive", "negative"):
        for a, b in zip(getattr(read, kind), getattr(answer, kind), strict=True):
            assert a == pytest.approx(b, abs=0.4)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (dict(trainable_modules="eyes"), "--trainable_modules eyes: unknown; known: lora, mlp1"),
        (
            dict(trainable_modules=["lora", "language_model"]),
            "--trainable_modules lora language_model: one of them",
        ),
        (
            dict(trainable_modules=["sam2_encoder", "lora"], tasks="region_captions"),
            "--trainable_modules sam2_encoder: no l",
        ),
        (dict(max_completion_length=11), r"--max_completion_length 11: cuts .* of up to 12 tokens"),
    ],
)
def test_flags_that_make_no_run(data, tmp_path, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        built(data, tmp_path, **changes)


def test_what_cannot_train_is_refused(tmp_path):
    """Groups of a Qwen2.5-VL beside its LoRA."""
    for folder, model_type in (("qwen", "qwen2_5_vl"), ("sam", "sam2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(dict(model_type=model_type)))
    config = PolicyConfig(model_path=str(tmp_path / "qwen"), sam_path=str(tmp_path / "sam"))
    with pytest.raises(ValueError, match="--trainable_modules embeddings: unknown; known: lora"):
        build_policy(config, {}, ["embeddings"], 24, "cpu")


def test_frozen_encoders_have_no_gradient(data, tmp_path):
    """Or, of a base that is shared out, one rank could not encode while another samples."""
    made = built(data, tmp_path)
    asked = []
    made.state.policy.model.vision_model.register_forward_pre_hook(
        lambda *_: asked.append(torch.is_grad_enabled())
    )
    made.state.policy.encode(Batches(made.data.train_set, made.state.policy.preprocessor(24))[[0]])
    assert asked == [False]


def test_what_to_lower_is_a_flag_of_it(data, tmp_path):
    config = cli.parse(line(data, tmp_path), sft.SFT)
    found = {phase: remedy(phase, config) for phase in ("rollout", "update")}
    assert found["rollout"].startswith("lower --batch_size or --max_completion_length (and raise")
    assert found["update"].startswith("lower --batch_size or --max_comp")


def test_its_flags_are_those_of_supervised_training():
    names = set()
    for kind in SFT_CONFIG_CLASSES.values():
        names |= set(kind.__dataclass_fields__)
    assert {"trainable_modules", "learning_rate", "lora_r"} <= names
    assert not {"num_generations", "kl_coef", "ema_decay", "ablation_reward"} & names
    known = "known: region_captions, referring_segmentation, grounded_captions, point_answers"
    with pytest.raises(SystemExit, match=known):
        cli.parse(["--tasks", "mask_caption_mask"], sft.SFT)
