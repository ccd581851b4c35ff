"""Loop 1: whom it asks for a mask, what it rewards, and that judging changes nothing."""

import gc
import weakref
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from rl_train.policies.sa2va_queries import segment, segment_generated
from rl_train.rewards import UserReward, meteor
from rl_train.rewards.combine import combine
from rl_train.roles import Roles
from rl_train.tasks import MaskCaptionMask
from rl_train.tasks.base import TaskContext
from tests.updates import STEPS, equal, roll, task_of


def silenced(policy):
    """A policy that does not come to say [SEG]."""
    model = policy()
    model.model.language_model.lm_head.weight.data[model.model.seg_id] = 0
    return model


@pytest.mark.parametrize("how", ["forced", "sampled"])
def test_it_asks_the_teacher_as_the_flag_says(policy, batch, how):
    """Other weights in the teacher's bank give other masks.

    Where nobody says [SEG], only a forced answer finds.
    """

    def judged_by(model, scale):
        roles = Roles(model.trainable)
        task = task_of(model, 1, roles, teacher_answer=how)
        rollout = roll(model, task, batch)
        rollout.texts[:] = rollout.repeat_for_rows(batch.captions)  # of which masks are found
        rollout.texts[3] = " "  # is not asked about
        for tensor in roles.copies["teacher"].values():
            tensor.mul_(scale)
        return rollout, roles, task.rewards(rollout)

    model = policy()
    rollout, roles, outcome = judged_by(model, 1.2)
    rows = [row for row in range(8) if row != 3]
    asked = rollout.features, [row // 2 for row in rows], [rollout.texts[row] for row in rows]
    policys = segment(model, *asked).masks
    with roles.use("teacher"):
        if how == "forced":
            teachers = segment(model, *asked).masks
        else:
            teachers = segment_generated(model, *asked, STEPS).masks
    assert equal([outcome.masks[row] for row in rows], teachers) and not equal(teachers, policys)
    assert not outcome.masks[3].any()
    rewards = outcome.rewards["iou"]
    assert rewards[3] == 0 and rewards.max() > 0 and outcome.replies == []
    rewards = judged_by(silenced(policy), 1)[2].rewards["iou"]
    assert (rewards.max() > 0) == (how == "forced")


def test_it_asks_when_rewards_begin(policy, batch):
    """By the teacher of then, about that rollout, which the task does not keep."""
    model = policy()
    roles = Roles(model.trainable)
    task = task_of(model, 1, roles)
    rollouts = [roll(model, task, batch) for _ in range(2)]
    for rollout, texts in zip(rollouts, (batch.captions, batch.captions[::-1])):
        rollout.texts[:] = rollout.repeat_for_rows(texts)
    begun = [task.begin_rewards(rollout) for rollout in rollouts]
    before = [task.rewards(rollout).masks for rollout in rollouts]
    for tensor in roles.copies["teacher"].values():
        tensor.mul_(1.2)
    assert all(equal(rewards().masks, masks) for rewards, masks in zip(begun, before))
    assert not equal(*before) and not equal(task.rewards(rollouts[0]).masks, before[0])
    kept = weakref.ref(rollouts[0])
    del begun, rollouts, rollout
    gc.collect()
    assert kept() is None


def test_the_reward_is_the_iou_with_the_region_by_hand(model, batch):
    task = task_of(model, 1, Roles(model.trainable))
    rollout = roll(model, task, batch)
    outcome = task.rewards(rollout)
    assert task.reward_weights == {"iou": 1.0} and set(outcome.rewards) == {"iou"}
    # what its mask does not cover of each image is another object: one measurement more
    rollout.batch = replace(batch, distractors=[~mask[None] for mask in batch.masks])
    rewards = task.rewards(rollout).rewards
    assert torch.equal(rewards["iou"], outcome.rewards["iou"]) and set(rewards) == {
        "iou",
        "on_target",
    }
    for row, mask in enumerate(outcome.masks):
        region = batch.masks[row // 2]
        inside, outside = ((mask & one).sum() / (mask | one).sum() for one in (region, ~region))
        assert rewards["on_target"][row] == (inside > outside)
    assert 0 < rewards["on_target"].mean() < 1
    for row, mask in enumerate(outcome.masks):
        region = batch.masks[row // 2]
        inter, union = (mask & region).sum(), (mask | region).sum()
        assert outcome.rewards["iou"][row].item() == pytest.approx((inter / union).item())


def test_a_reward_of_the_object_found_alone(model, batch):
    """It asks the teacher; 1 where its mask lies on the region, 0 on another object or on none."""
    roles = Roles(model.trainable)
    task = task_of(model, 1, roles)
    task.set_reward_weights({"on_target": 1.0})
    rollout = roll(model, task, batch)
    # The other object of each image is all that is not its region.
    rollout.batch = replace(batch, distractors=[~mask[None] for mask in batch.masks])
    rollout.texts[::2] = batch.captions
    for tensor in roles.copies["teacher"].values():
        tensor.mul_(1.2)
    outcome = task.rewards(rollout)
    asked = rollout.features, [row // 2 for row in range(8)], rollout.texts
    with roles.use("teacher"):
        masks = segment(model, *asked).masks
    assert equal(outcome.masks, masks) and not equal(masks, segment(model, *asked).masks)
    by_hand = []
    for row, mask in enumerate(masks):
        region = batch.masks[row // 2]
        inside, outside = ((mask & one).sum() / (mask | one).sum() for one in (region, ~region))
        by_hand.append(float(inside > outside))
    assert set(by_hand) == {0, 1}
    assert task.reward_weights == {"on_target": 1.0}
    assert combine(outcome.rewards, task.reward_weights).tolist() == by_hand


class Judge:
    """Gives each caption the next of its scores."""

    def __init__(self, scores):
        self.scores, self.asked = torch.tensor(scores), []

    def score(self, references, captions):
        self.asked += zip(references, captions)
        return self.scores


def test_with_a_judge_and_a_reward_of_the_users_own(model, batch, tmp_path, monkeypatch):
    """Components by hand; a row that the judge did not score is not scored by anything that counts.

    The user's function sees lists of one entry a row.
    """
    (tmp_path / "of_loop_1.py").write_text(
        "seen = {}\n\n"
        "def words(completions, **kwargs):\n"
        "    seen.update(kwargs, completions=completions)\n"
        "    return [len(text.split()) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = UserReward("of_loop_1:words", 0.1)
    scores = [0.5, 1.0, torch.nan, 0.0, 0.2, 0.4, 0.6, 0.8]
    judge = Judge(scores)
    context = TaskContext(model, Roles(model.trainable), STEPS, judge, (reward,))
    task = MaskCaptionMask(MaskCaptionMask.Options(), context)
    assert task.reward_weights == {"iou": 1.0, "meteor": 0.25, "judge": 0.75, "words": 0.1}
    rollout = roll(model, task, batch)
    rewards, masks = (outcome := task.rewards(rollout)).rewards, outcome.masks
    captions = [batch.captions[row // 2] for row in range(8)]
    assert judge.asked == list(zip(captions, rollout.texts))
    parts, kept = meteor(captions, rollout.texts), [row for row in range(8) if row != 2]
    assert torch.equal(rewards["meteor"][kept], parts[kept])
    assert torch.equal(rewards["judge"][kept], torch.tensor(scores)[kept])
    assert all(rewards[name][2].isnan() for name in task.reward_weights)
    assert not any(rewards[name][kept].isnan().any() for name in task.reward_weights)
    assert rewards["words"][0] == len(rollout.texts[0].split())
    seen = reward.function.__globals__["seen"]
    names = set("completions prompts captions masks targets image_ids stopped num_tokens".split())
    names.add("mask_confidence")
    assert seen.pop("task") == "loop1"
    assert all((sure > 0.5) == mask.any() for sure, mask in zip(seen["mask_confidence"], masks))
    assert set(seen) == names and all(len(values) == 8 for values in seen.values())
    assert seen["captions"] == captions and seen["completions"] == rollout.texts
    assert equal(seen["masks"], masks) and seen["targets"][7] is batch.masks[3]
    assert seen["image_ids"] == [batch.image_ids[row // 2] for row in range(8)]
    assert len(set(batch.image_ids)) == 4


@pytest.mark.parametrize("loop", [1, 2])
def test_judging_writes_nothing_into_the_rollout(model, batch, loop):
    task = task_of(model, loop, Roles(model.trainable))
    rollout = roll(model, task, batch)
    before = deepcopy(vars(rollout))
    outcome = task.rewards(rollout)
    assert equal(vars(rollout), before) and set(vars(rollout)) == set(before)
    assert all(values.device.type == "cpu" for values in outcome.rewards.values())
    assert {values.shape for values in outcome.rewards.values()} == {(8,)}
    again = task.rewards(rollout)
    assert equal(again, outcome)


def test_its_prompts_are_about_the_regions(model, batch):
    features = model.encode(batch)
    prompts = task_of(model, 1).prompts(batch, features)
    assert prompts.image_index == [0, 1, 2, 3]
    assert equal(prompts.prompt_masks, [grid[None] for grid in batch.inputs.prompt_masks])
