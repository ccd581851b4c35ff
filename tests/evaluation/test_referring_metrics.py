"""RefCOCO as training data and as Sa2VA's evaluation measures it, recomputed from the files."""

import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco
from torch.utils.data import Subset

from rl_train import cli
from rl_train.data import RefCOCODataset
from rl_train.data.mixture import MixtureDataset
from rl_train.data.split import picture_keys
from rl_train.evaluation import referring_metrics
from rl_train.evaluation.bootstrap import means
from rl_train.export import load_policy
from rl_train.utils.io import write_json
from sa2va_hf import Sa2VAModel
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT, complaint_of, flags, on_one_core, rollouts, run, unmeasured
from tools import evaluate, inspect_data
from tools.demo import refcoco_writer
from tools.demo.refcoco_writer import drawn_scenes, polygons_of, write_refcoco

one_core = pytest.fixture(autouse=True)(on_one_core)
SCENES = dict(num_train=4, num_heldout=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder as the tool writes it."""
    folder = tmp_path_factory.mktemp("drawn") / "new"
    refcoco_writer.main(f"--output_dir {folder} --num_train 4 --num_heldout 1".split())
    return folder


def read(root, split):
    """[(image file, target (H, W) bool, sentence)] of a split, by nothing but the files."""
    whole = json.loads((root / "refcoco" / "instances.json").read_text())
    refs = pickle.loads((root / "refcoco" / "refs(unc).p").read_bytes())
    images = {one["id"]: one for one in whole["images"]}
    annotations = {one["id"]: one for one in whole["annotations"]}
    rows = []
    for ref in refs:
        if ref["split"] == split:
            image, annotation = images[ref["image_id"]], annotations[ref["ann_id"]]
            size = image["height"], image["width"]
            layers = coco.decode(coco.frPyObjects(annotation["segmentation"], *size))
            path = root / "train2014" / image["file_name"]
            rows += [(path, layers.any(2), one["sent"]) for one in ref["sentences"]]
    return rows


def test_what_is_written_is_what_was_drawn(root):
    scenes = list(drawn_scenes("refcoco", 0, **SCENES))
    assert [scene["split"] for scene in scenes] == ["train"] * 4 + ["val", "testA", "testB"]
    for split in ("train", "val", "testA", "testB"):
        drawn = [
            (region["mask"], text)
            for scene in scenes
            if scene["split"] == split
            for region in scene["regions"]
            for text in region["sentences"]
        ]
        found = read(root, split)
        assert [text for *_, text in found] == [text for _, text in drawn]
        assert all(np.array_equal(a, b) for (_, a, _), (b, _) in zip(found, drawn))
        dataset = RefCOCODataset(root, split=split)
        assert len(dataset) == len(drawn) and not dataset.report()["skipped"]
        assert dataset.sentence(1) == dataset[1]["caption"] == drawn[1][1]
    ids = [RefCOCODataset(root, split=split).coco_ids for split in ("train", "val")]
    assert set(ids[0]) == {1, 2, 3, 4} and set(ids[1]) == {5}
    with pytest.raises(SystemExit, match="--output_dir .* is not empty"):
        refcoco_writer.main(["--output_dir", str(root)])


def test_polygons_cover_each_pixel_once():
    mask = np.random.default_rng(0).random((23, 31)) < 0.6
    layers = coco.decode(coco.frPyObjects(polygons_of(mask), *mask.shape))
    assert np.array_equal(layers.sum(2), mask)


# Training


def test_a_run_trains_on_phrases_and_is_measured_on_val(root, tmp_path, monkeypatch):
    how = dict(dataset="refcoco", data_dir=root, eval_data_dir=root, loop2_weight=0)
    for _ in unmeasured(monkeypatch):
        output = run(root, tmp_path, **how, max_steps=1, eval_samples=2)
    asked = {text for *_, text in read(root, "train")}
    lines = rollouts(output)
    assert len(lines) == 4 and all(line["caption"] in asked for line in lines)
    assert all(line["image_id"].startswith("refcoco/train/") for line in lines)
    held = json.loads((output / "evaluation" / "step_1.json").read_text())
    assert all(name.startswith("refcoco/val/") for name in held["image_ids"])
    assert set(held["references"]) <= {text for *_, text in read(root, "val")}


def test_images_that_another_of_the_three_trains_on(root, tmp_path):
    """refcocog's val has an image that refcoco trains on, as it is with the published sets; here
    also encoded anew."""
    scenes = list(drawn_scenes("refcoco", 0, **SCENES))
    write_refcoco([scenes[2] | dict(split="val")], tmp_path / "g", "refcocog")
    for file in (tmp_path / "g" / "train2014").iterdir():
        Image.open(file).save(file, quality=70)
    shared = sum(len(region["sentences"]) for region in scenes[2]["regions"])
    training = RefCOCODataset(root, split="train")
    other = RefCOCODataset(tmp_path / "g", "refcocog")
    assert not np.isin(training.image_keys, other.image_keys).any()
    assert np.isin(*picture_keys(training, other)).sum() == shared
    how = dict(dataset="refcoco", data_dir=root, eval_data_dir=f"refcocog:{tmp_path / 'g'}")
    argv = flags(root, tmp_path / "run", **how)
    assert f"share images, of {shared} of {len(training)} training" in complaint_of(argv)
    how |= dict(
        dataset="refcocog", data_dir=tmp_path / "g", subsets="val", data_mixture=f"refcoco:{root}"
    )
    mixed = flags(root, tmp_path / "run", **how)
    found = complaint_of(mixed)
    assert f"of {2 * shared} of {shared + len(training)} training" in found


def test_a_checkpoint_is_not_measured_on_images_that_it_was_trained_on(root, tmp_path, capsys):
    """Its config.json says so: it held out what shares an image with refcoco's val."""
    how = dict(dataset="refcoco", data_dir=root, eval_data_dir=root, train_eval_overlap="drop")
    config = cli.parse(flags(root, tmp_path / "run", **how)).flags
    write_json(tmp_path / "config.json", config)
    (tmp_path / "training_state.pt").write_bytes(b"")
    training, held = RefCOCODataset(root, split="train"), RefCOCODataset(root)
    of_one = int((training.coco_ids == 1).sum())
    some = Subset(training, [i for i in range(len(training)) if training.coco_ids[i] == 1])
    mixed = MixtureDataset(dict(held=held, some=training), [1, 1])
    assert load_policy.drop_trained_images(held, tmp_path, "refuse") is held
    assert f"refuse: 0 of {len(held)} regions are on 0 of the 4 images" in capsys.readouterr().out
    kept = load_policy.drop_trained_images(mixed, tmp_path, "drop")
    assert kept.indices == list(range(len(held)))
    assert load_policy.drop_trained_images(some, tmp_path, "keep") is some
    assert f"keep: {of_one} of {of_one} regions are on 1 of" in capsys.readouterr().out
    with pytest.raises(ValueError, match="refuse: .*; drop leaves them out"):
        load_policy.drop_trained_images(some, tmp_path, "refuse")
    with pytest.raises(ValueError, match="drop: .*: nothing is left to measure"):
        load_policy.drop_trained_images(some, tmp_path, "drop")
    with pytest.raises(
        SystemExit, match="evaluate: --train_eval_overlap drop: .* is no checkpoint"
    ):
        evaluated(root, tmp_path, train_eval_overlap="drop")


# Evaluation


def evaluated(root, tmp_path, **changes):
    values = dict(
        model_path=CHECKPOINT,
        data_dir=root,
        dataset="refcoco",
        subsets="testA",
        protocol="sa2va",
        output=tmp_path / "out.json",
        dtype="float32",
        num_workers=0,
        max_completion_length=16,
    )
    words = [(f"--{n}", str(v)) for n, v in (values | changes).items() if v is not None]
    evaluate.main([word for pair in words for word in pair])
    return json.loads((tmp_path / "out.json").read_text())


def test_the_figures_are_those_of_a_computation_by_hand(root, tmp_path, capsys):
    """The files and `predict_forward` give them, sample by sample, as the original does it."""
    model, tokenizer = Sa2VAModel.from_pretrained(CHECKPOINT), load_tokenizer(CHECKPOINT)
    intersections, unions, texts, ious = [], [], [], []
    for path, target, sentence in read(root, "testA"):
        said = model.predict_forward(
            image=Image.open(path).convert("RGB"),
            text=f"<image>\n Please segment {sentence} in this image.",
            tokenizer=tokenizer,
            rounded_normalisation=True,
        )
        mask = np.zeros_like(target)
        for one in said["prediction_masks"]:
            mask |= one[0]
        intersections.append(int((mask & target).sum()))
        unions.append(int((mask | target).sum()))
        ious.append(intersections[-1] / unions[-1] if unions[-1] else 1)
        texts.append(said["prediction"].replace("<|end|>", "").strip())
    tiles = model.config.raw["max_dynamic_patch"]
    found = evaluated(root, tmp_path, max_tiles=tiles)
    assert found["references"] == [sentence for *_, sentence in read(root, "testA")]
    assert found["captions"] == texts and found["num_samples"] == len(texts) >= 10
    assert found["values"]["seg_intersection"] == intersections
    assert found["values"]["seg_union"] == unions
    assert found["means"]["seg_ciou"] == pytest.approx(sum(intersections) / sum(unions), abs=1e-12)
    assert found["means"]["seg_iou"] == pytest.approx(sum(ious) / len(ious), abs=1e-6)
    assert sum(intersections) > 0 and found["means"]["no_seg"] == 0
    said = capsys.readouterr().out
    assert (
        f"Sa2VA's protocol, refcoco testA: {len(texts)} phrases, cIoU "
        f"{sum(intersections) / sum(unions):.4f} (intersections {sum(intersections)}, unions "
        f"{sum(unions)} pixels), gIoU {sum(ious) / len(ious):.4f}; 0 answers"
    ) in said
    assert f"of all {len(texts)} phrases 0 are asked without" in said and "measured: none" in said


def test_answers_without_seg_are_empty_masks(model, batch, images, monkeypatch):
    """The first of four has none, the second's mask is its target, the others' are empty."""
    masks = [torch.zeros_like(mask) for mask in batch.masks]
    masks[1] = batch.masks[1]
    answers = (["a", "b", "c", "d"], masks, [False, True, True, True])
    monkeypatch.setattr(referring_metrics, "segment", lambda *_: answers)
    found = referring_metrics.measure(model, batch, images, 8)
    area = [int(mask.sum()) for mask in batch.masks]
    assert found["seg_iou"] == [0, 1, 0, 0] and found["no_seg"] == [True, False, False, False]
    assert found["seg_intersection"] == [0, area[1], 0, 0] and found["seg_union"] == area
    words = ("image_id", "reference", "caption", "index", "mask")
    columns = {n: torch.tensor(v).double() for n, v in found.items() if n not in words}
    metrics = means(columns)
    assert metrics["seg_ciou"] == pytest.approx(area[1] / sum(area))
    assert metrics["seg_ciou_answered"] == pytest.approx(area[1] / sum(area[1:]))
    said = evaluate.protocol_sentence("x", columns, metrics)
    assert said.startswith(f"x: 4 phrases, cIoU {area[1] / sum(area):.4f}")
    assert said.endswith(f"masks, without them cIoU {area[1] / sum(area[1:]):.4f}")


def test_what_the_protocol_refuses(root, tmp_path):
    def refused(words, **changes):
        with pytest.raises(SystemExit) as stopped:
            evaluated(root, tmp_path, **changes)
        assert words in str(stopped.value)

    refused(
        "--protocol sa2va: of refcoco, refcoco+, refcocog, grefcoco, gcg, not",
        dataset="gar",
        subsets=None,
    )
    refused("--best_of: not with --protocol sa2va", best_of=2)
    refused("has no split 'train2'; it has testA", subsets="train2")
    refused("2", protocol="other")


def test_a_split_is_inspected(root, capsys):
    inspect_data.main(f"--data_dir {root} --dataset refcoco --subsets val --num_workers 0".split())
    said = capsys.readouterr()
    assert f"{len(read(root, 'val'))} rows" in said.out + said.err


# gRefCOCO


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    folder = tmp_path_factory.mktemp("general") / "new"
    argv = f"--output_dir {folder} --name grefcoco --num_train 4 --num_heldout 1 --seed 3"
    refcoco_writer.main(argv.split())
    return folder


def test_loop2_trains_on_phrases_that_name_nothing(general, tmp_path):
    """They are no damaged samples; each component of their reward is 1 or 0."""
    training = RefCOCODataset(general, "grefcoco", "train")
    absent = {training[i]["caption"] for i in range(len(training)) if not training[i]["mask"].any()}
    assert absent and not training.report()["skipped"]
    how = dict(dataset="grefcoco", data_dir=general, eval_data_dir=general)
    assert "--tasks mask_caption_mask needs a region" in complaint_of(
        flags(general, tmp_path / "no", **how)
    )
    (tmp_path / "order.py").write_text(ORDER)
    how |= dict(loop1_weight=0, batch_size=4, sampler="order:absent_first", eval_samples=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        output = run(general, tmp_path / "run", **how, max_steps=1)
    lines = [line for line in rollouts(output) if line["caption"] in absent]
    assert lines and all(line["meteor"] in (0, 1) for line in lines)
    held = json.loads((output / "evaluation" / "step_1.json").read_text())
    # The demo's base answers the name of an absent colour with an empty mask.
    assert sum(held["values"]["none"]) == sum(held["values"]["none_right"]) == 1
    assert held["means"]["n_acc"] == 1 and held["means"]["t_acc"] > 0
    assert "caption_meteor" not in held["means"] and "seg_iou" in held["means"]


ORDER = """
def absent_first(dataset, epoch, generator):
    return sorted(range(len(dataset)), key=lambda i: dataset[i]["mask"].any())
"""
