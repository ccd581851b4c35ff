"""The demo's scenes and checkpoint: what is written, and the parts of its warm start."""

import json
import shutil
from itertools import product
from pathlib import Path
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
from rl_train.tasks.base import TaskContext
from rl_train.tasks.sft_tasks import Examples
from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.prompts import DESCRIBE, SEGMENT_WORDINGS
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo import make_demo, warm_start
from tools.demo.make_demo import (
    SHIPPED_CHECKPOINT,
    VOCAB_SIZE,
    main,
    write_warm_start,
)
from tools.demo.model import CONFIG, tokenizer_of
from tools.demo.new_folder import save
from tools.demo.report import told_apart
from tools.demo.scenes import ATTRIBUTES, TRAIN, WARM_START, Object, Scene, caption, make_scene
from tools.demo.seen_masks import SeenMasks, label_in, regions_of
from tools.demo.warm_start import PARTS
from tools.experiments.pictures.dataset import TRUTH, read_truth

SCENES = 24  # of the warm start here: 103 regions
ONE_IN = 40  # of so many regions one has a caption
CAPTIONS = [caption(*values) for values in product(*ATTRIBUTES.values())]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of what a checkpoint is trained on."""
    folder = tmp_path_factory.mktemp("warm_start")
    write_warm_start(folder, seed=0, num_scenes=SCENES, captioned_one_in=ONE_IN)
    return folder


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


@pytest.fixture(scope="module")
def new_tokenizer():
    """As the shipped one is made, of other captions: all that there are."""
    return tokenizer_of(CAPTIONS, VOCAB_SIZE)


def test_the_shipped_files_are_those_that_would_be_written(new_tokenizer, tmp_path):
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    llm = CONFIG["llm_config"] | {"vocab_size": len(tokenizer)}
    new_tokenizer.save_pretrained(tmp_path)  # `save` is given it as it is read again
    model = Sa2VAModel(Sa2VAConfig(**CONFIG | {"llm_config": llm}))
    save(model, load_tokenizer(tmp_path), tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (SHIPPED_CHECKPOINT / name).read_text()
    new, shipped = (
        json.loads((folder / "tokenizer.json").read_text()) | {"model": None, "added_tokens": None}
        for folder in (tmp_path, SHIPPED_CHECKPOINT)
    )
    assert new == shipped


def test_the_shipped_tokenizer_cuts_texts_as_a_new_one_and_joins_them_again(new_tokenizer):
    """Its ids differ, as captions of scenes are of other frequencies; words are whole in both."""
    shipped = load_tokenizer(SHIPPED_CHECKPOINT)
    assert len(CAPTIONS) == 128
    for text in (*CAPTIONS, *map(str.lower, CAPTIONS), DESCRIBE, *SEGMENT_WORDINGS):
        assert shipped.tokenize(text) == new_tokenizer.tokenize(text)
        assert shipped.decode(shipped.encode(text)) == text
    for text in CAPTIONS:
        first, *words = text.removesuffix(".").split()
        assert shipped.tokenize(text) == [first, *("Ġ" + word for word in words), "."]


def test_the_warm_start_has_masks_of_all_regions_and_captions_of_one_in_so_many(written):
    drawn = [(i, obj) for i in range(SCENES) for obj in make_scene(0, WARM_START, i).objects]
    segmented, captioned = (
        list(GraspAnyRegionDataset(written, [part])) for part in ("segmented", "captioned")
    )
    truth = read_truth(written)
    assert len(truth) == len(segmented) == len(drawn) == 103
    for line, sample, (scene, obj) in zip(truth, segmented, drawn):
        assert np.array_equal(sample["mask"], obj.mask)
        assert sample["caption"] == line["caption"] == obj.caption
        assert line["scene"] == scene and line["label"] == " ".join(obj.attributes)
        assert not line["unnamed"]
    wanted = segmented[::ONE_IN]
    assert [sample["caption"] for sample in captioned] == [each["caption"] for each in wanted]
    assert all(np.array_equal(a["mask"], b["mask"]) for a, b in zip(captioned, wanted))
    assert len(captioned) == 3


def test_the_label_in_a_caption_is_its_values():
    assert label_in("A plain red cross.") == "plain red cross"


def test_regions_of_images_of_two_sizes_are_of_one():
    """Each has the share of its image that it had; the smaller height and width are taken."""
    own, other = torch.zeros(2, 4, 8).bool()
    own[:, :4] = other[:, 4:] = True
    tall = torch.ones(6, 4).bool()
    masks, others = [own, tall], [other[None], torch.zeros(0, 6, 4).bool()]
    regions = regions_of(SimpleNamespace(masks=masks, distractors=others), "cpu")
    assert regions.image.tolist() == [0, 0, 1] and regions.place.tolist() == [0, 1, 0]
    assert regions.masks.shape == (3, 4, 4)
    assert regions.masks.mean((1, 2)).tolist() == [0.5, 0.5, 1]
    assert regions.masks[0, :, :2].all() and regions.masks[1, :, 2:].all()


def seen_masks(written, index, truth=TRUTH, distractors=True):
    """Return (the policy, its task's loss and statistics) of regions of the warm start."""
    config = PolicyConfig(
        model_path=str(SHIPPED_CHECKPOINT), lora_r=1, dtype="float32", gradient_checkpointing=False
    )
    groups = ("mlp1", "text_hidden_fcs", "sam2", "sam2_encoder")
    policy = build_policy(config, groups, 24, torch.device("cpu"))
    dataset = GraspAnyRegionDataset(written, ["segmented"])
    batch = Batches(dataset, policy.preprocessor(24), distractors=distractors)[index]
    features = policy.encode(batch)
    context = TaskContext(policy, None, max_reply_tokens=24)
    task = SeenMasks(SeenMasks.Options(truth=str(written / truth)), context)
    prompts, answers = task.examples(batch, features, [np.random.default_rng(0)] * len(batch))
    ids = pad_sequence([torch.tensor(answer) for answer in answers], True, policy.pad_id)
    valid = ids != policy.pad_id
    scores = policy.score_answers(features, prompts, ids, valid)
    examples = Examples(task, batch, features, prompts, ids, valid, valid, [1] * len(batch))
    return policy, batch, task.loss_terms(examples, features, scores, len(batch))


def test_masks_are_taught_of_images_of_several_sizes(written):
    """Every half has a gradient of the one loss; the shipped checkpoint knows most of it."""
    truth = read_truth(written)
    first = [next(i for i, line in enumerate(truth) if line["scene"] == k) for k in range(3)]
    policy, batch, ((loss,), counted) = seen_masks(written, [first[0] + 1, *first[1:]])
    assert len({mask.shape for mask in batch.masks}) == 3
    weights = dict(policy.trainable)
    gradients = torch.autograd.grad(loss, weights.values(), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)
    named = zip(weights, gradients)
    reached = {policy.group_of[name] for name, g in named if g is not None and g.any()}
    assert reached == {"mlp1", "text_hidden_fcs", "sam2", "sam2_encoder"}
    number = sum(line["scene"] < 3 for line in truth)
    hits, of = counted["hits"]
    assert of == number and number / 2 < hits <= number
    assert counted["said"][1] == 3 and 0.3 < counted["iou"][0] / counted["iou"][1] < 1


def test_a_truth_of_other_regions_is_refused(written, tmp_path):
    shutil.copytree(written / "segmented", tmp_path / "segmented")
    lines = (written / TRUTH).read_text().splitlines()
    (tmp_path / TRUTH).write_text("\n".join([*lines[1:], lines[0]]))
    with pytest.raises(ValueError, match="--truth: is not that of the part `segmented`"):
        seen_masks(tmp_path, [0, 5])
    with pytest.raises(ValueError, match="SeenMasks: needs --distractors"):
        seen_masks(written, [0, 5], distractors=False)


def test_what_the_report_says_of_scenes():
    """Three objects: the middle one shares a value with each other one."""
    objects = [("plain", "red", "circle"), ("plain", "blue", "cross"), ("ruled", "blue", "square")]
    scene = Scene(None, tuple(Object(*attributes, None) for attributes in objects))
    apart = told_apart([scene])
    # alone: 2 of 3 values of the first and last object, 1 of the middle one
    assert apart[1] == dict(any=pytest.approx(5 / 9), best=1.0) and apart[3]["any"] == 1


def trained_by_hand(monkeypatch) -> list:
    """Replace supervised training: a part adds 1 to a bias. Return the list of what was asked.

    Each command line is parsed as supervised training does it.
    """
    asked = []

    def run_training(argv, program, loop):
        assert program is sft.SFT and loop is sft.train
        given = cli.parse(argv, program).flags
        base, output = Path(given["model_path"]), Path(given["output_dir"])
        asked.append((output.name, base.relative_to(output.parent).as_posix(), given))
        model = Sa2VAModel.from_pretrained(base)
        model.mlp1[1].bias.data[0] += 1
        save(model, load_tokenizer(base), output / "final_model")

    monkeypatch.setattr(warm_start, "run_training", run_training)
    return asked


def first_bias(folder) -> float:
    return Sa2VAModel.from_pretrained(folder).mlp1[1].bias[0].item()


def test_the_parts_follow_one_another_and_one_that_is_done_is_not_done_again(tmp_path, monkeypatch):
    """They are command lines that exist; a checkpoint that is there is not written over."""
    asked = trained_by_hand(monkeypatch)
    flags = f"--output_dir {tmp_path} --train_scenes 1 --heldout_scenes 1".split()
    main(flags)
    shipped = first_bias(tmp_path / "checkpoint")
    flags += f"--train_checkpoint --warm_start_scenes {SCENES} --warm_start_steps 3 2 1".split()
    with pytest.raises(SystemExit, match=f"{tmp_path}/checkpoint is there already, name another"):
        main(flags)
    shutil.rmtree(tmp_path / "checkpoint")
    main(flags)
    assert list(PARTS) == ["see", "find", "say"]
    assert [each[:2] for each in asked] == [
        ("see", "random"),
        ("find", "see/final_model"),
        ("say", "find/final_model"),
    ]
    schedule = make_demo.SCHEDULE
    for flag, values in (
        ("max_steps", (3, 2, 1)),
        ("batch_size", schedule.batch_sizes),
        ("learning_rate", schedule.rates),
        ("subsets", (["segmented"], ["segmented"], ["captioned"])),
    ):
        assert [given[flag] for *_, given in asked] == list(values), flag
    assert first_bias(tmp_path / "checkpoint") == 3 != shipped  # random ones begin at 0
    for folder in ("warm_start/say", "warm_start/base", "checkpoint"):
        shutil.rmtree(tmp_path / folder)
    del asked[:]
    with pytest.raises(SystemExit, match="warm_start was begun with other flags, name another"):
        main([*flags, "--seed", "1"])
    main(flags)
    assert [each[:2] for each in asked] == [("say", "find/final_model")]
    assert first_bias(tmp_path / "checkpoint") == 3


def test_the_checkpoint_has_the_tokenizer_of_its_own_captions(tmp_path, monkeypatch):
    trained_by_hand(monkeypatch)
    flags = "--train_scenes 1 --heldout_scenes 1 --train_checkpoint --warm_start_scenes 24"
    main(["--output_dir", str(tmp_path), *flags.split()])
    made = load_tokenizer(tmp_path / "checkpoint")
    captions = [line["caption"] for line in read_truth(tmp_path / "warm_start" / "data")]
    assert made.get_vocab() == tokenizer_of(captions, VOCAB_SIZE).get_vocab()
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["llm_config"]["vocab_size"] == len(made)
