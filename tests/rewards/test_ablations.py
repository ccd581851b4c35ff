"""Rewards that must not teach: what counts in place of a task's own, which stays measured."""

import math

import pytest
import torch

from rl_train.grpo import group_advantages, group_std
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.ablations import ABLATION_REWARDS, AblationReward, shift_by_one, shuffled
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
        regions = rollout.of_rows(rollout.batch.masks)
        rewards = dict(iou=mask_iou(rollout.latents, regions))
        if self.replies:
            rewards["meteor"] = meteor(rollout.of_rows(rollout.batch.captions), self.replies)
        for values in rewards.values():
            values[self.unscored] = NAN
        return RewardOutput(rewards, rollout.latents, self.replies)


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
    """Of texts their METEOR; of masks what the task says of them against that caption."""
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


@pytest.mark.parametrize("kind", ABLATION_REWARDS)
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
