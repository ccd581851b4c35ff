"""Ablations that ask the model, on true rollouts of both loops."""

import dataclasses

import pytest
import torch

from rl_train.grpo import group_std
from rl_train.policies.sa2va_queries import segment
from rl_train.rewards import ablations, mask_iou
from rl_train.rewards.ablations import AblationReward
from rl_train.roles import Roles
from rl_train.tasks.ablated import AblatedTask
from tests.updates import roll, task_of

GENERATIONS = 4


@pytest.fixture(scope="module", params=[1, 2])
def rolled(model, batch, request):
    """(task, rollout) of each loop, whose reference is the base."""
    # Wider noise than SIGMA: masks of a group differ.
    options = dict(latent_std=1.0) if request.param == 2 else {}
    task = task_of(model, request.param, Roles(model.trainable), **options)
    return task, roll(model, task, batch, num_generations=GENERATIONS)


def in_the_half_of_the_region(rollout):
    """The rollout with captions that name the upper or lower half, where their region is.

    The sampled captions of a group name one half and the other in turn.
    """
    above = [mask.nonzero()[:, 0].double().mean() < len(mask) / 2 for mask in rollout.batch.masks]
    halves = ["at the top" if is_above else "at the bottom" for is_above in above]
    texts = [
        text + (" at the top", " at the bottom")[i % 2] for i, text in enumerate(rollout.texts)
    ]
    batch = dataclasses.replace(rollout.batch, captions=halves)
    return dataclasses.replace(rollout, batch=batch, texts=texts)


@pytest.mark.parametrize(
    "name", ["confidence", "area", "no_image", "majority", "salient", "position"]
)
def test_it_differs_in_a_group_and_leaves_the_measures_as_they_are(
    rolled, batch, monkeypatch, name
):
    task, rollout = rolled
    # The demo's base finds nothing by a phrase that names nothing; by a caption it finds one.
    monkeypatch.setattr(ablations, "SALIENT", batch.captions[1])
    if name == "position":  # the drawn scenes' captions name none
        rollout = in_the_half_of_the_region(rollout)
    own = task.rewards(rollout)
    found = AblatedTask(task, AblationReward(name), lambda: (0, 0)).rewards(rollout)
    values = found.rewards["ablation_reward"]
    assert values.shape == (len(rollout),) and values.isfinite().all()
    assert values.device.type == "cpu" and values.min() >= 0 and values.max() <= 1
    for component, expected in own.rewards.items():
        assert torch.equal(found.rewards[component], expected), component
    assert group_std(values, GENERATIONS).max() > 0


def test_rows_that_were_not_scored_stay_so(rolled):
    task, rollout = rolled
    own = task.rewards(rollout)
    rewards = {component: values.clone() for component, values in own.rewards.items()}
    for component in task.reward_weights:
        rewards[component][1] = torch.nan
    outcome = dataclasses.replace(own, rewards=rewards)
    for name in ("confidence", "area", "no_image", "majority", "salient", "position"):
        values = AblationReward(name)(task, rollout, outcome, (0, 0)).rewards["ablation_reward"]
        assert values.isnan().nonzero()[:, 0].tolist() == [1], name


@pytest.mark.parametrize("rolled", [1], indirect=True)
def test_no_image_sees_the_text_alone_in_loop_1(rolled):
    """The same text has the same reward in all images."""
    task, rollout = rolled
    texts = ["a red circle", "zebra zebra zebra", "a red circle", "circle"] * len(rollout.batch)
    rollout = dataclasses.replace(rollout, texts=texts)
    values = AblationReward("no_image")(task, rollout, task.rewards(rollout), (0, 0))
    groups = values.rewards["ablation_reward"].view(-1, GENERATIONS)
    assert torch.allclose(groups, groups[:1].expand_as(groups), atol=1e-5)
    assert torch.allclose(groups[:, 0], groups[:, 2], atol=1e-6)
    assert (groups[:, 0] > groups[:, 1]).all()
    # A special token that was sampled does not count as an image.
    marked = dataclasses.replace(rollout, texts=[f"{text} <IMG_CONTEXT>" for text in texts])
    found = AblationReward("no_image")(task, marked, task.rewards(rollout), (0, 0))
    assert torch.equal(found.rewards["ablation_reward"], values.rewards["ablation_reward"])


def test_salient_is_the_iou_with_the_base_s_mask_of_one_phrase(rolled, model, batch, monkeypatch):
    """Of a caption here: the demo's base finds nothing by a phrase that names nothing."""
    task, rollout = rolled
    phrase = batch.captions[1]
    monkeypatch.setattr(ablations, "SALIENT", phrase)
    outcome = task.rewards(rollout)
    images = list(range(len(rollout.batch)))
    masks = segment(model, rollout.features, images, [phrase] * len(images)).masks
    expected = mask_iou(outcome.masks, rollout.repeat_for_rows(masks))
    found = AblationReward("salient")(task, rollout, outcome, (0, 0)).rewards["ablation_reward"]
    assert torch.allclose(found, expected, atol=1e-5) and expected.max() > 0
