"""Loop 2: whom it asks for a description, what it rewards, and which weights its flags train."""

from dataclasses import replace

import pytest
import torch

from rl_train.policies.sa2va_queries import describe
from rl_train.rewards import UserReward, meteor
from rl_train.rewards.ablations import AblationReward
from rl_train.roles import Roles
from rl_train.tasks import CaptionMaskCaption
from rl_train.tasks.base import TaskContext
from sa2va_hf.processing_sa2va import region_grid
from tests.updates import STEPS, equal, roll, task_of

Options = CaptionMaskCaption.Options


@torch.no_grad()
def likelihood_by_hand(model, rollout, row) -> float:
    """exp of the mean log-prob of the prompt's caption as a description of the row's mask."""
    mask, processor = rollout.latents.masks[row], model.processor
    if not mask.any():
        return 0.0
    image, caption = rollout.prompts.image_index[row], rollout.batch.captions[row // 2]
    sizes = processor.grid_size, processor.image_size, processor.rule
    prompts = model.describe_prompts(
        rollout.features, [image], [region_grid(mask[None], *sizes)[0]]
    )
    ids = torch.tensor([model.tokenizer.encode(caption + "<|end|>", add_special_tokens=False)])
    scores = model.score_answers(rollout.features, prompts, ids, ids == ids)
    return scores.logp.mean().exp().item()


def test_it_asks_the_teacher(policy, batch):
    """Other weights in the teacher's bank give other answers than the policy's."""
    model = policy()
    roles = Roles(model.trainable)
    task = task_of(model, 2, roles, max_new_tokens=64, latent_std=0.5)
    rollout = roll(model, task, batch)

    def answers():
        question = rollout.features, rollout.prompts.image_index, rollout.latents.masks, 64
        likelihoods = [likelihood_by_hand(model, rollout, row) for row in range(8)]
        return likelihoods, describe(model, *question)

    policys, _ = answers()
    for tensor in roles.copies["teacher"].values():
        tensor.mul_(1.2)
    with roles.use("teacher"):
        teachers, replies = answers()
    outcome = task.rewards(rollout)
    likelihoods = outcome.rewards["likelihood"].tolist()
    assert likelihoods == pytest.approx(teachers, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(likelihoods, policys)) > 1e-3
    assert outcome.replies == replies
    waiting = task.begin_rewards(rollout)  # asks now
    for tensor in roles.copies["teacher"].values():
        tensor.add_(0.1)
    assert waiting().replies == replies != task.rewards(rollout).replies
    captions = [batch.captions[row // 2] for row in range(8)]
    assert outcome.rewards["meteor"].tolist() == meteor(captions, replies).tolist()


def test_what_is_judged_are_the_sampled_masks(model, batch):
    task = task_of(model, 2, Roles(model.trainable), latent_std=1.0)
    rollout = roll(model, task, batch)
    outcome = task.rewards(rollout)
    assert equal(outcome.masks, rollout.latents.masks)
    for row, mask in enumerate(outcome.masks):
        region = batch.masks[row // 2]
        inter, union = (mask & region).sum(), (mask | region).sum()
        assert outcome.rewards["iou"][row].item() == pytest.approx((inter / union).item())
    assert "on_target" not in outcome.rewards
    alone = [torch.zeros(0, *mask.shape, dtype=torch.bool) for mask in batch.masks]
    rollout.batch = replace(batch, distractors=alone)
    rewards = task.rewards(rollout).rewards
    assert (
        torch.equal(rewards["on_target"], (rewards["iou"] > 0).float())
        and "on_target" not in task.reward_weights
    )


def test_regions_of_the_drawn_masks_are_found_once(model, batch, monkeypatch):
    """They serve the captions and the likelihoods."""
    task = task_of(model, 2, Roles(model.trainable), latent_std=1.0)
    rollout = roll(model, task, batch)
    region_grid, seen = model.processor.region_grid, []
    monkeypatch.setattr(
        model.processor, "region_grid", lambda masks: seen.extend(masks) or region_grid(masks)
    )
    assert task.rewards(rollout).rewards["likelihood"].any()
    drawn = rollout.latents.masks
    sizes = dict.fromkeys(mask.shape for mask in drawn)
    by_size = [mask for size in sizes for mask in drawn if mask.shape == size]
    assert len(sizes) > 1 and len(seen) == 8 and equal(seen, by_size)


def test_against_another_sample_s_target(model, batch):
    """--ablation_reward other, fixed: the same masks and replies are judged by other captions."""
    task = task_of(model, 2, Roles(model.trainable), max_new_tokens=64, latent_std=1.0)
    rollout = roll(model, task, batch)
    outcome = task.rewards(rollout)
    captions = [*batch.captions[1:], batch.captions[0]]
    for kind, wanted in (("other", captions), ("fixed", ["a big red dog"] * 4)):
        found = AblationReward(kind, caption=wanted[0])(task, rollout, outcome, (0, 0))
        about = replace(rollout, batch=replace(batch, captions=wanted))
        likelihood = torch.tensor([likelihood_by_hand(model, about, row) for row in range(8)])
        by_hand = 0.5 * likelihood + 0.5 * meteor(about.repeat_for_rows(wanted), outcome.replies)
        assert torch.allclose(found.rewards["ablation_reward"], by_hand, atol=1e-5)
        assert not torch.allclose(found.rewards["likelihood"], likelihood, atol=1e-3)


def test_a_judge_that_loop_2_does_not_use_has_no_share():
    task = CaptionMaskCaption(Options(), TaskContext(None, None, STEPS, object()))
    assert task.reward_weights == {"meteor": 1.0}


class Judge:
    def score(self, references, captions):
        self.asked = list(zip(references, captions))
        return torch.tensor([0.5, torch.nan] * 4)


def test_with_a_judge_and_a_reward_of_the_users_own(model, batch, tmp_path, monkeypatch):
    """A row without the judge's score has no component that counts; the IoU stays a measurement."""
    (tmp_path / "of_loop_2.py").write_text(
        "seen = {}\n\n"
        "def ones(completions, **kwargs):\n"
        "    seen.update(kwargs, completions=completions)\n"
        "    return [1] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge, reward = Judge(), UserReward("of_loop_2:ones", 2.0)
    context = TaskContext(model, Roles(model.trainable), STEPS, judge, (reward,))
    task = CaptionMaskCaption(Options(latent_std=1.0), context)
    task.set_reward_weights({"meteor": 0.25, "judge": 0.75})
    assert task.reward_weights == {"meteor": 0.25, "judge": 0.75, "ones": 2.0}
    rollout = roll(model, task, batch)
    outcome = task.rewards(rollout)
    captions = [batch.captions[row // 2] for row in range(8)]
    assert judge.asked == list(zip(captions, outcome.replies))
    for name in task.reward_weights:
        assert outcome.rewards[name].isnan().tolist() == [False, True] * 4, name
    assert not outcome.rewards["iou"].isnan().any() and "likelihood" not in outcome.rewards
    seen = reward.function.__globals__["seen"]
    names = set("completions prompts captions replies masks targets image_ids".split())
    names |= {"stopped", "num_tokens", "mask_confidence"}
    assert seen.pop("task") == "loop2"
    assert all((c > 0.5) == m.any() for c, m in zip(seen["mask_confidence"], outcome.masks))
    assert set(seen) == names and all(len(values) == 8 for values in seen.values())
    assert seen["replies"] == outcome.replies and seen["completions"] == rollout.texts
    assert seen["prompts"][0].startswith("Please segment ")
    assert equal(seen["masks"], outcome.masks)
