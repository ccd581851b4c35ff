"""Points where a phrase names several regions, or none: only VisionReasoner's form can say it."""

import pytest
import torch

from rl_train.points.parser import AnswerFormat, PointPrompt
from rl_train.rewards.points import box_iou, point_rewards, prompt_of_masks
from rl_train.rewards.published_points import visionreasoner_rewards
from rl_train.rollout import Batch
from rl_train.tasks.base import TaskContext
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.tasks.sft_tasks import true_answer

EMPTY = torch.zeros(8, 10, dtype=torch.bool)
LEFT, RIGHT = EMPTY.clone(), EMPTY.clone()
LEFT[1:4, 1:4], RIGHT[3:8, 5:10] = True, True
FORM = AnswerFormat("visionreasoner")
THOUGHT = "<think>a</think><answer>{}</answer>"


def test_the_true_answer_has_a_box_and_a_point_for_each_region():
    prompt = true_answer(FORM, LEFT | RIGHT, EMPTY, [LEFT, RIGHT])
    assert prompt == prompt_of_masks([LEFT, RIGHT], 1)
    assert prompt.boxes == ((1, 1, 4, 4), (5, 3, 10, 8)) and prompt.positive == ((2, 2), (7, 5))
    assert FORM.parse(FORM.format(prompt), (10, 8)) == prompt
    none = true_answer(FORM, EMPTY, EMPTY, [])
    assert none == PointPrompt() and FORM.format(none) == "<think></think><answer>[]</answer>"


def test_an_empty_answer_is_right_where_nothing_is_named():
    answers = [FORM.parse(THOUGHT.format("[]"), (10, 8)), PointPrompt((), ((2, 2),)), None]
    masks = [EMPTY, LEFT, EMPTY]  # SAM2 draws none without box and point
    rewards = point_rewards(answers, [True] * 3, masks, masks, [EMPTY] * 3, [EMPTY] * 3)
    assert rewards["iou"].tolist() == [1, 0, 0]  # an answer that cannot be read says nothing
    assert rewards["format"].tolist() == [1, 1, 0]
    assert box_iou([(0, 0, 1, 1)], EMPTY) != box_iou([(0, 0, 1, 1)], EMPTY)  # NaN


def test_published_rewards_without_a_true_box():
    item = '{"bbox_2d": [1, 1, 4, 4], "point_2d": [2, 2]}'
    right = visionreasoner_rewards(THOUGHT.format("[]"), PointPrompt())
    wrong = visionreasoner_rewards(THOUGHT.format(f"[{item}]"), PointPrompt())
    one = PointPrompt(((1, 1, 4, 4),), ((2, 2),))
    full = visionreasoner_rewards(THOUGHT.format(f"[{item}]"), one)
    assert right == full and sum(right.values()) == 7
    assert [wrong[name] for name in ("bbox_iou", "bbox_l1", "point_l1")] == [0, 0, 0]
    assert visionreasoner_rewards(THOUGHT.format("[]"), one)["bbox_iou"] == 0


def test_the_other_forms_are_refused_by_name():
    class Policy:
        coordinates, device = "pixels", "cpu"

    context = TaskContext(Policy(), None, 8, names_nothing=True)
    with pytest.raises(ValueError, match="--answer_style segzero: cannot say .* visionreasoner"):
        PointSegmentation(PointSegmentation.Options(), context)
    task = PointSegmentation(PointSegmentation.Options(answer_style="visionreasoner"), context)
    objects = [torch.stack([LEFT, RIGHT]), EMPTY[None][:0]]
    batch = Batch([0, 1], [LEFT | RIGHT, EMPTY], ["a"] * 2, ["b"] * 2, [], None, objects=objects)
    true, none = task.solutions_in_pixels(batch)
    assert [len(true.boxes), len(true.positive)] == [2, 2] and none == PointPrompt()
    assert true.boxes[1] == pytest.approx((5, 3, 10, 8), abs=0.01)
