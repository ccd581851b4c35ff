"""The rewards of Seg-Zero and VisionReasoner, by hand, and the assignment against all others."""

import itertools
import json

import numpy as np
import pytest

from rl_train.points.published import parse_solution
from rl_train.rewards.published_points import (
    PAIR_REWARDS,
    best_assignment,
    matched_box_iou,
    non_repeat,
    segzero_rewards,
    visionreasoner_rewards,
)

# Two true boxes, 100 x 100 and 200 x 100 pixels, corners included.
TRUE = parse_solution(
    '[{"bbox_2d": [0, 0, 99, 99], "point_2d": [50, 50]},'
    ' {"bbox_2d": [400, 400, 599, 499], "point_2d": [500, 450]}]'
)
ONE = parse_solution("<box>(100,100),(199,199)</box><points>(120,120),(180,180)</points>")


def answer(*items: tuple[list, list], thoughts: str = "<think>It is left.</think>") -> str:
    content = [dict(bbox_2d=box, point_2d=point) for box, point in items]
    return f"{thoughts}<answer>{json.dumps(content)}</answer>"


def pair_rewards(*items: tuple[list, list]) -> list[float]:
    rewards = visionreasoner_rewards(answer(*items), TRUE)
    return [rewards[name] for name in PAIR_REWARDS]


FIRST, SECOND = ([0, 0, 99, 99], [50, 50]), ([400, 400, 599, 499], [500, 450])


def test_the_whole_solution_has_7():
    rewards = visionreasoner_rewards(answer(SECOND, FIRST), TRUE)  # in any order
    assert rewards == dict(
        thinking_format=1.0,
        segmentation_format=2.0,
        bbox_iou=1.0,
        bbox_l1=1.0,
        point_l1=1.0,
        non_repeat=1.0,
    )
    assert sum(rewards.values()) == 7


def test_pairs_by_hand():
    assert pair_rewards(FIRST) == [0.5, 0.5, 0.5]  # one of two
    assert pair_rewards(FIRST, SECOND, FIRST) == [2 / 3, 2 / 3, 2 / 3]  # one too many
    # 100 x 150 pixels of which 100 x 100 are shared: IoU 2/3; sides 0, 0, 0, 50 apart: 12.5
    assert pair_rewards(([0, 0, 99, 149], [50, 50])) == [0.5, 0, 0.5]
    # 100 x 200: IoU is 1/2, not above it
    assert pair_rewards(([0, 0, 99, 199], [50, 50])) == [0, 0, 0.5]
    # sides 0, 0, 0, 36 apart: 9; 40 apart: 10, not below it
    assert pair_rewards(([0, 0, 99, 135], [50, 50]))[1] == 0.5
    assert pair_rewards(([0, 0, 99, 139], [50, 50]))[1] == 0
    # 29 and 30 pixels beside the true point
    assert pair_rewards(([0, 0, 99, 99], [79, 50]))[2] == 0.5
    assert pair_rewards(([0, 0, 99, 99], [80, 50]))[2] == 0
    # near, and outside of its own box
    assert pair_rewards(([0, 0, 45, 99], [50, 50]))[2] == 0
    # its own box need not be the true one
    assert pair_rewards(([40, 40, 60, 60], [50, 50])) == [0, 0, 0.5]


def test_the_best_assignment_counts_not_the_first():
    """The first box is near both; the second only near the first true one."""
    near = parse_solution(
        '[{"bbox_2d": [0, 0, 99, 99], "point_2d": [50, 50]},'
        ' {"bbox_2d": [10, 10, 109, 109], "point_2d": [60, 60]}]'
    )
    text = answer(([5, 5, 104, 104], [55, 55]), ([0, 0, 85, 85], [40, 40]))
    rewards = visionreasoner_rewards(text, near)
    assert rewards["bbox_l1"] == 1.0 and rewards["point_l1"] == 1.0


def test_format_and_thoughts_by_hand():
    def formats(text: str) -> tuple[float, float]:
        rewards = visionreasoner_rewards(text, TRUE)
        return rewards["thinking_format"], rewards["segmentation_format"]

    box_only = '<answer>[{"bbox_2d": [0, 0, 9, 9]}, {"bbox_2d": [1, 2, 3, 4], "point_2d": [1, 2]}]'
    assert formats(box_only + "</answer>") == (0, 1.5)
    assert visionreasoner_rewards(box_only + "</answer>", TRUE)["bbox_iou"] == 0  # a key is missing
    assert formats(answer(FIRST)) == (1, 2)
    assert formats(answer(FIRST) + " ") == (0, 2)
    assert formats(answer()) == (1, 0)
    assert formats(answer(FIRST).replace("[{", "{").replace("}]", "}")) == (1, 0)
    assert formats(f"<think></think><answer>```json\n{json.dumps([])}```</answer>") == (1, 0)
    assert formats("so") == (0, 0)


def test_repeated_sentences():
    assert non_repeat("A. B. C.") == 1 and non_repeat("A. B. A.") == 1  # once is allowed
    assert non_repeat("A. B. A. B.") == 0 and non_repeat("A. A. A.") == 0
    assert non_repeat("") == 1


@pytest.mark.parametrize(
    "item",
    [
        ([0, 0, 99], [50, 50]),
        ([0, 0, 99, None], [50, 50]),
        ([0, 0, 99, "99"], [50, 50]),
        ([0, 0, 99, 10**400], [50, 50]),
        ([0, 0, 99, 99], [50]),
        ("cup", [50, 50]),
    ],
)
def test_what_numpy_refuses_has_no_reward(item):
    assert pair_rewards(FIRST, item) == [0, 0, 0]


def test_coordinates_of_another_frame():
    """An answer in [0, 1], and one of an image of 560 x 420 pixels."""
    unit = answer(([0, 0, 99 / 840, 99 / 840], [50 / 840, 50 / 840]))
    seen = answer(([0, 0, 66, 49.5], [33, 25]))
    for text, scale in ((unit, (840, 840)), (seen, (840 / 560, 840 / 420))):
        rewards = visionreasoner_rewards(text, TRUE, scale)
        assert [rewards[name] for name in PAIR_REWARDS] == [0.5, 0.5, 0.5]


def segzero(box: object, first: object, second: object) -> str:
    content = json.dumps(dict(bbox=box, points_1=first, points_2=second))
    return f"<think>so</think>\n<answer>{content}</answer>"


# {answer: [thinking_format, segmentation_format, bbox_iou, bbox_l1, point_l1]}
SEGZERO_CASES = {
    segzero([100, 100, 199, 199], [120, 120], [180, 180]): [1, 1, 1, 1, 1],
    segzero([100, 100, 199, 199], [180, 180], [120, 120]): [1, 1, 1, 1, 1],  # in the other order
    # sides 36 / 4 = 9 and 40 / 4 = 10 apart
    segzero([100, 100, 199, 235], [120, 120], [180, 180]): [1, 1, 1, 1, 1],
    segzero([100, 100, 199, 239], [120, 120], [180, 180]): [1, 1, 1, 0, 1],
    # 100 x 200 pixels: IoU 1/2
    segzero([100, 100, 199, 299], [120, 120], [180, 180]): [1, 1, 0, 0, 1],
    # points 199 and 0 away: 99.5 in the mean; 200 and 0: 100
    segzero([0, 0, 500, 500], [319, 120], [180, 180]): [1, 1, 0, 0, 1],
    segzero([0, 0, 500, 500], [320, 120], [180, 180]): [1, 1, 0, 0, 0],
    # a point outside of the answer's own box
    segzero([100, 100, 199, 199], [120, 120], [180, 201]): [1, 1, 1, 1, 0],
    segzero([100, 100, 199, 199], [120, 120], [180]): [1, 0, 1, 1, 0],
    segzero([100, 100, 199], [120, 120], [180, 180]): [1, 0, 0, 0, 0],
    # the published example has single quotes, which are no JSON
    segzero([100, 100, 199, 199], [120, 120], [180, 180]).replace('"', "'"): [1, 0, 0, 0, 0],
    # in the thoughts
    '<think>{"bbox": [100, 100, 199, 199], "points_1": [120, 120], "points_2": [180, 180]}': [
        0, 1, 1, 1, 1,
    ],
    "so": [0, 0, 0, 0, 0],
}  # fmt: skip


@pytest.mark.parametrize("text", SEGZERO_CASES)
def test_seg_zero_by_hand(text):
    assert list(segzero_rewards(text, ONE).values()) == SEGZERO_CASES[text]


def test_the_assignment_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (1, 4), (4, 1), (3, 3), (2, 5), (5, 4), (6, 6)):
        for scores in (rng.integers(0, 4, shape).astype(float), rng.random(shape)):
            pairs = best_assignment(scores)
            rows, columns = zip(*pairs)
            assert len(set(rows)) == len(set(columns)) == len(pairs) == min(shape)
            wide = scores if shape[0] <= shape[1] else scores.T
            best = max(
                sum(wide[m, k] for m, k in enumerate(columns_of_rows))
                for columns_of_rows in itertools.permutations(range(max(shape)), min(shape))
            )
            assert sum(scores[pair] for pair in pairs) == pytest.approx(best)
    assert best_assignment(np.zeros((0, 3))) == []


def test_120_objects_are_assigned_at_once():
    rng = np.random.default_rng(1)
    order = rng.permutation(120)
    scores = rng.random((120, 120))
    scores[np.arange(120), order] += 1  # more than any detour can gain
    assert [k for _, k in best_assignment(scores)] == order.tolist()


def test_box_iou_of_the_best_pairs():
    a, b, c = (0, 0, 10, 10), (20, 0, 30, 10), (0, 0, 10, 5)
    assert matched_box_iou([a], [a]) == 1 and matched_box_iou([c], [a]) == 0.5
    assert matched_box_iou([b, c], [a, b]) == 0.75  # 1 and 1/2, of two
    assert matched_box_iou([a], [a, b]) == 0.5 and matched_box_iou([a, b, c], [a]) == 1 / 3
    assert matched_box_iou([], [a]) == 0 and matched_box_iou([(5, 5, 5, 5)], [(5, 5, 5, 5)]) == 0
