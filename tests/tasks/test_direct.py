"""The direct tasks and the weights of reward components: what is rewarded, what not computed."""

from dataclasses import replace

import pytest
import torch

from rl_train.rewards import LLMJudge, mask_iou, meteor
from rl_train.rewards.cider import cider, document_frequencies
from rl_train.rewards.weights import ComponentWeight
from rl_train.roles import Roles
from rl_train.run.build import weigh_components
from rl_train.tasks import TASKS, caption_mask_caption, mask_caption_mask
from rl_train.tasks.base import TaskContext
from tests.updates import STEPS, equal, roll


class Judge:
    """Gives the words that both captions share as its score."""

    def __init__(self):
        self.asked = []

    def score(self, references, captions):
        self.asked += zip(references, captions)
        pairs = zip(references, captions)
        return torch.tensor([len(set(a.split()) & set(b.split())) / 10 for a, b in pairs])


def build(model, name, *weights, judge=None, use_llm_judge=False, options=None, **context):
    """A task as a run with --reward_weights builds it."""
    kind, roles = TASKS[name], Roles(model.trainable)
    context = TaskContext(model, roles, STEPS, judge, use_llm_judge=use_llm_judge, **context)
    task = kind(kind.Options(**(options or {})), context)
    weigh_components([task], list(map(ComponentWeight.parse, weights)))
    return task


SPREAD = dict(latent_std=1.0)  # masks that differ


def test_referring_rewards_the_true_mask(model, batch):
    task = build(model, "referring", options=SPREAD)
    assert task.reward_weights == {"iou": 1.0} and not task.asks_teacher
    rollout = roll(model, task, batch)
    outcome = task.rewards(rollout)
    assert set(outcome.rewards) == {"iou"} and equal(outcome.masks, rollout.latents.masks)
    targets = [batch.masks[row // 2] for row in range(8)]
    assert torch.equal(outcome.rewards["iou"], mask_iou(rollout.latents.masks, targets))
    assert len(outcome.rewards["iou"].unique()) > 2
    weights = ("referring.box_iou=.5", "referring.centre=.25", "referring.iou=0")
    parts = build(model, "referring", *weights, options=SPREAD)
    assert parts.reward_weights == {"box_iou": 0.5, "centre": 0.25}
    rewards = parts.rewards(rollout).rewards
    assert set(rewards) == {"iou", "box_iou", "centre"}  # the IoU is measured all the same
    assert all(((values >= 0) & (values <= 1)).all() for values in rewards.values())


def test_captioning_rewards_the_true_caption(model, batch):
    task = build(model, "captioning")
    assert task.reward_weights == {"meteor": 1.0} and not task.asks_teacher
    rollout = roll(model, task, batch)
    outcome = task.rewards(rollout)
    captions = [batch.captions[row // 2] for row in range(8)]
    assert set(outcome.rewards) == {"meteor"}
    assert torch.equal(outcome.rewards["meteor"], meteor(captions, rollout.texts))
    alone = [torch.zeros(0, *mask.shape, dtype=torch.bool) for mask in batch.masks]
    rollout.batch = replace(batch, distractors=alone)
    assert "on_target" not in task.rewards(rollout).rewards  # no mask is answered


def test_captioning_by_cider_and_the_judge(model, batch):
    judge = Judge()
    frequencies = document_frequencies([caption] for caption in batch.captions)
    weights = ("captioning.meteor=0", "captioning.cider=2", "captioning.judge=1")
    task = build(model, "captioning", *weights, judge=judge, frequencies=frequencies)
    assert task.reward_weights == {"cider": 2.0, "judge": 1.0}
    rollout = roll(model, task, batch)
    rewards = task.rewards(rollout).rewards
    captions = [batch.captions[row // 2] for row in range(8)]
    assert judge.asked == list(zip(captions, rollout.texts)) and set(rewards) == {"cider", "judge"}
    by_hand = cider([[caption] for caption in captions], rollout.texts, frequencies) / 10
    assert torch.equal(rewards["cider"], by_hand.float()) and rewards["cider"].any()
    by_default = build(model, "captioning", judge=judge, use_llm_judge=True)
    assert by_default.reward_weights == {"meteor": 0.25, "judge": 0.75}


def test_loop_1_by_weights(model, batch, monkeypatch):
    """Weight 0 asks neither judge nor teacher; --use_llm_judge alone gives the judge a share."""
    find, asked = mask_caption_mask.segment_model_captions, []
    monkeypatch.setattr(
        mask_caption_mask,
        "segment_model_captions",
        lambda *args, **kwargs: asked.append(1) or find(*args, **kwargs),
    )
    judge, name = Judge(), "mask_caption_mask"
    weights = ("loop1.iou=1", "loop1.meteor=.25", "loop1.judge=.75")
    task = build(model, name, *weights, judge=judge)
    assert task.reward_weights == {"iou": 1.0, "meteor": 0.25, "judge": 0.75}
    assert build(model, name, judge=judge, use_llm_judge=True).reward_weights == task.reward_weights
    assert build(model, name, judge=judge).reward_weights == {"iou": 1.0}
    rollout = roll(model, task, batch)
    assert set(task.rewards(rollout).rewards) == {"iou", "meteor", "judge"}
    assert len(judge.asked) == 8 and len(asked) == 1
    without = build(model, name, "loop1.judge=0", "loop1.iou=0", judge=judge, use_llm_judge=True)
    assert without.reward_weights == {"meteor": 0.25}
    outcome = without.rewards(rollout)
    assert set(outcome.rewards) == {"meteor"} and len(judge.asked) == 8 and len(asked) == 1
    assert equal(outcome.masks, [batch.masks[row // 2] for row in range(8)])


def test_loop_2_by_weights(model, batch, monkeypatch):
    """Captions of the teacher and likelihoods without weight are not computed."""
    calls = []
    for function in ("describe_later", "caption_likelihood"):
        real = getattr(caption_mask_caption, function)
        monkeypatch.setattr(
            caption_mask_caption,
            function,
            lambda *args, name=function, real=real: calls.append(name) or real(*args),
        )
    name = "caption_mask_caption"
    task = build(model, name, options=SPREAD)
    assert task.reward_weights == {"meteor": 1.0}
    rollout = roll(model, task, batch)

    def measured(*weights):
        calls.clear()
        task = build(model, name, *weights, options=SPREAD)
        return set(task.rewards(rollout).rewards), list(calls)

    assert measured() == ({"meteor", "iou"}, ["describe_later"])
    both = {"meteor", "iou", "likelihood"}
    assert measured("loop2.likelihood=.5") == (both, ["describe_later", "caption_likelihood"])
    alone = ("loop2.likelihood=1", "loop2.meteor=0")
    assert measured(*alone) == ({"iou", "likelihood"}, ["caption_likelihood"])
    assert measured("loop2.iou=1", "loop2.meteor=0") == ({"iou"}, [])


def test_weights_of_a_task_of_the_users(model):
    """Its components are those that it weighs; a wrong name is known when it is built."""
    task = build(model, "captioning")
    task.name, task.reward_weights, task.reward_components = "mine", {"words": 1.0}, ()
    weigh_components([task], [ComponentWeight("mine", "words", 0.5)])
    assert task.reward_weights == {"words": 0.5}
    with pytest.raises(ValueError, match="the components of mine are mine.words"):
        weigh_components([task], [ComponentWeight("mine", "meteor", 0.5)])


def test_a_judge_is_connected_for_a_weight(monkeypatch):
    from rl_train.config.grpo_config import RewardConfig
    from rl_train.run.build import build_judge

    monkeypatch.setattr(LLMJudge, "__init__", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(LLMJudge, "fault", lambda self: None)
    assert build_judge(RewardConfig(reward_weights=["loop1.judge=.75"]), 0)
    assert build_judge(RewardConfig(reward_weights=["loop1.judge=0"]), 0) is None
    assert build_judge(RewardConfig(), 0) is None


def test_a_phrase_that_names_nothing_wants_no_mask(model, batch):
    """Its reward is 1 of an empty mask alone, by every component."""
    weights = ("referring.centre=1", "referring.box_iou=1")
    task = build(model, "referring", *weights, options=SPREAD)
    rollout = roll(model, task, batch)
    sizes = [mask.shape for mask in batch.masks]
    objects = [
        batch.masks[0][None],
        *(torch.zeros(0, *size, dtype=torch.bool) for size in sizes[1:]),
    ]
    empty = [torch.zeros(size, dtype=torch.bool) for size in sizes[1:]]
    rollout.batch = replace(batch, objects=objects, masks=[batch.masks[0], *empty])
    masks = rollout.latents.masks
    masks[2] = torch.zeros_like(masks[2])
    rewards = task.rewards(rollout).rewards
    for name in ("iou", "centre", "box_iou"):
        assert rewards[name][2:].tolist() == [1.0] + [float(not mask.any()) for mask in masks[3:]]
    targets = [batch.masks[0]] * 2
    assert torch.equal(rewards["iou"][:2], mask_iou(masks[:2], targets))
