"""Figures of masks where phrases may name nothing, against the benchmark's definitions."""

import numpy as np
import pytest
import torch

from rl_train.evaluation.bootstrap import means
from rl_train.evaluation.mask_columns import mask_columns
from rl_train.rollout import Batch


def figures(masks, objects):
    targets = [one.any(0) for one in objects]
    n = len(masks)
    batch = Batch(list(range(n)), targets, ["x"] * n, ["x"] * n, [], None, objects=objects)
    columns = mask_columns(masks, targets, batch)
    texts = ("mask", "image_id", "reference", "index")
    return means({k: torch.tensor(v).double() for k, v in columns.items() if k not in texts})


def test_n_acc_t_acc_giou_and_ciou_of_random_masks():
    """GRES, section 4: counts by an independent loop over numpy arrays."""
    rng = np.random.default_rng(0)
    masks, objects = [], []
    for _ in range(60):
        masks.append(torch.from_numpy(rng.random((5, 6)) < rng.choice([0, 0.3, 0.8])))
        objects.append(torch.from_numpy(rng.random((int(rng.integers(3)), 5, 6)) < 0.5))
    ious, intersections, unions, hits = [], 0, 0, {True: [], False: []}
    for mask, regions in zip(masks, objects):
        mask, target = mask.numpy(), regions.numpy().any(0)
        none, said_none = len(regions) == 0, mask.sum() == 0
        hits[none].append(said_none == none)
        union = np.logical_or(mask, target).sum()
        ious.append(float(said_none) if none else np.logical_and(mask, target).sum() / union)
        intersections += np.logical_and(mask, target).sum()
        unions += union
    measured = figures(masks, objects)
    assert min(len(hits[True]), len(hits[False])) > 10
    assert measured["n_acc"] == pytest.approx(np.mean(hits[True]))
    assert measured["t_acc"] == pytest.approx(np.mean(hits[False]))
    assert measured["seg_iou"] == pytest.approx(np.mean(ious), abs=1e-6)
    assert measured["seg_ciou"] == pytest.approx(intersections / unions)


def test_without_such_phrases_there_is_no_n_acc():
    one = torch.ones(1, 2, 2, dtype=torch.bool)
    assert "n_acc" not in figures([one[0]], [one]) and figures([one[0]], [one])["t_acc"] == 1
    batch = Batch([0], [one[0]], ["x"], ["x"], [], None)
    assert "some" not in mask_columns([one[0]], [one[0]], batch)
    assert batch.no_target == [False]
