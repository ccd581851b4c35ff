"""Figures of grounded captions against hand-worked cases and pycocotools' own file interface."""

import json

import numpy as np
import pytest
from pycocotools import mask as coco
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from rl_train.evaluation.gcg_metrics import (
    average_precision,
    caption_of,
    mean_pair_iou,
    phrases_of,
    recalled,
)

ANSWER = "<p> A dog </p> [SEG] sits on\n <p>the mat</p>  [SEG]. '"


def test_caption_and_phrases_of_an_answer():
    assert caption_of(ANSWER) == "A dog sits on the mat ."
    assert phrases_of(ANSWER) == ["A dog", "the mat"]
    assert phrases_of("no phrase [SEG]") == [] and caption_of("") == ""


def test_the_mean_is_of_pairs_alone():
    ious = np.array([[0.9, 0.8], [0.7, 0.1]])
    assert mean_pair_iou(ious) == pytest.approx((0.9 + 0.1) / 2)  # greedy: .9 first, not .8 + .7
    assert mean_pair_iou(np.array([[0.9, 0, 0]])) == pytest.approx(0.9)
    assert mean_pair_iou(np.zeros((2, 2))) == mean_pair_iou(np.zeros((0, 3))) == 0


def test_recall_ends_with_the_first_pair_that_fails():
    ious = np.array([[0.9, 0.0, 0], [0, 0.8, 0], [0, 0, 0.6]])
    true = ["a dog", "a mat", "a cup"]
    assert recalled(ious, true, true) == 3
    assert recalled(ious, ["a dog", "sky", "a cup"], true) == 1  # the cup would follow
    assert recalled(ious, ["sky", "a mat", "a cup"], true) == 0
    assert recalled(ious, ["sky"] * 3, true, similarity=lambda *_: 1.0) == 3
    assert recalled(ious * 0.55, true, true) == 0 and recalled(ious * 0.6, true, true) == 1
    assert recalled(ious, true[:2], true) == 0  # fewer phrases than masks


def test_ap50_is_that_of_their_files(tmp_path):
    """pycocotools' loadRes and default parameters compute it, as the published script does."""
    rng = np.random.default_rng(0)
    truth, answers = [], []
    for _ in range(12):
        regions = rng.random((int(rng.integers(1, 4)), 12, 14)) < 0.4
        kept = regions[rng.random(len(regions)) < 0.8]
        noisy = kept ^ (rng.random(kept.shape) < rng.choice([0.02, 0.3]))
        extra = rng.random((int(rng.integers(3)), 12, 14)) < 0.3
        truth.append(regions), answers.append(np.concatenate([noisy, extra]))
    encode = lambda masks: [coco.encode(np.asfortranarray(m, dtype=np.uint8)) for m in masks]  # noqa: E731
    truth, answers = [encode(m) for m in truth], [encode(m) for m in answers]
    images = [dict(id=i, height=12, width=14) for i in range(12)]
    as_json = lambda rle: rle | dict(counts=rle["counts"].decode())  # noqa: E731
    annotations = [
        dict(
            image_id=i,
            segmentation=as_json(rle),
            category_id=1,
            iscrowd=0,
            area=float(coco.area(rle)),
            bbox=coco.toBbox(rle).tolist(),
        )
        for i, row in enumerate(truth)
        for rle in row
    ]
    annotations = [dict(id=k, **one) for k, one in enumerate(annotations, 1)]
    content = dict(images=images, annotations=annotations, categories=[dict(id=1, name="x")])
    (tmp_path / "gt.json").write_text(json.dumps(content))
    found = [
        dict(image_id=i, category_id=1, segmentation=as_json(rle), score=1.0)
        for i, row in enumerate(answers)
        for rle in row
    ]
    (tmp_path / "dt.json").write_text(json.dumps(found))
    ground = COCO(str(tmp_path / "gt.json"))
    evaluation = COCOeval(ground, ground.loadRes(str(tmp_path / "dt.json")), "segm")
    evaluation.params.catIds = [1]
    evaluation.evaluate(), evaluation.accumulate(), evaluation.summarize()
    measured = average_precision(answers, truth)
    assert measured == pytest.approx(evaluation.stats[1]) and 0.2 < measured < 0.95
    assert average_precision(truth, truth) == pytest.approx(1)
    assert np.isnan(average_precision([[]], [[]])) and average_precision([[]], truth[:1]) == 0
