"""tools/experiments/ensemble.py: the reward is the mean of what several models find."""

from dataclasses import replace

import pytest
import torch

from rl_train.policies.sa2va_queries import segment_model_captions
from rl_train.rewards.iou import on_target
from rl_train.rewards.weights import ComponentWeight
from rl_train.roles import Roles
from rl_train.run.build import weigh_components
from rl_train.tasks.base import TaskContext
from rl_train.utils.io import UserFault
from tests.updates import STEPS, roll
from tools.demo.make_demo import SHIPPED_CHECKPOINT
from tools.experiments.ensemble import FOUND, EnsembleLoop1


def ensemble(model, *listeners) -> EnsembleLoop1:
    options = EnsembleLoop1.Options(listeners=[str(folder) for folder in listeners])
    return EnsembleLoop1(options, TaskContext(model, Roles(model.trainable), STEPS))


def test_each_listener_counts_as_much_as_the_teacher(model, batch):
    task = ensemble(model, SHIPPED_CHECKPOINT, SHIPPED_CHECKPOINT)
    deaf = task.listeners[1]
    with torch.no_grad():  # its masks do not follow from the caption
        for weight in deaf.model.text_hidden_fcs.parameters():
            weight.zero_()
    others = [torch.stack([~mask, mask & False]) for mask in batch.masks]
    rollout = roll(model, task, replace(batch, distractors=others))
    rollout.texts[:4] = rollout.batch.captions  # which the first two find
    outcome = task.rewards(rollout)
    assert task.reward_weights == {FOUND: 1.0}
    found = []
    for listener in (model, *task.listeners):
        images = listener.encode(rollout.batch)
        heard = segment_model_captions(
            listener, images, rollout.prompts.image_index, rollout.texts, STEPS, forced=True
        )
        found.append(on_target(heard.masks, batch.masks, others))
    assert torch.equal(found[0], outcome.rewards["on_target"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    assert torch.allclose(outcome.rewards[FOUND], sum(found) / 3)

    weigh_components([task], [ComponentWeight.parse("loop1.meteor=0.5")])
    assert task.reward_weights == {FOUND: 1.0, "meteor": 0.5}
    assert torch.allclose(task.rewards(rollout).rewards[FOUND], sum(found) / 3)
    weigh_components([task], [ComponentWeight.parse(f"loop1.{FOUND}=0")])
    assert FOUND not in task.rewards(rollout).rewards


def test_what_it_needs_is_named(model, batch):
    with pytest.raises(ValueError, match="--listeners"):
        ensemble(model)
    with pytest.raises(ValueError, match="--listeners .*nowhere"):
        ensemble(model, "nowhere")
    task = ensemble(model, SHIPPED_CHECKPOINT)
    with pytest.raises(UserFault, match="--distractors"):
        task.own_rewards(roll(model, task, replace(batch, distractors=None)))
