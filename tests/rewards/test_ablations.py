"""Rewards that must not teach: what counts in place of a task's own, which stays measured."""

import math
from types import SimpleNamespace

import pytest
import torch

from rl_train.grpo import group_advantages, group_std
from rl_train.points.parser import PointPrompt
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.ablations import (
    ABLATIONS,
    Ablation,
    AblationReward,
    ablations_of,
    check_ablation,
    group_iou,
    shift_by_one,
    shuffled,
    word_agreement,
)
from rl_train.rollout import Batch, RewardOutput, Rollout

NAN = math.nan
CAPTIONS = ["a big red dog", "one cat"]  # 4 and 2 words, 3 in the mean
WEIGHTS = {"iou": 1.0}
TURN = (3, 0)


def mask(filled, height=10, width=10) -> torch.Tensor:
    """(height, width) bool with the first `filled` pixels set."""
    return (torch.arange(height * width) < filled).view(height, width)


REGIONS = [mask(40), mask(20)]  # .3 of the image in the mean


def rollout_of(texts, masks=(), captions=CAPTIONS, regions=REGIONS) -> Rollout:
    """Two answers to each of the captions; `masks` are what the task below has found."""
    batch = Batch(list(range(7, 7 + len(captions))), list(regions), captions, [], [], inputs=None)
    rest = dict(ids=None, logp=None, valid=None, stopped=None, hidden=None)
    return Rollout(batch, None, None, list(texts), 2, latents=list(masks), **rest)


class Task:
    """Judges as the loops do: IoU of the masks, and METEOR of the replies if it has any."""

    def __init__(self, weights=WEIGHTS, replies=(), unscored=()):
        self.reward_weights, self.replies, self.unscored = weights, list(replies), list(unscored)

    def rewards(self, rollout: Rollout) -> RewardOutput:
        regions = rollout.repeat_for_rows(rollout.batch.masks)
        rewards = dict(iou=mask_iou(rollout.latents, regions))
        if self.replies:
            rewards["meteor"] = meteor(
                rollout.repeat_for_rows(rollout.batch.captions), self.replies
            )
        for values in rewards.values():
            values[self.unscored] = NAN
        return RewardOutput(rewards, rollout.latents, regions, replies=self.replies)


def controlled(kind, task, rollout, **how):
    """(the true outcome, the controlled one) of a rollout; only the control counts."""
    outcome = task.rewards(rollout)
    before = {name: values.clone() for name, values in outcome.rewards.items()}
    found = AblationReward(kind, **how)(task, rollout, outcome, TURN)
    assert list(found.rewards) == [*before, "ablation_reward"]
    for name, values in before.items():  # the measures of the true reward are untouched
        assert torch.equal(found.rewards[name].nan_to_num(9), values.nan_to_num(9)), name
        assert torch.equal(outcome.rewards[name].nan_to_num(9), values.nan_to_num(9)), name
    assert found.masks is outcome.masks and found.replies is outcome.replies
    return outcome, found.rewards["ablation_reward"]


TEXTS = ["a big red dog", "one", "a cat", "one cat sits on a mat"]  # 4, 1, 2, 6 words
MASKS = [mask(40), mask(10), mask(20), mask(60)]


def test_length_by_hand():
    _, of_texts = controlled("length", Task(), rollout_of(TEXTS, MASKS))
    assert of_texts.tolist() == pytest.approx([-1 / 3, -2 / 3, -1 / 3, -1])
    _, of_masks = controlled("length", Task(replies=TEXTS), rollout_of(["[SEG]"] * 4, MASKS))
    assert of_masks.tolist() == pytest.approx([-1 / 3, -2 / 3, -1 / 3, -1])
    _, of_none = controlled("length", Task(), rollout_of(["", "a"] * 2, MASKS, ["..", "!"]))
    assert of_none.isfinite().all() and of_none[0] > of_none[1]  # true captions without a word


def test_fixed_is_one_caption_for_all():
    """Texts have their METEOR, masks the task's own reward against that caption."""
    _, of_texts = controlled("fixed", Task(), rollout_of(TEXTS, MASKS), caption="one cat")
    assert torch.equal(of_texts, meteor(["one cat"] * 4, TEXTS)) and of_texts[2] > of_texts[0]
    task = Task({"meteor": 0.5}, replies=TEXTS)
    true, of_masks = controlled("fixed", task, rollout_of([""] * 4, MASKS), caption="one cat")
    assert torch.equal(of_masks, 0.5 * of_texts)
    assert true.rewards["meteor"][0] > 0.9  # the same reply is right for its own caption


def test_other_is_the_next_sample_s_target():
    """Each row against its right neighbour's region and caption, the last against the first's."""
    _, found = controlled("other", Task(), rollout_of(TEXTS, MASKS))
    assert found.tolist() == pytest.approx([20 / 40, 10 / 20, 20 / 40, 40 / 60])
    task = Task({"iou": 0.5, "meteor": 0.5}, replies=TEXTS)
    _, both = controlled("other", task, rollout_of([""] * 4, MASKS))
    swapped = meteor([CAPTIONS[1]] * 2 + [CAPTIONS[0]] * 2, TEXTS)
    assert torch.allclose(both, 0.5 * found + 0.5 * swapped)
    captions, regions = ["a", "b", "c"], [mask(10), mask(20), mask(40)]
    rollout = rollout_of([""] * 6, [mask(40)] * 6, captions, regions)
    _, of_three = controlled("other", Task(), rollout)
    assert of_three.tolist() == pytest.approx([0.5, 0.5, 1, 1, 0.25, 0.25])


def test_other_images_have_other_sizes():
    """A region is resized to the image."""
    rollout = rollout_of([""] * 4, [mask(200, 20, 20)] * 2 + [mask(50)] * 2)
    rollout.batch.masks[0] = mask(100, 20, 20)  # five rows, of which two are kept
    _, found = controlled("other", Task(), rollout)
    assert found.tolist() == pytest.approx([80 / 200, 80 / 200, 20 / 50, 20 / 50])
    corner = torch.tensor([[True, False], [False, False]])
    large = torch.zeros(4, 6, dtype=torch.bool)
    large[:2, :3] = True
    batch = Batch([0, 1], [corner, large], ["a", "b"], [], [], inputs=None)
    resized = shift_by_one(batch).masks
    assert [mask.tolist() for mask in resized] == [corner.tolist(), large.tolist()]


@pytest.mark.parametrize("kind", ablations_of("custom"))
def test_what_the_task_did_not_score_is_not_scored(kind):
    task = Task(replies=["a cat"] * 4, unscored=[1])
    _, found = controlled(kind, task, rollout_of(TEXTS, MASKS), caption="a dog", seed=1)
    assert found.shape == (4,) and found.isnan().sum() == 1
    if kind != "shuffled":  # which moves it
        assert found[1].isnan()


def test_shuffled_follows_from_seed_step_task_and_sample():
    texts, regions = [""] * 16, [mask(100)] * 8
    rollout = rollout_of(texts, [mask(5 * i + 5) for i in range(16)], ["a"] * 8, regions)
    true, found = controlled("shuffled", Task(), rollout, seed=5)
    by_hand = shuffled(true.rewards["iou"], 2, (5, *TURN), rollout.batch.index)
    assert torch.equal(found, by_hand) and not torch.equal(found, true.rewards["iou"])
    elsewhere = AblationReward("shuffled", 5)(Task(), rollout, true, (3, 1))
    assert not torch.equal(elsewhere.rewards["ablation_reward"], found)


@pytest.mark.parametrize("seed", range(5))
def test_shuffled_rewards_stay_in_their_group(seed):
    rewards = torch.arange(32.0)
    rewards[5] = NAN
    turned = shuffled(rewards, 8, (seed, 3), [7, 1, 4, 9])
    for before, after in zip(rewards.view(4, 8), turned.view(4, 8)):
        assert sorted(before.nan_to_num(99).tolist()) == sorted(after.nan_to_num(99).tolist())
        assert not torch.equal(before, after)
    orders = {tuple((after % 8).tolist()) for after in turned.view(4, 8)[[0, 2, 3]]}
    assert len(orders) == 3  # each in an order of its own
    again, other = (shuffled(rewards, 8, (seed, step), [7, 1, 4, 9]) for step in (3, 4))
    assert torch.equal(again.nan_to_num(99), turned.nan_to_num(99))
    alone = shuffled(rewards[8:16], 8, (seed, 3), [1])
    assert torch.equal(alone, turned[8:16])  # whatever else is in the batch
    assert not torch.equal(other.nan_to_num(99), turned.nan_to_num(99))
    assert rewards[0] == 0  # the argument is not touched


def test_constant_rewards_teach_nothing():
    task = Task(unscored=[2])
    _, constant = controlled("constant", task, rollout_of(TEXTS, MASKS))
    assert constant.isnan().tolist() == [False, False, True, False]
    assert len(set(constant[[0, 1, 3]].tolist())) == 1
    assert group_advantages(constant, 2).tolist() == [0, 0, 0, 0]
    assert group_std(constant[:2], 2).tolist() == [0]


def of_task(name, rollout, ablation, **outcome) -> torch.Tensor:
    """The ablation's reward (N,) of a rollout of the task `name`, whose policy is on the CPU."""
    context = SimpleNamespace(policy=SimpleNamespace(device="cpu"))
    task = SimpleNamespace(name=name, context=context, reward_weights=WEIGHTS)
    outcome = RewardOutput({"iou": torch.zeros(len(rollout))}, rollout.latents, **outcome)
    return AblationReward(ablation)(task, rollout, outcome, TURN).rewards["ablation_reward"]


def test_a_new_one_is_a_function_and_a_line(monkeypatch):
    def first_letter(rows):
        """Return 1 for a text that begins with an a."""
        return torch.tensor([float(text.startswith("a")) for text in rows.rollout.texts])

    monkeypatch.setitem(ABLATIONS, "first_letter", Ablation(first_letter, "text begins with a"))
    assert "first_letter" in ablations_of("loop1")
    _, found = controlled("first_letter", Task(unscored=[2]), rollout_of(TEXTS, MASKS))
    assert found.tolist()[:2] == [1, 0] and found[2].isnan() and found[3] == 0


def test_agreement_by_hand():
    """Texts by Dice of their words, masks by IoU, each with the others of its group."""
    found = word_agreement(["a red dog", "a red dog", "a cat", "", "b", "b", "b", "b"], 4)
    assert found.tolist() == pytest.approx([1.4 / 3, 1.4 / 3, 0.8 / 3, 0, 1, 1, 1, 1])
    found = group_iou([mask(40), mask(20), mask(10), mask(0), mask(0), mask(0)], 3)
    assert found.tolist() == pytest.approx([0.75 / 2, 1 / 2, 0.75 / 2, 1, 1, 1])
    texts = of_task("loop1", rollout_of(TEXTS, MASKS), "majority")
    assert texts.tolist() == word_agreement(TEXTS, 2).tolist()
    masks = of_task("loop2", rollout_of(TEXTS, MASKS), "majority")
    assert masks.tolist() == pytest.approx([0.25, 0.25, 1 / 3, 1 / 3])


def test_confidence_and_position_by_hand():
    """Regions and masks fill rows from the top: of `mask(60)` 5/6 lie in the upper half."""
    sure = [0.9, 0.6, 0.0, 0.7]
    rollout = rollout_of(TEXTS, MASKS, ["in the top", "an owl"], [mask(40), mask(60)])
    found = of_task("points", rollout, "confidence", mask_confidence=sure)
    assert found.tolist() == pytest.approx(sure)
    said = ["at the top", "bottom right", "an owl", "the upper left"]
    spoken = rollout_of(said, MASKS, ["a", "b"], [mask(40), mask(60)])
    assert of_task("loop1", spoken, "position").tolist() == pytest.approx([1, 0, 0, 5 / 12])
    rollout.latents[1] = mask(80)
    assert of_task("loop2", rollout, "position").tolist() == pytest.approx([1, 5 / 8, 0, 0])


def test_area_and_any_object_by_hand():
    """The first image's other object is the last ten pixels, the second's has 80 from the top."""
    rollout = rollout_of(TEXTS, [mask(40), ~mask(80), mask(0), mask(60)])
    rollout.batch.distractors = [~mask(90)[None], mask(80)[None]]
    areas = of_task("loop1", rollout, "area")
    assert areas.tolist() == pytest.approx([0.4, 0.2, 0, 0.6])
    assert torch.equal(of_task("points", rollout, "area"), -areas)
    _, found = controlled("any_object", Task(), rollout)
    assert found.tolist() == pytest.approx([1, 1 / 2, 0, 3 / 4])


def points(*negative, positive=((50.0, 50.0),), boxes=((10.0, 10.0, 90.0, 90.0),)):
    return PointPrompt(boxes=boxes, positive=positive, negative=negative)


@pytest.mark.parametrize(
    "ablation, expected",
    [
        ("away", [0, 1, 0.5, 0, 0, 1]),
        ("near", [0, 1, 0, 0, 0, 0]),
        ("edge", [0, 0, 0.5, 0, 0, 1]),
        ("offset", [-0.2, 0, -(0.2 + math.dist((12, 50), (70, 50)) / 100) / 2, -1, -1, -0.5]),
    ],
)
def test_habits_of_negative_points_by_hand(ablation, expected):
    """The positive point lies around the middle of an image of 100 x 100."""
    prompts = [
        points((50.0, 50.0)),
        points((70.0, 50.0)),
        points((50.0, 50.0), (12.0, 50.0)),
        points(),
        None,
        points((20.0, 50.0)),
    ]
    region = mask(40, 100, 100)
    rollout = rollout_of([""] * 6, [region] * 6, ["a"] * 3, [region] * 3)
    found = of_task("points", rollout, ablation, point_prompts=prompts)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert group_std(found, 2).max() > 0  # a group's rewards differ


def test_hidden_is_the_reward_of_the_masks_without_negative_points():
    rollout = rollout_of([""] * 4, MASKS, regions=REGIONS)
    without = [mask(40), mask(20), mask(20), mask(40)]
    outcome = dict(targets=rollout.repeat_for_rows(REGIONS), masks_without_negatives=without)
    found = of_task("points", rollout, "hidden", **outcome)
    assert found.tolist() == pytest.approx([1, 0.5, 1, 0.5])


def test_an_ablation_of_other_tasks_is_refused_in_a_sentence():
    assert check_ablation("near", ["points"]) is None
    assert check_ablation("shuffled", ["loop1", "of_a_user"]) is None
    with pytest.raises(ValueError, match="^--ablation_reward near: is of points, not of .* loop1,"):
        check_ablation("near", ["loop1"])
    with pytest.raises(ValueError, match="--ablation_reward salient: is of loop1 and loop2 and "):
        check_ablation("salient", ["loop2", "points"])
