"""Rewards where a caption names no region of the image, or several."""

from itertools import permutations

import numpy as np
import pytest
import torch
from pycocotools import mask as coco

from rl_train.rewards.objects import (
    match,
    matched_rewards,
    no_target_reward,
    pair_ious,
    with_no_target_reward,
)

EMPTY, PIXEL = torch.zeros(2, 3, dtype=torch.bool), torch.eye(2, 3, dtype=torch.bool)


def test_an_empty_mask_is_right_where_nothing_is_named():
    assert no_target_reward([EMPTY, PIXEL]).tolist() == [1, 0]
    rewards = dict(meteor=torch.tensor([0.2, 0.4, 0.6]), other=torch.tensor([5.0, 6, 7]))
    changed = with_no_target_reward(rewards, [EMPTY, PIXEL, EMPTY], no_target=[True, True, False])
    assert torch.equal(changed["meteor"], torch.tensor([1, 0, 0.6]))
    assert torch.equal(changed["other"], torch.tensor([1.0, 0, 7]))
    assert rewards["meteor"].tolist()[0] != 1  # nothing is written to
    assert with_no_target_reward(rewards, [EMPTY] * 3, [False] * 3) is rewards


def test_a_fault_of_the_judge_is_no_fault_where_nothing_is_named():
    rewards = dict(judge=torch.tensor([float("nan"), float("nan")]))
    judge = with_no_target_reward(rewards, [EMPTY, EMPTY], [True, False])["judge"]
    assert judge[0] == 1 and judge[1].isnan()


# Several


def random_masks(rng, count, size=(9, 11)):
    return torch.from_numpy(rng.random((count, *size)) < rng.random((count, 1, 1)))


def encoded(masks):
    return [coco.encode(np.asfortranarray(mask.numpy(), dtype=np.uint8)) for mask in masks]


def test_ious_are_those_of_pycocotools_and_the_assignment_the_best_of_all():
    rng = np.random.default_rng(1)
    for _ in range(60):
        masks, objects = (random_masks(rng, int(n)) for n in rng.integers(0, 6, 2))
        M, K = len(masks), len(objects)
        matching = match(masks, objects)
        if not M or not K:
            assert matching.reward == float(M == K) and not matching.pairs
            continue
        expected = np.array(coco.iou(encoded(masks), encoded(objects), [0] * K))
        assert np.allclose(matching.ious, expected, atol=1e-12)
        wide = expected if M <= K else expected.T
        best = max(
            sum(wide[row, column] for row, column in enumerate(columns))
            for columns in permutations(range(wide.shape[1]), wide.shape[0])
        )
        assert matching.reward == pytest.approx(best / max(M, K))
        assert matching.num_missing >= K - min(M, K) and matching.num_surplus >= M - min(M, K)


def test_the_assignment_is_that_of_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(2)
    for _ in range(30):
        masks, objects = (random_masks(rng, int(n)) for n in rng.integers(1, 25, 2))
        ious = pair_ious(masks, objects)
        rows, columns = optimize.linear_sum_assignment(ious, maximize=True)
        best = ious[rows, columns].sum() / max(ious.shape)
        assert match(masks, objects).reward == pytest.approx(best)


def test_missing_and_surplus_masks_are_counted():
    left, right = torch.zeros(2, 4, 4, dtype=torch.bool)
    left[:, :2], right[:, 2:] = True, True
    one, both, three = left[None], torch.stack([left, right]), torch.stack([right, left, left])
    none = one[:0]
    rewards = matched_rewards(
        [both, one, three, none, one, none], [both.flip(0), both, both, both, none, none]
    )
    assert match(both, both.flip(0)).pairs == ((0, 1), (1, 0))  # whatever the order
    assert rewards["matched"].tolist() == pytest.approx([1, 1 / 2, 2 / 3, 0, 0, 1])
    assert rewards["missing"].tolist() == [0, 1, 0, 2, 0, 0]
    assert rewards["surplus"].tolist() == [0, 0, 1, 0, 1, 0]
    # one mask of the union earns less than a half of what two masks do
    assert match((left | right)[None], both).reward == pytest.approx(0.25)
