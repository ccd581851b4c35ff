"""The demo's warm start: what it is wrong about, and its prompt head, trained to a stated share."""

import json
import shutil
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from rl_train import cli, sft
from rl_train.config.grpo_config import PolicyConfig
from rl_train.data import GraspAnyRegionDataset
from rl_train.data.loader import Batches
from rl_train.policies.sa2va import build_policy
from rl_train.policies.sa2va_queries import segment
from rl_train.rewards import mask_iou
from rl_train.rewards.iou import on_target
from rl_train.roles import Roles
from rl_train.tasks.base import TaskContext
from rl_train.tasks.sft_tasks import Examples
from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.prompts import DESCRIBE, SEGMENT_WORDINGS
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo import make_demo, unsettle
from tools.demo.hints import (
    Codes,
    HintedCaptions,
    HintedMasks,
    balanced_mask_losses,
    choices,
    region_means,
)
from tools.demo.make_demo import SHIPPED_CHECKPOINT, main
from tools.demo.mistakes import MISTAKES, MistakenCaptions, mistaken
from tools.demo.model import CONFIG, make_tokenizer
from tools.demo.new_folder import save
from tools.demo.report import told_apart
from tools.demo.scenes import ATTRIBUTES, TRAIN, Object, Scene, caption, make_scene


def policy_of(*groups):
    how = dict(lora_r=1, dtype="float32", gradient_checkpointing=False)
    config = PolicyConfig(model_path=str(SHIPPED_CHECKPOINT), **how)
    return build_policy(config, groups, 24, torch.device("cpu"))


def batch_of(policy, data, number):
    """Every fourth region of the training set."""
    dataset = GraspAnyRegionDataset(data / "train")
    return Batches(dataset, policy.preprocessor(24), distractors=True)[
        list(range(0, 4 * number, 4))
    ]


def test_a_demo_interrupted_while_scenes_are_drawn_is_drawn_anew(tmp_path, monkeypatch, capsys):
    """Long work is announced before it begins."""
    words = ["--output_dir", str(tmp_path), "--train_scenes", "3", "--heldout_scenes", "1"]

    def interrupted(*args, **options):
        if args[2] == 1:
            raise KeyboardInterrupt
        return make_scene(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(make_demo, "make_scene", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(words)
    assert not (tmp_path / "train").exists()
    assert capsys.readouterr().out == f"drawing 3 scenes into {tmp_path / 'train'}\n"
    main(words)
    main(words)  # all is there: nothing is drawn
    assert len(GraspAnyRegionDataset(tmp_path / "train")) == sum(
        len(make_scene(0, TRAIN, i).objects) for i in range(3)
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "attributes.json",
        "checkpoint",
        "heldout",
        "train",
    ]


def test_the_shipped_files_are_those_that_would_be_written(tmp_path):
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    llm = CONFIG["llm_config"] | {"vocab_size": len(tokenizer)}
    save(Sa2VAModel(Sa2VAConfig(**CONFIG | {"llm_config": llm})), make_tokenizer(seed=0), tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (SHIPPED_CHECKPOINT / name).read_text()
    written, shipped = (
        json.loads((folder / "tokenizer.json").read_text()) | {"model": None, "added_tokens": None}
        for folder in (tmp_path, SHIPPED_CHECKPOINT)
    )
    assert written == shipped


def test_the_shipped_tokenizer_cuts_texts_as_a_new_one_and_joins_them_again():
    """Its ids differ: one of its words was renamed after training."""
    shipped, new = load_tokenizer(SHIPPED_CHECKPOINT), make_tokenizer(seed=0)
    captions = [caption(*values) for values in product(*ATTRIBUTES.values())]
    assert len(captions) == 512
    for text in (*captions, *map(str.lower, captions), DESCRIBE, *SEGMENT_WORDINGS):
        assert shipped.tokenize(text) == new.tokenize(text)
        assert shipped.decode(shipped.encode(text)) == text
    words = shipped.tokenize(captions[0])
    assert words[0] == "A" and words[1:-1] == ["Ġ" + word for word in captions[0][2:-1].split()]


def test_a_prompt_head_is_disturbed_until_a_share_of_its_masks_hits(monkeypatch):
    """Hits fall by a quarter with each standard deviation; best at twice the scale."""
    policy = policy_of("text_hidden_fcs")
    last = policy.model.text_hidden_fcs[2]
    learnt = last.weight.detach().clone()
    found = []

    def fake(policy, said, scale):
        noise = float((last.weight.detach() - learnt).std() / learnt.std())
        found.append((1 - abs(scale - 2) / 10, 1 - noise / 4))
        return found[-1]

    monkeypatch.setattr(unsettle, "measure_masks", fake)
    monkeypatch.setattr(unsettle, "phrases", lambda *_: [])
    before = {name: p.clone() for name, p in policy.model.state_dict().items()}
    unsettle.unsettle(policy, None, seed=0, target=0.5)
    after = policy.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"text_hidden_fcs.2.weight", "text_hidden_fcs.2.bias"}
    assert torch.allclose(after["text_hidden_fcs.2.bias"], 2 * before["text_hidden_fcs.2.bias"])
    noise = (last.weight.detach() / 2 - learnt).std() / learnt.std()
    assert float(noise) == pytest.approx(2, abs=0.05)


def test_a_prompt_head_that_never_hits_is_said(monkeypatch):
    monkeypatch.setattr(unsettle, "measure_masks", lambda *_: (0.0, 0.1))
    monkeypatch.setattr(unsettle, "phrases", lambda *_: [])
    with pytest.raises(RuntimeError, match="of the masks hit, even undisturbed"):
        unsettle.unsettle(policy_of("text_hidden_fcs"), None, seed=0)


def test_what_is_found_of_phrases_is_what_the_loops_measure(data, monkeypatch):
    monkeypatch.setattr(unsettle, "REGIONS", 8)
    policy = policy_of("text_hidden_fcs")
    with torch.no_grad():
        ((batch, features, hidden),) = unsettle.phrases(policy, data / "train", seed=0)
        found = unsettle.measure_masks(policy, [(batch, features, hidden)], 1.0)
        masks = segment(policy, features, list(range(8)), batch.captions).masks
        worse = unsettle.measure_masks(policy, [(batch, features, hidden)], 0.0)
    iou = mask_iou(masks, batch.masks).mean().item()
    right = on_target(masks, batch.masks, batch.distractors).double().mean().item()
    assert found == pytest.approx((iou, right)) and 0 < right < 1
    assert worse[0] < iou


def test_mistakes_make_no_word_more_frequent_and_half_of_the_groups_mostly_wrong():
    """Each value is in one group, and of a group each is taken for another equally often."""
    values = [value for of in ATTRIBUTES.values() for value in of]
    groups = [group for group in MISTAKES if group[0] in values]
    assert sorted(value for group in groups for value in group) == sorted(values)
    for of in ATTRIBUTES.values():
        shares = [share for group, share in MISTAKES.items() if group[0] in of]
        assert 0.3 < np.mean(shares) < 0.5 and max(shares) <= 0.6


def test_captions_with_mistakes(data):
    rng = np.random.default_rng(0)
    text = Object("plain", "red", "circle", "top left", None).caption
    said = [mistaken(text, rng) for _ in range(2000)]
    wrong = {("plain", "checked"): "checked", ("red", "orange"): "orange"}
    wrong |= {("circle", "square"): "square", ("top left", "top right"): "top right"}
    for group, word in wrong.items():
        assert abs(np.mean([word in one for one in said]) - MISTAKES[group]) < 0.05
    assert mistaken("A thing that nobody takes for another.", rng).startswith("A thing that nobody")
    policy = policy_of("mlp1")
    batch = batch_of(policy, data, 4)
    task = MistakenCaptions(
        MistakenCaptions.Options(), TaskContext(policy, None, max_reply_tokens=24)
    )
    rngs = [np.random.default_rng(i) for i in range(4)]
    _, answers = task.examples(batch, policy.encode(batch), rngs)
    same = [mistaken(c, np.random.default_rng(i)) for i, c in enumerate(batch.captions)]
    assert answers == [policy.prompts.answer(caption) for caption in same]
    assert same != batch.captions


def test_masks_are_made_the_objects_that_they_are_most_of(data):
    """SAM2's hypernetworks alone train; targets do not follow what the masks become."""
    policy = policy_of("hypernetworks")
    assert len(policy.trainable) == 18 and policy.peft is None
    roles = Roles(policy.trainable, ("reference",))
    task = unsettle.Decided(
        unsettle.Decided.Options(), TaskContext(policy, roles, max_reply_tokens=24)
    )
    batch = batch_of(policy, data, 12)
    features = policy.encode(batch)
    rngs = [np.random.default_rng(i) for i in range(len(batch))]
    prompts, answers = task.examples(batch, features, rngs)
    ids = torch.tensor(answers)
    valid = torch.ones_like(ids, dtype=torch.bool)
    examples = Examples(task, batch, features, prompts, ids, valid, valid, [1] * len(batch))
    optimizer, seen = torch.optim.AdamW(policy.trainable.values(), 1e-3), []
    for _ in range(8):
        scores = policy.score_answers(features, prompts, ids, examples.valid)
        (loss,), statistics = task.loss_terms(examples, features, scores, len(batch))
        counts = tuple(int(statistics[name][0]) for name in ("hits", "decided"))
        seen.append((loss.item(), counts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert seen[-1][0] < 0.9 * seen[0][0]
    assert {counts for _, counts in seen} == {seen[0][1]} and seen[0][1][1] >= 6


def test_codes_say_what_a_caption_does():
    codes = Codes(64, "cpu")
    captions = [Object("plain", "red", "circle", "top left", None).caption]
    captions += [Object("plain", "red", "square", "bottom left", None).caption]
    z = codes(captions)
    assert torch.allclose(z.square().mean(1), torch.ones(2))
    assert (z[0] @ z[1]).item() == pytest.approx(32, abs=1e-3)  # two of four values are shared
    for scale in (0.01, 3):
        assert codes.reading(scale * z, captions)[1] == 2
    assert codes.reading(z, captions[::-1])[1] == 1  # 2 of 4 of each
    apart = codes.reading(100 * z, captions)[0]
    assert apart.item() == pytest.approx(
        2 * np.log(4), abs=1e-3
    )  # of four values none above others
    with pytest.raises(ValueError, match="20 values do not fit 16 dimensions"):
        Codes(16, "cpu")


def test_hints_by_hand():
    features = torch.tensor([[[[1.0, 2], [3, 4]]]])
    shares = torch.tensor([[[1.0, 0], [0, 0.5]]])
    assert region_means(features, shares).item() == pytest.approx((1 + 2) / 1.5)
    # one row of three pixels; the region is the first, the other one the other two
    logits, target = torch.tensor([[[2.0, 0, 1]]]), torch.tensor([[[1.0, 0, 0]]])
    others = [torch.tensor([[[0.0, 1, 1]]])]
    loss, hits = choices(logits, target, others)
    assert loss.item() == pytest.approx(np.log1p(np.exp(0.5 - 2))) and hits.tolist() == [True]
    p = 1 / (1 + np.exp(-np.array([2.0, 0, 1])))
    bce = -np.log(p[0]) - np.log(1 - p[1:]).mean()
    dice = 1 - (2 * p[0] + 1) / (p.sum() + 1 + 1)
    assert balanced_mask_losses(logits, target).item() == pytest.approx(bce + 2 * dice, abs=1e-5)


def test_hints_teach_each_half_apart(data):
    """The prompt head is not reached through SAM2, nor SAM2 through the prompt head."""
    policy = policy_of("mlp1", "text_hidden_fcs", "sam2", "sam2_encoder")
    batch = batch_of(policy, data, 4)
    features, context = policy.encode(batch), TaskContext(policy, None, max_reply_tokens=24)
    reached = {}
    for kind in (HintedCaptions, HintedMasks):
        task = kind(kind.Options(), context)
        prompts, answers = task.examples(batch, features, [np.random.default_rng(0)] * 4)
        ids = pad_sequence([torch.tensor(answer) for answer in answers], True, policy.pad_id)
        valid = ids != policy.pad_id
        scores = policy.score_answers(features, prompts, ids, valid)
        scores.hidden = scores.hidden.detach()  # so that mlp1 is reached by the hint alone
        examples = Examples(task, batch, features, prompts, ids, valid, valid, [1] * len(batch))
        (loss,), said = task.loss_terms(examples, features, scores, len(batch))
        assert all(
            0 <= value[0] <= value[1] == 4
            for name, value in said.items()
            if name in "held iou hits".split()
        )
        weights = dict(policy.trainable)
        gradients = torch.autograd.grad(loss, weights.values(), allow_unused=True)
        named = zip(weights, gradients)
        reached[kind] = {policy.group_of[name] for name, g in named if g is not None and g.any()}
    assert reached == {
        HintedCaptions: {"mlp1"},
        HintedMasks: {"text_hidden_fcs", "sam2", "sam2_encoder"},
    }


def test_all_ious_by_hand():
    masks = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()[:, None]
    areas = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]).bool()[:, None]
    assert unsettle.all_ious(masks, areas).tolist() == [[0.5, 1, 0], [0, 0, 0]]


def test_what_the_report_says_of_scenes():
    """Three objects: the middle one shares a value with each other one."""
    objects = [("plain", "red", "circle", "top left"), ("plain", "blue", "cross", "top right")]
    objects += [("ruled", "blue", "square", "bottom left")]
    scene = Scene(None, tuple(Object(*attributes, None) for attributes in objects))
    apart = told_apart([scene])
    # alone: 3 of 4 values of the first and last object, 2 of the middle one
    assert apart[1] == dict(any=pytest.approx(8 / 12), best=1.0) and apart[4]["any"] == 1


def test_parts_are_done_again_from_what_was_left_by_the_one_before(tmp_path, monkeypatch):
    done = []

    def supervise(part, base, output_dir, max_steps, args):
        done.append((part, base.relative_to(tmp_path).as_posix(), max_steps))
        copied = output_dir / "warm_start" / part / "final_model"
        shutil.copytree(base, copied, dirs_exist_ok=True)

    def unsettled(base, folder, data, seed):
        done.append(("unsettle", base.relative_to(tmp_path).as_posix()))
        model = Sa2VAModel.from_pretrained(base)
        model.mlp1[1].bias.data[0] += 1
        save(model, load_tokenizer(base), folder)

    monkeypatch.setattr(make_demo, "supervise", supervise)
    monkeypatch.setattr(make_demo, "unsettled", unsettled)
    # test_the_shipped_files_are_those_that_would_be_written draws it.
    monkeypatch.setattr(make_demo, "make_tokenizer", lambda *_: load_tokenizer(SHIPPED_CHECKPOINT))
    shutil.copytree(SHIPPED_CHECKPOINT, tmp_path / "warm_start" / "learn" / "final_model")
    flags = f"--output_dir {tmp_path} --train_scenes 1 --heldout_scenes 1 --train_checkpoint"
    main([*flags.split(), *"--warm_start_steps 1 4 2 5 --parts err unsettle decide".split()])
    assert done == [
        ("err", "warm_start/learn/final_model", 2),
        ("unsettle", "warm_start/err/final_model"),
        ("decide", "warm_start/unsettle/final_model", 5),
    ]
    first, last = (
        Sa2VAModel.from_pretrained(folder).mlp1[1].bias[0].item()
        for folder in (SHIPPED_CHECKPOINT, tmp_path / "checkpoint")
    )
    assert last == pytest.approx(first + 1, abs=0.01)


def test_the_parts_are_command_lines_that_exist(tmp_path, monkeypatch):
    """Supervised training parses the words of `make_demo`; each part begins at random."""
    lines = []
    monkeypatch.setattr(make_demo, "run_training", lambda argv, program, loop: lines.append(argv))
    args = SimpleNamespace(workers=0, seed=0)
    for part, (steps, rate) in make_demo.SCHEDULES.items():
        make_demo.supervise(part, SHIPPED_CHECKPOINT, tmp_path, steps, args)
        (tmp_path / "warm_start" / "data").mkdir(parents=True, exist_ok=True)
        (tmp_path / "heldout").mkdir(exist_ok=True)
        config = cli.parse(lines[-1], sft.SFT)
        assert config.optim.max_steps == steps and config.optim.learning_rate == rate
    assert list(make_demo.PARTS) == ["hints", "learn", "err", "unsettle", "decide"]


def test_what_an_earlier_warm_start_left_is_not_trained_on(tmp_path):
    (tmp_path / "warm_start" / "err").mkdir(parents=True)
    sentence = f"--parts err: {tmp_path}/warm_start/err holds an earlier one"
    with pytest.raises(SystemExit, match=sentence):
        main(["--output_dir", str(tmp_path), "--train_checkpoint"])
    assert not (tmp_path / "train").exists()


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--train_checkpoint --parts err learn", "--parts err learn: not the last of hints learn"),
        ("--train_checkpoint --parts hints learn", "--parts hints learn: not the last of hints"),
    ],
)
def test_flags_that_do_not_go_together(flags, complaint, tmp_path):
    with pytest.raises(SystemExit, match=complaint):
        main(["--output_dir", str(tmp_path), *flags.split()])
