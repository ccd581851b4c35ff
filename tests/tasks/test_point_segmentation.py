"""Box and points as a task, with a policy of a few lines: SAM2's part is a box that it fills."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train import cli
from rl_train.evaluation import point_metrics
from rl_train.points.parser import NO_JSON, OUTSIDE, REASONS, PointPrompt
from rl_train.rewards.combine import combine
from rl_train.rewards.custom import UserReward
from rl_train.rollout import Batch, Rollout
from rl_train.tasks import MaskCaptionMask
from rl_train.tasks.base import TaskContext
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.utils.rng import RowRNG

H, W = 12, 16


class Policy:
    """Fills the boxes of an answer, less the columns from its negative points on."""

    device, coordinates = torch.device("cpu"), "pixels"

    def __init__(self, said=(), done=None):
        self.said, self.asked, self.drawn = list(said), None, []
        self.done, self.uniforms = done, None

    def point_questions(self, features, image, questions):
        self.asked = questions
        return SimpleNamespace(image_index=image)

    def complete(self, features, prompts, num_generations, max_new_tokens, uniforms=None):
        self.uniforms = uniforms
        assert len(self.said) == num_generations * len(prompts.image_index)
        return self.done, self.said

    def point_masks(self, features, image, answers, passes):
        self.drawn.append((list(image), list(answers), passes))
        confidence = [(0.75, 0.5) if answer.boxes else (0.0, 0.0) for answer in answers]
        masks, without = [], []
        for i, answer in zip(image, answers):
            mask = torch.zeros(features.sizes[i], dtype=torch.bool)
            for x1, y1, x2, y2 in answer.boxes:
                mask[int(y1) : int(y2), int(x1) : int(x2) + 2] = True  # two columns too many
            without.append(mask)
            masks.append(mask.clone())
            for x, y in answer.negative:
                masks[-1][:, int(x) :] = False
        return masks, without, confidence


def region(x1, y1, x2, y2) -> torch.Tensor:
    mask = torch.zeros(H, W, dtype=torch.bool)
    mask[y1:y2, x1:x2] = True
    return mask


TARGETS = [region(2, 2, 6, 8), region(1, 1, 5, 11)]
FEATURES = SimpleNamespace(sizes=[(H, W)] * 2, seen_sizes=[(2 * H, 2 * W)] * 2)
BATCH = Batch([3, 8], TARGETS, ["The cup.", "a mug"], ["i", "j"], [], None)
# In pixels of the image as the model sees it, twice the mask's; the first box is the target's.
GOOD = '{"points": [[8, 10]], "bbox": [4, 4, 12, 16], "negative_points": [[12, 6]]}'
PLAIN = '{"points": [[8, 10]], "bbox": [4, 4, 12, 16]}'
BAD = '{"points": [[8, 10]], "bbox": [4, 4, 12, 16], "negative_points": [[8, 10], [12, 6]]}'
FAR = '{"points": [[80, 10]]}'


def task_of(policy, rewards=(), has_masks=True, **options) -> PointSegmentation:
    options = PointSegmentation.Options(**dict(answer_style="points") | options)
    context = TaskContext(policy, None, 8, None, tuple(rewards), has_masks)
    return PointSegmentation(options, context)


def rollout_of(texts, batch=BATCH) -> Rollout:
    n = len(texts)
    prompts = SimpleNamespace(image_index=[row * len(batch) // n for row in range(n)])
    stopped, valid = torch.ones(n, dtype=torch.bool), torch.ones(n, 3, dtype=torch.bool)
    size = n // len(batch)
    return Rollout(batch, FEATURES, prompts, texts, size, None, None, valid, stopped, None)


def judge(texts, batch=BATCH, **options):
    return task_of(Policy(), **options).rewards(rollout_of(texts, batch))


def test_the_questions_are_of_the_style_and_the_captions():
    policy = Policy()
    task_of(policy).prompts(BATCH, FEATURES)
    assert policy.asked == [
        f'Please find "{x}" with points and negative points.' for x in ("the cup", "a mug")
    ]
    task_of(policy, answer_style="segzero", negative_points="off").prompts(BATCH, FEATURES)
    assert policy.asked[0].startswith("Please find 'the cup' with bbox and points.")


def test_answers_are_judged_by_the_masks_that_they_draw():
    """The box makes a mask of 6 columns, of which 4 are the target's; the negative point cuts 2."""
    found = judge([GOOD, PLAIN, BAD, "so", GOOD, FAR])
    rewards = {name: values.tolist() for name, values in found.rewards.items()}
    # the mug's box is columns 1..5 and rows 1..11: 4 x 6 of 40 pixels and of the 24 in columns 2..6
    shared, union = 3 * 6, 40 + 24 - 18
    assert rewards["iou"] == pytest.approx([1, 24 / 36, 2 / 4, 0, shared / union, 0])
    assert rewards["iou_without"][0] == pytest.approx(24 / 36)
    assert rewards["gain"] == pytest.approx(
        [12 / 36, 0, 0.5 - 24 / 36, 0, shared / union - shared / (40 + 36 - 18), 0]
    )
    assert rewards["format"] == [1, 1, 1, 0, 1, 0]
    # confused are the cup's columns 6 and 7, the mug's 5 and 6: of the true boxes, not the answers'
    assert rewards["negatives"] == pytest.approx([1, 0.5, 0.5, 0, 1, 0])
    unparsed = {name: rows.tolist() for name, rows in found.unparsed.items() if rows.any()}
    assert unparsed == {NO_JSON: [0, 0, 0, 1, 0, 0], OUTSIDE: [0, 0, 0, 0, 0, 1]}
    assert set(found.unparsed) == set(REASONS)
    assert (
        found.point_prompts[1] == PointPrompt(((2, 2, 6, 8),), ((4, 5),))
        and found.point_prompts[3] is None
    )
    assert not found.masks[3].any() and found.masks[0].equal(TARGETS[0])
    assert found.masks_without_negatives[0].sum() == 36


def test_what_counts_of_them():
    assert task_of(Policy()).reward_weights == {"iou": 1, "format": 0.1}
    task = task_of(Policy(), negative_weight=0.3, format_weight=0.2)
    assert task.reward_weights == {"iou": 1, "format": 0.2, "negatives": 0.3}
    found = task.rewards(rollout_of([GOOD, PLAIN, BAD, "so", FAR, FAR]))
    reward = combine(found.rewards, task.reward_weights)
    assert reward[0] == pytest.approx(1.5) and reward[1] == pytest.approx(24 / 36 + 0.35)
    assert reward[3] == reward.min() == 0


def test_two_passes_and_hidden_negatives_reach_sam2_or_not():
    for passes in (1, 2):
        policy = Policy()
        task_of(policy, sam_passes=passes).rewards(rollout_of([GOOD, PLAIN]))
        (image, answers, asked), (_, best, once) = policy.drawn
        assert (image, asked, once) == ([0, 1], passes, 1) and answers[0].negative == ((6, 3),)
        assert best[0] == PointPrompt(((2.0, 2.0, 6.0, 8.0),), best[0].positive)
    hidden = judge([GOOD, BAD], hide_negatives=True)
    assert hidden.rewards["gain"].tolist() == [0, 0] and hidden.masks[0].sum() == 36
    assert hidden.rewards["num_negative"].tolist() == [1, 2]


def test_without_negative_points_nothing_is_asked_of_the_true_region():
    policy = Policy()
    found = task_of(policy, negative_points="off").rewards(rollout_of([GOOD, "so"]))
    [(image, prompts, _)] = policy.drawn
    assert image == [0, 1] and prompts[1] == PointPrompt()
    assert found.rewards["num_negative"].tolist() == [0, 0]
    nothing = Policy()
    task_of(nothing, negative_points="off").rewards(rollout_of(["so", "so"]))
    assert all(prompt == PointPrompt() for _, prompts, _ in nothing.drawn for prompt in prompts)


def test_user_rewards_see_what_was_read():
    def two_points(completions, answers, prompts, masks, mask_confidence, **kwargs):
        assert len(completions) == len(prompts) == len(masks)
        assert mask_confidence == [sure, sure, 0, sure]  # nothing is read of the third
        return [float(answer is not None and len(answer.negative) == 2) for answer in answers]

    reward = UserReward.__new__(UserReward)
    named = dict(spec="m:two_points", name="two_points", function=two_points, asks=None)
    vars(reward).update(named, weight=2.0)
    for sure, hidden in ((0.5, True), (0.75, False)):  # of the mask that is judged
        task = task_of(Policy(), [reward], hide_negatives=hidden)
        found = task.rewards(rollout_of([GOOD, BAD, "so", PLAIN]))
    assert (
        found.rewards["two_points"].tolist() == [0, 1, 0, 0]
        and task.reward_weights["two_points"] == 2
    )


def test_which_object_a_mask_lies_on():
    others = [torch.stack([region(8, 2, 12, 8)]), torch.zeros(0, H, W, dtype=torch.bool)]
    right = GOOD.replace("[4, 4, 12, 16]", "[16, 4, 24, 16]").replace("[12, 6]", "[24, 6]")
    found = judge([GOOD, right, "so", PLAIN], replace(BATCH, distractors=others))
    assert found.rewards["on_target"].tolist() == [1, 0, 0, 1]


def test_flags_that_contradict_each_other_are_refused():
    for flags, words in (
        (dict(max_points=2), "--max_points 2"),
        (dict(negative_points="off", negative_weight=0.3), "--negative_weight"),
        (dict(negative_points="off", hide_negatives=True), "--hide_negatives"),
    ):
        with pytest.raises(ValueError, match=words):
            task_of(Policy(), **flags)


def test_it_is_no_part_of_a_run_by_default_and_trains_alone(tmp_path):
    base = ["--model_path", str(tmp_path), "--data_dir", str(tmp_path), "--output_dir", "o"]
    assert list(cli.parse(base).tasks) == ["mask_caption_mask", "caption_mask_caption"]
    config = cli.parse([*base, "--tasks", "point_segmentation", "--negative_weight", "0.3"])
    [options] = config.tasks.values()
    assert options.negative_weight == 0.3 and options.trainable_modules == ("lora",)
    with pytest.raises(SystemExit, match="ask models of qwen_vl and sa2va"):
        cli.parse([*base, "--tasks", "point_segmentation", "mask_caption_mask"])
    assert not PointSegmentation.asks_teacher and MaskCaptionMask.asks_teacher


# The published rewards, and samples of boxes and points without masks

# In the frame of 840 pixels; the images have 16 x 12, so 52.5 and 70 pixels of it a pixel.
SOLUTIONS = [
    '[{"bbox_2d": [105, 140, 315, 560], "point_2d": [210, 350]}]',
    '[{"bbox_2d": [0, 0, 105, 140], "point_2d": [52, 70]},'
    ' {"bbox_2d": [525, 420, 840, 840], "point_2d": [700, 700]}]',
]
NOTHING = [torch.zeros(H, W, dtype=torch.bool)] * 2
BOXED = replace(BATCH, masks=NOTHING, solutions=SOLUTIONS)


def said(*items: tuple[list, list]) -> str:
    """An answer of VisionReasoner in pixels of the image as the model sees it, 32 x 24."""
    content = [dict(bbox_2d=box, point_2d=point) for box, point in items]
    return f"<think>It is left.</think><answer>{json.dumps(content)}</answer>"


CUP = ([4, 4, 12, 16], [8, 10])  # as the first solution, and as the first target


def published(batch, texts, style="visionreasoner", rewards=(), **options):
    options = dict(answer_style=style, reward_set=style, negative_points="off") | options
    task = task_of(Policy(), rewards, has_masks=batch.has_masks, **options)
    return task, task.rewards(rollout_of(texts, batch))


def test_the_published_rewards_without_masks_by_hand():
    half = ([20, 12, 32, 24], [31, 13])  # one of two boxes; its point is 118 pixels off
    task, found = published(BOXED, [said(CUP), "so", said(half), said()])
    assert task.reward_weights == dict.fromkeys(
        "thinking_format segmentation_format bbox_iou bbox_l1 point_l1 non_repeat".split(), 1.0
    )
    rewards = {name: values.tolist() for name, values in found.rewards.items()}
    assert rewards["thinking_format"] == [1, 0, 1, 1] and rewards["non_repeat"] == [1] * 4
    assert rewards["segmentation_format"] == [2, 0, 2, 0]
    assert rewards["bbox_iou"] == rewards["bbox_l1"] == [1, 0, 0.5, 0]
    assert rewards["point_l1"] == [1, 0, 0, 0]
    assert combine(found.rewards, task.reward_weights).tolist() == [7, 1, 5, 2]
    # measured beside: no mask, and so no IoU with one
    assert "iou" not in rewards and "box_iou" not in rewards
    assert rewards["matched_box_iou"] == [1, 0, 0.5, 0]
    assert rewards["points_in_boxes"][0] == 1 and rewards["points_in_boxes"][2] == 1
    assert found.masks[0].sum() == 36  # SAM2 draws for the pictures all the same


def test_the_published_rewards_of_samples_with_masks():
    """The solution is made of the mask, as the published ones were; the IoU is measured only."""
    task, found = published(BATCH, [said(CUP), said(CUP)])
    rewards = {name: values.tolist() for name, values in found.rewards.items()}
    assert rewards["iou"] == pytest.approx([24 / 36, 18 / (40 + 36 - 18)])
    assert (
        rewards["bbox_l1"] == [1, 0]
        and rewards["bbox_iou"] == [1, 0]
        and "iou" not in task.reward_weights
    )
    two = (
        '<think>a</think><answer>{"bbox": [4, 4, 12, 16], "points_1": [8, 8], "points_2": [8, 12]}'
    )
    _, found = published(BATCH, [two + "</answer>"] * 2, "segzero")
    assert combine(found.rewards, {"bbox_iou": 1, "bbox_l1": 1, "point_l1": 1})[0] == 3


def test_a_solution_of_the_other_set():
    first_point = replace(
        BOXED, solutions=["<box>(105,140),(315,560)</box><points>(210,350),(1,1)</points>"] * 2
    )
    _, found = published(first_point, [said(CUP)] * 2)
    assert found.rewards["point_l1"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="segzero: the solution of i has 1 boxes and 1 points"):
        published(BOXED, ["so"] * 2, "segzero")


def test_user_rewards_see_the_solution_of_the_data_set():
    seen = []

    def columns(completions, solution, **kwargs):
        seen.extend(solution)
        return [0.0] * len(completions)

    reward = UserReward("m:columns", function=columns)
    published(BOXED, ["so"] * 4, rewards=[reward])
    assert seen == [SOLUTIONS[0]] * 2 + [SOLUTIONS[1]] * 2
    seen.clear()
    published(BATCH, ["so"] * 2, rewards=[reward])
    assert seen == [None, None]


def test_repairs_are_counted_and_cost_the_half_for_form():
    found = judge([GOOD, f"```json\n{GOOD}\n```", GOOD.replace("[12, 6]", "[33, 6]"), "so"])
    assert found.rewards["format"].tolist() == [1, 0.5, 1, 0]
    repaired = {name: rows.tolist() for name, rows in found.repaired.items() if rows.any()}
    assert repaired == dict(code_fence=[0, 1, 0, 0], clipped=[0, 0, 1, 0])


def test_measures_of_boxes():
    task = task_of(
        Policy([said(CUP), "so"]),
        has_masks=False,
        answer_style="visionreasoner",
        reward_set="visionreasoner",
        negative_points="off",
    )
    found = task.measure(task.context.policy, BOXED, FEATURES, 8)
    assert found["matched_box_iou"] == pytest.approx([1, 0]) and found["parsable"] == [True, False]
    assert found["positive_in_boxes"] == [1, 0] and found["num_positive"] == [1, 0]
    assert "seg_iou" not in found and {len(column) for column in found.values()} == {2}
    with pytest.raises(ValueError, match="--best_of: needs masks"):
        task.measure_samples(task.context.policy, BOXED, FEATURES, 8, 2)


def test_rewards_that_do_not_fit_are_refused():
    for has_masks, options, words in (
        (True, dict(reward_set="segzero"), "--reward_set segzero: is made for --answer_style"),
        (False, dict(), "--reward_set mask: these samples have boxes and points and no masks"),
        (
            False,
            dict(reward_set="segzero", answer_style="segzero", negative_weight=0.1),
            "--negative_weight: needs masks",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            task_of(Policy(), has_masks=has_masks, **options)


def test_the_earlier_points_system_answers_in_0_to_1():
    task = task_of(Policy(), answer_style="segzero_plus")
    assert task.format.coordinate_scale == "unit"
    assert task_of(Policy(), answer_style="segzero").format.coordinate_scale == "pixels"
    text = '<answer>{"bbox": [0.125, 0.25, 0.375, 0.5], "points": [[0.25, 0.5]]}</answer>'
    [parsed] = task.parse([text], FEATURES, [0])
    assert parsed.prompt == PointPrompt(((2, 3, 6, 6),), ((4, 6),))


# Held out


def test_measures_by_hand():
    """Two answers: of the cup with one negative point, and of the mug, with none."""
    mug = '{"points": [[4, 4]], "bbox": [2, 2, 10, 22]}'
    task = task_of(Policy([GOOD, mug]))
    found = task.measure(task.context.policy, BATCH, FEATURES, 8)
    assert found["seg_iou"] == pytest.approx([1, 40 / 60])
    assert found["seg_iou_without"] == pytest.approx([24 / 36, 40 / 60])
    assert found["gain_negative"] == pytest.approx([12 / 36, 0])
    # the mug's answer has no negative points to swap for, and itself none to be replaced
    assert found["seg_iou_swapped"] == pytest.approx([24 / 36, 40 / 60])
    assert found["gain_over_swapped"] == pytest.approx([12 / 36, 0])
    assert found["gain_over_random"][1] == 0
    assert found["seg_intersection"] == [24, 40] and found["seg_union"] == [24, 60]
    assert found["parsable"] == [True, True] and found["num_negative"] == [1, 0]
    assert found["negative_in_confused"] == [1, 0] and found["negative_in_target"] == [0, 0]
    assert found["positive_in_target"] == [1, 1] and found["caption"] == [GOOD, mug]
    assert found["index"] == [3, 8] and found["reference"] == BATCH.captions
    columns = {len(column) for column in found.values()}
    assert columns == {2}


def test_what_cannot_be_read_counts_as_an_empty_mask():
    task = task_of(Policy(["so", FAR]))
    found = task.measure(task.context.policy, BATCH, FEATURES, 8)
    for name in ("seg_iou", "seg_iou_without", "seg_iou_swapped", "seg_iou_random", "parsable"):
        assert found[name] == [0, 0], name


def test_the_best_of_sampled_answers_by_hand():
    """Two of each image: the region itself and two columns more; none and the region itself."""
    mug = '{"points": [[4, 4]], "bbox": [2, 2, 6, 22]}'
    logp = torch.tensor([[-0.4, -9.0], [-0.1, -0.5], [-0.1, -0.1], [-0.3, -0.1]])
    done = SimpleNamespace(logp=logp, valid=logp > -9)
    task = task_of(Policy([GOOD, PLAIN, "so", mug], done))
    policy = task.context.policy
    found = task.measure_samples(policy, BATCH, FEATURES, 8, 2)
    assert found == dict(
        best_of_G_seg_iou=pytest.approx([1, 1]),
        by_logp_seg_iou=pytest.approx([24 / 36, 0]),
        sampled_seg_iou=pytest.approx([(1 + 24 / 36) / 2, 1 / 2]),
    )
    assert torch.equal(policy.uniforms, RowRNG(0, 0, 0, [3, 8], 2).uniforms(8))
    assert set(found) <= set(point_metrics.METRICS)


def test_the_masks_of_several_boxes_are_matched_one_by_one():
    """Two regions, in any order; one missing, one surplus, one box for both, none and no answer."""

    def said(*boxes):
        items = [
            dict(bbox_2d=[2 * v for v in box], point_2d=[2 * box[0] + 4, 2 * box[1] + 4])
            for box in boxes
        ]
        return f"<think>so</think><answer>{json.dumps(items)}</answer>"

    left, right = (1, 1, 5, 5), (6, 2, 12, 8)
    drawn = segment_alone([left, right])
    batch = replace(
        BATCH,
        masks=[drawn.any(0), drawn[0] & False],
        objects=[drawn, drawn[:0]],
    )
    texts = [said(right, left), said(left), said(left, right, (1, 6, 4, 9)), "so"]
    texts += [said(), said(left), said(left, right), "so"]
    context = TaskContext(Policy(), None, 8, names_nothing=True)
    task = PointSegmentation(PointSegmentation.Options(answer_style="visionreasoner"), context)
    task.set_reward_weights({"matched": 1.0})
    rewards = task.rewards(rollout_of(texts, batch)).rewards
    assert rewards["matched"].tolist() == pytest.approx([1, 1 / 2, 2 / 3, 0, 1, 0, 0, 0])
    assert rewards["missing"].tolist() == [0, 1, 0, 2, 0, 0, 0, 0]
    assert rewards["surplus"].tolist() == [0, 0, 1, 0, 0, 1, 2, 0]


def segment_alone(boxes) -> torch.Tensor:
    """The fake SAM2's mask of each box."""
    prompts = [PointPrompt((box,), ((box[0] + 2, box[1] + 2),)) for box in boxes]
    return torch.stack(Policy().point_masks(FEATURES, [0] * len(boxes), prompts, 1)[0])
