"""A run that diverged ends with a sentence and a status, whatever its rewards, and saves nothing
that cannot be gone on from."""

import pytest
import torch

from rl_train.checkpoint import save_load
from rl_train.distributed import process_group
from rl_train.distributed.process_group import raise_on_any_rank
from rl_train.loss import ScoredRollout
from tests.runs import parts_of, run, unmeasured, weights

one_core = pytest.fixture(autouse=True)(unmeasured)


def saved(output) -> list[str]:
    return sorted(folder.name for folder in output.glob("checkpoint_*"))


@pytest.mark.parametrize("how", [dict(save_steps=1), dict(max_steps=1)], ids=str)
def test_a_learning_rate_that_explodes_ends_with_a_sentence(data, tmp_path, how):
    """Also if the last step did it; a checkpoint of weights that cannot answer is not written."""
    with pytest.raises(
        SystemExit, match=r"^rl_train: not finite: rank 0: .* after \d steps; "
    ) as e:
        run(data, tmp_path, learning_rate=1e30, warmup_ratio=0, **dict(max_steps=4) | how)
    assert "holds no checkpoint yet" in str(e.value) and "\n" not in str(e.value)
    assert saved(tmp_path) == []


def poison_after_step_1(monkeypatch, built, role: str):
    """Make the weights of a role NaN once checkpoint_step_1 is written."""
    save = save_load.save

    def then_poison(*args):
        save(*args)
        state = built[0].state
        bank = state.policy.trainable if role == "policy" else state.roles.copies[role]
        with torch.no_grad():
            for weight in bank.values():
                weight.fill_(torch.nan)

    monkeypatch.setattr(save_load, "save", then_poison)


@pytest.mark.parametrize(
    "role, task, fault",
    [
        ("policy", "mask_caption_mask", "loop1: log-probs of sampled answers"),
        ("teacher", "mask_caption_mask", "loop1: mask logits"),
        ("teacher", "caption_mask_caption", "loop2: log-probs of sampled answers"),
        ("reference", "mask_caption_mask", "loop1: the reference's log-probs"),
    ],
)
def test_outputs_that_are_not_finite_stop_a_run_that_learns_nothing(
    data, tmp_path, monkeypatch, role, task, fault
):
    """Equal rewards skip the update and its own check; good checkpoints stay."""
    poison_after_step_1(monkeypatch, parts_of(monkeypatch), role)
    how = dict(
        tasks=task, ablation_reward="constant", save_steps=1, save_total_limit=1, max_steps=4
    )
    with pytest.raises(SystemExit) as stopped:
        run(data, tmp_path, **how)
    sentence = f"rl_train: not finite: rank 0: {fault}"
    assert str(stopped.value).startswith(sentence) and "after 1 steps" in str(stopped.value)
    assert f"the last whole checkpoint is {tmp_path / 'checkpoint_step_1'}" in str(stopped.value)
    assert saved(tmp_path) == ["checkpoint_step_1"]
    assert all(weight.isfinite().all() for weight in weights(tmp_path, 1).values())


def test_weights_that_are_not_finite_are_not_saved(data, tmp_path, monkeypatch):
    built = parts_of(monkeypatch)
    run(data, tmp_path, max_steps=1)
    state = built[0].state
    name = next(iter(state.policy.trainable))
    state.roles.copies["teacher"][name].view(-1)[0] = torch.inf
    with pytest.raises(FloatingPointError, match=f"not finite: teacher: {name}$"):
        save_load.save(tmp_path, state, {}, 1, True)
    with pytest.raises(FloatingPointError, match="not finite: teacher"):
        save_load.save_if_best(tmp_path, state, {}, dict(score=2.0), True)
    assert saved(tmp_path) == ["checkpoint_step_1"]


def test_every_rank_hears_of_a_fault_with_the_sums(monkeypatch):
    """The collective that the step has anyway tells it."""
    said = [({"x": 1}, []), ({"x": 2}, ["loop1: mask logits"])]
    asked = []
    monkeypatch.setattr(process_group, "gather_objects", lambda mine: asked.append(mine) or said)
    with pytest.raises(FloatingPointError, match="^not finite: rank 1: loop1: mask logits$"):
        process_group.all_sum({"x": 1})
    assert asked == [({"x": 1}, ())]
    said[0][1].extend(["loop1: mask logits", "loop2: rewards"])
    with pytest.raises(
        FloatingPointError, match="rank 0: loop2: rewards; rank 0, 1: loop1: mask logits"
    ):
        process_group.all_sum({"x": 1})
    said[0][1].clear()
    said[1][1].clear()
    assert process_group.all_sum({"x": 1}) == {"x": 3}


def test_an_infinite_reward_is_a_fault_and_one_that_is_missing_is_not():
    class Task:
        name = "loop1"

    rewards = torch.tensor([0.5, torch.nan]), torch.tensor([0.5, -torch.inf])
    faults = [ScoredRollout(Task, None, None, reward, None, None).faults() for reward in rewards]
    assert faults == [[], ["loop1: rewards"]]
    raise_on_any_rank(faults[0])
