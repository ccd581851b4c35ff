"""Effects of flags on a run: weights of loops, shares of rewards, controls, the average."""

import pytest
import torch

from rl_train.loss import MicroBatchLoss
from tests.runs import complaint_of, curve, events, flags, parts_of, rollouts, run, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)


@pytest.mark.parametrize("off, left", [("loop1_weight", "loop2"), ("loop2_weight", "loop1")])
def test_weight_zero_leaves_a_loop_out(data, tmp_path, off, left):
    output = run(data, tmp_path, max_steps=1, num_generations=4, **{off: 0})
    tags = events(output).Tags()["scalars"]
    assert {tag.split("/")[0] for tag in tags if tag.startswith("loop")} == {left}
    assert {line["task"] for line in rollouts(output)} == {left}
    assert curve(output, "total_loss") == curve(output, f"{left}/loss")
    reached = {"lora", "mlp1"} | ({"text_hidden_fcs", "sam2"} if left == "loop2" else set())
    assert {tag.split("/")[1] for tag in tags if tag.startswith("grad_norm/")} == reached


def test_dr_grpo_without_a_kl(data, tmp_path, monkeypatch):
    """Advantages are not divided by the group's spread; the reference is not asked."""
    monkeypatch.setattr("rl_train.train.reference_scores", None)
    output = run(data, tmp_path, max_steps=1, kl_coef=0, loss_type="dr_grpo", num_generations=4)
    lines = rollouts(output)
    groups = [lines[i : i + 4] for i in range(0, len(lines), 4)]
    for group in groups:
        mean = sum(line["reward"] for line in group) / 4
        for line in group:
            assert line["advantage"] == pytest.approx(line["reward"] - mean, abs=1e-3)
    assert any(line["advantage"] for line in lines)
    tags = events(output).Tags()["scalars"]
    assert {"loop1/policy_loss", "loop2/latent_clip_frac", "loop2/sampler_k3"} <= set(tags)
    assert not [tag for tag in tags if "kl" in tag]


def test_remedies_of_one_run(data, tmp_path, monkeypatch):
    """Lengths count, cut answers are left out, the batch's std divides."""
    seen, forward = [], MicroBatchLoss.forward

    def watched(module, micro_batch):
        loss, statistics = forward(module, micro_batch)
        seen.append((micro_batch.scored, micro_batch.rows, statistics["entropy"][1]))
        return loss, statistics

    monkeypatch.setattr(MicroBatchLoss, "forward", watched)
    flags = dict(mask_truncated_completions="", overlong_buffer=4)
    flags |= dict(scale_rewards="batch", temperature=2, num_generations=4)
    how = dict(gradient_accumulation_steps=2, batch_size=1, max_steps=1, save_steps=1)
    output = run(data, tmp_path, **flags, **how)
    lines, cut = rollouts(output), 0
    for line in lines:
        main = line.get("iou") if line["task"] == "loop1" else None
        if main is not None:
            assert line["reward"] == pytest.approx(main + line["overlong"], abs=1e-5)
        cut += line["overlong"] == -1
    assert cut
    for loop in ("loop1", "loop2"):
        rewards = torch.tensor([line["reward"] for line in lines if line["task"] == loop])
        groups = rewards.view(2, 4)
        expected = (groups - groups.mean(1, keepdim=True)) / (rewards.std() + 1e-4)
        found = [line["advantage"] for line in lines if line["task"] == loop]
        assert found == pytest.approx(expected.flatten().tolist(), abs=2e-4)
    for work, rows, tokens in seen:
        assert tokens == work.rollout.valid[rows][work.rollout.stopped[rows]].sum()
    assert "loop1/overlong" in events(output).Tags()["scalars"]


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_loop_2_rewards_meteor_and_likelihood(data, tmp_path, monkeypatch, share):
    """Advantages with --scale_components are of the scaled ones, the reward of none."""

    def scaled(rewards, weights, num_generations):
        assert num_generations == 4
        return {name: torch.arange(len(rewards[name])).float() for name in weights}

    monkeypatch.setattr("rl_train.rewards.combine.normalise_components", scaled)
    how = dict(num_generations=4, scale_components="") if share == 0.25 else {}
    weights = [f"loop2.meteor={1 - share}", f"loop2.likelihood={share}"]
    flags = dict(tasks="caption_mask_caption", reward_weights=weights, **how)
    lines = rollouts(run(data, tmp_path, max_steps=1, **flags))
    assert any(line["reward"] for line in lines)
    for line in lines:
        # Nobody pays for a part of weight 0.
        assert ("likelihood" in line, "meteor" in line) == (share > 0, share < 1)
        parts = (1 - share) * line.get("meteor", 0), share * line.get("likelihood", 0)
        assert line["reward"] == pytest.approx(sum(parts), abs=1e-6)
    if share == 0.25:
        by_hand = [x / (5 / 3) ** 0.5 for x in (-1.5, -0.5, 0.5, 1.5)]  # of 0, 1, 2, 3
        found = [line["advantage"] for line in lines]
        assert found == pytest.approx(by_hand * (len(lines) // 4), abs=1e-3)


def test_the_better_role_is_merged_at_the_end_unless_told_otherwise(data, tmp_path, capsys):
    """The defaults do it; a metric that chooses it is known before the first step."""
    how = dict(max_steps=1, tasks="mask_caption_mask", latent_std=None)
    output = run(data, tmp_path / "run", **how, merge_at_end=None)
    assert "\nmerging the " in capsys.readouterr().out
    assert (output / "final_model" / "model.safetensors").is_file()
    assert not (run(data, tmp_path / "none", **how) / "final_model").exists()
    how |= dict(merge_at_end="auto", metric_for_best_model="typo")
    with pytest.raises(SystemExit, match="--metric_for_best_model typo: this run measures"):
        run(data, tmp_path / "typo", **how)
    assert not list((tmp_path / "typo").glob("checkpoint_step_*"))


def test_equal_rewards_leave_the_weights_alone(data, tmp_path, monkeypatch):
    """--ablation_reward constant: no step is taken, though every row has a reward."""
    built = parts_of(monkeypatch)
    output = run(data, tmp_path, ablation_reward="constant", weight_decay=0.5)
    state = built[0].state
    assert all(
        torch.equal(parameter, state.roles.copies["reference"][n])
        for n, parameter in state.policy.trainable.items()
    )
    assert not state.optimizer.state and {line["reward"] for line in rollouts(output)} == {1.0}
    assert any(
        line["iou"] != 1 for line in rollouts(output)
    )  # the rewards as they were are still logged by name
    for loop in ("loop1", "loop2"):
        assert curve(output, f"{loop}/frac_zero_std") == {1: 1, 2: 1}
    for tag in ("teacher/distance_to_reference", "teacher/distance_to_policy"):
        assert curve(output, tag) == {1: 0, 2: 0}
    updates = {
        f"{loop}/{name}"
        for loop in ("loop1", "loop2")
        for name in ("loss", "kl_div", "entropy", "sampler_gap", "mask_loss", "latent_joint_kl")
    }
    assert not {*updates, "total_loss"} & set(
        events(output).Tags()["scalars"]
    )  # nothing was computed: no 0 either


@pytest.mark.parametrize("decay, twin", [(0, "policy"), (1, "reference")])
def test_ends_of_the_ema(data, tmp_path, monkeypatch, decay, twin):
    """0: the policy is its own teacher; 1: the teacher stays what the run started from."""
    built = parts_of(monkeypatch)
    output = run(data, tmp_path, ema_decay=decay, learning_rate=1e-3)
    state = built[0].state
    same = state.policy.trainable if twin == "policy" else state.roles.copies["reference"]
    assert all(torch.equal(t, same[n]) for n, t in state.roles.copies["teacher"].items())
    assert state.roles.distance("policy", "reference") > 1e-4
    lag, drift = (
        curve(output, "teacher/distance_to_policy"),
        curve(output, "teacher/distance_to_reference"),
    )
    assert (lag if twin == "policy" else drift) == {1: 0, 2: 0} and (
        drift if twin == "policy" else lag
    )[2] > 1e-4


def test_a_users_reward_knows_its_task_and_replaces_its_components(data, tmp_path, monkeypatch):
    source = (
        "def by_task(completions, task): return [dict(loop1=1, loop2=2)[task]] * len(completions)"
    )
    (tmp_path / "users_by_task.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    how = dict(reward="users_by_task:by_task=0.5", num_generations=4, max_steps=1)
    alone = rollouts(run(data, tmp_path / "alone", reward_only="", **how))
    assert {(line["task"], line["reward"]) for line in alone} == {("loop1", 0.5), ("loop2", 1.0)}
    assert any(line["iou"] for line in alone if line["task"] == "loop1")  # logged
    beside = rollouts(run(data, tmp_path / "beside", **how))
    for line in beside:
        if line["task"] == "loop1":
            assert line["reward"] == pytest.approx(line["iou"] + 0.5, abs=1e-5)


def test_reward_only_needs_a_reward(data, tmp_path):
    sentence = complaint_of(flags(data, tmp_path / "run", reward_only=""))
    assert "--reward_only" in sentence and "needs --reward" in sentence
