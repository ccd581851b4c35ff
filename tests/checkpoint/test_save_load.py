"""A killed run goes on as if nothing had happened, and a checkpoint can be read by others."""

import itertools
import json
import math
import os
import re
import shutil
import signal

import pytest
import torch
from peft import PeftModel
from transformers import Qwen2ForCausalLM

from rl_train import cli, train
from rl_train.checkpoint import save_load
from rl_train.distributed.process_group import RankInfo
from rl_train.run.start import start_run
from sa2va_hf import Sa2VAModel
from tests.ranks import start_fork
from tests.runs import (
    CHECKPOINT,
    complaint_of,
    curve,
    events,
    flags,
    rollouts,
    run,
    run_unmeasured,
    unmeasured,
    weights,
)

one_core = pytest.fixture(autouse=True)(unmeasured)
ALONE = RankInfo(0, 1, torch.device("cpu"))
RUN = dict(
    max_steps=4,
    save_steps=1,
    save_total_limit=0,
    num_generations=4,
    learning_rate=1e-3,
)
WEIGHT_FILES = ("trainables.safetensors", "ema.safetensors")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of four steps that nobody disturbed."""
    return run_unmeasured(data, tmp_path_factory.mktemp("whole"), **RUN)


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory):
    """The same run in a process that SIGKILL ended after its second step."""
    output = tmp_path_factory.mktemp("killed")

    def run_until_the_third_update():
        clip, calls = train.clip_gradients, itertools.count(1)

        def clip_or_die(*args):
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return clip(*args)

        train.clip_gradients = clip_or_die  # in the fork alone
        run(data, output, **RUN)

    status, said = start_fork(output.with_suffix(".log"), {}, run_until_the_third_update)()
    assert status == -signal.SIGKILL and (output / "checkpoint_step_2").exists(), said
    assert not (output / "checkpoint_step_4").exists()
    return output


def same_bytes(one, two, step):
    return [
        (one / f"checkpoint_step_{step}" / file).read_bytes()
        == (two / f"checkpoint_step_{step}" / file).read_bytes()
        for file in WEIGHT_FILES
    ]


def same_state(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b


def training_state(output, step):
    return torch.load(output / f"checkpoint_step_{step}" / "training_state.pt", weights_only=True)


def test_killed_run_resumes_to_the_same_bits(data, whole, killed, tmp_path):
    output = shutil.copytree(killed, tmp_path / "run")
    (output / ".checkpoint_step_9.unfinished").mkdir()  # must not be taken for a checkpoint
    with (output / "rollouts" / "rank0.jsonl").open("a") as file:
        file.write('{"step": 3, "task": "lo')  # a line that the kill cut off
    run(data, output, resume="", **RUN)
    assert same_bytes(whole, output, 4) == [True, True]
    assert same_bytes(whole, output, 1) == [True, True]
    before, after = training_state(whole, 4), training_state(output, 4)
    for part in ("step", "optimizer", "scheduler"):
        assert same_state(before[part], after[part]), part
    assert not all(
        torch.equal(a, b) for a, b in zip(weights(output, 2).values(), weights(output, 4).values())
    )

    assert rollouts(output) == rollouts(whole)
    groups = [(line["step"], line["task"]) for line in rollouts(output)]
    assert {group: groups.count(group) for group in groups} == {
        (s, t): 8 for s in range(4) for t in ("loop1", "loop2")
    }

    log = events(output)
    for tag in ("total_loss", "loop1/reward_mean", "loop2/reward_mean", "learning_rate"):
        assert [e.step for e in log.Scalars(tag)] == [1, 2, 3, 4], tag


def test_resume_from_a_named_checkpoint_in_a_fresh_folder(data, whole, tmp_path):
    output = run(data, tmp_path, resume=whole / "checkpoint_step_3", **RUN)
    assert same_bytes(whole, output, 4) == [True, True]
    assert {line["step"] for line in rollouts(output)} == {3}
    # What the run began with is measured again, by the reference: not what it has learnt since.
    base = [json.loads((f / "evaluation" / "step_0.json").read_text()) for f in (whole, output)]
    assert base[0]["values"] == base[1]["values"] and base[0]["captions"] == base[1]["captions"]


def test_a_checkpoint_of_another_machine_keeps_this_ones_optimizer_kernels(data, whole, tmp_path):
    """The fused ones of a GPU, say: the checkpoint does not know what this run was built with."""
    folder = shutil.copytree(
        whole / "checkpoint_step_3", tmp_path / "elsewhere" / "checkpoint_step_3"
    )
    state = torch.load(folder / "training_state.pt", weights_only=True)
    for group in state["optimizer"]["param_groups"]:
        group["fused"] = True
    torch.save(state, folder / "training_state.pt")
    output = run(data, tmp_path / "run", resume=folder, **RUN)
    assert [group["fused"] for group in training_state(output, 4)["optimizer"]["param_groups"]] == [
        False
    ]
    assert same_bytes(whole, output, 4) == [True, True]


def test_resume_with_a_second_rate_and_a_calibrated_sigma(data, tmp_path, capsys):
    """Two groups of parameters find their moments again, and --latent_std auto its number."""
    flags = RUN | dict(max_steps=2, text_hidden_fcs_lr=5e-3, latent_std="auto", num_generations=2)
    whole = run(data, tmp_path / "whole", **flags)
    output = run(data, tmp_path / "broken", **flags, resume=whole / "checkpoint_step_1")
    run(data, output, **flags, resume="")  # and what is finished resumes without complaint
    assert same_bytes(whole, output, 2) == [True, True]
    before, after = training_state(whole, 2), training_state(output, 2)
    assert len(after["optimizer"]["param_groups"]) == 2
    assert all(same_state(before[part], after[part]) for part in ("optimizer", "scheduler"))
    assert same_state(before["tasks"], after["tasks"]) and 0 < after["tasks"]["loop2"]["sigma"]
    assert after["tasks"]["loop2"]["factor"].shape == (64, 64)
    # measured once, then kept: neither model nor data are asked
    printed = capsys.readouterr().out
    assert printed.count("--latent_std auto: ") == 1
    sentence = r"auto: .*, at which masks sampled for \d+ captions have a mean IoU of 0.5 with the"
    assert re.search(sentence, printed)
    assert printed.count("nothing is left to train: the run is at step 2 of 2") == 1


def test_resume_before_the_first_checkpoint_starts_over(data, whole, tmp_path):
    shutil.copy(whole / "config.json", tmp_path)
    config = cli.parse(flags(data, tmp_path, resume="", **RUN))
    built = start_run(config, ALONE)
    assert built.state.step == 0 and not built.state.optimizer.state


def test_resume_of_a_finished_run_changes_nothing(data, whole, tmp_path):
    output = shutil.copytree(whole, tmp_path / "run")
    run(data, output, resume="", **RUN)
    assert same_bytes(whole, output, 4) == [True, True] and rollouts(output) == rollouts(whole)
    points, before = (
        {(event.step, event.value) for event in events(folder).Scalars("eval/cycle_iou")}
        for folder in (output, whole)
    )  # the point of the last step is written again, with the same value
    assert points == before and {step for step, _ in points} == {0, 4}


def test_a_finished_run_is_extended(data, whole, tmp_path, capsys):
    """It has the learning rates of a run of that length at these steps, and is not shortened."""
    output = shutil.copytree(whole, tmp_path / "run")
    run(data, output, resume="", **RUN | dict(max_steps=6))
    printed = capsys.readouterr().out
    assert "--max_steps was 4: the run now ends at step 6 and goes on from step 4" in printed
    rates = curve(output, "learning_rate")
    assert set(rates) == set(range(1, 7))
    for step in (5, 6):  # the first of six warms up: at its begin step s is s - 2 of 5 behind it
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 2) / 5))
        assert rates[step] == pytest.approx(1e-3 * cosine)
    assert same_bytes(whole, output, 4) == [True, True]  # and nothing before is trained again
    assert training_state(output, 6)["step"] == 6
    assert {line["step"] for line in rollouts(output)} == set(range(6))
    sentence = complaint_of(flags(data, output, resume="", **RUN | dict(max_steps=5)))
    assert "--max_steps 5" in sentence and "is at step 6 already" in sentence


def test_training_state_is_plain_data(whole):
    state = training_state(whole, 4)
    assert set(state) == {"step", "optimizer", "scheduler", "tasks", "counters", "rng"}
    assert state["step"] == 4 and state["counters"] == dict(
        judge_failures=dict(steps=[]), damaged=dict(names=[])
    )
    assert len(state["rng"]) == 1 and state["tasks"].keys() == {"loop2"}
    assert state["tasks"]["loop2"].keys() == {"sigma", "factor"}


def test_a_resume_goes_on_with_torch_s_random_numbers(data, whole, tmp_path):
    """Nothing in a step draws from them; whoever comes to do so finds them where they were."""
    argv = flags(data, tmp_path, resume=whole / "checkpoint_step_4", **RUN)
    torch.manual_seed(123)
    start_run(cli.parse(argv), ALONE)
    drawn = torch.rand(2)
    torch.set_rng_state(training_state(whole, 4)["rng"][0])
    assert torch.equal(drawn, torch.rand(2))


def test_oldest_checkpoints_are_removed(data, whole, tmp_path):
    output = run(data, tmp_path, **RUN | dict(save_total_limit=2))
    assert [folder.name for folder in save_load.list_checkpoints(output)] == [
        "checkpoint_step_3",
        "checkpoint_step_4",
    ]
    assert sorted(p.name for p in output.glob("checkpoint*")) == [
        "checkpoint_step_3",
        "checkpoint_step_4",
    ]
    assert len(save_load.list_checkpoints(whole)) == 4  # 0 = all


def test_checkpoints_are_ordered_by_step(tmp_path):
    for name in (
        "checkpoint_step_10",
        "checkpoint_step_9",
        ".checkpoint_step_11.unfinished",
        "checkpoint_step_x",
    ):
        (tmp_path / name).mkdir()
    assert [folder.name for folder in save_load.list_checkpoints(tmp_path)] == [
        "checkpoint_step_9",
        "checkpoint_step_10",
    ]


def test_adapter_loads_with_peft(data, whole, tmp_path):
    base = Sa2VAModel.from_pretrained(CHECKPOINT).language_model
    assert type(base) is Qwen2ForCausalLM
    ids = torch.arange(40).view(2, 20)
    untrained = base(input_ids=ids).logits
    adapted = (
        PeftModel.from_pretrained(base, whole / "checkpoint_step_4" / "adapter")
        .eval()(input_ids=ids)
        .logits
    )
    policy = start_run(cli.parse(flags(data, tmp_path, **RUN)), ALONE).state.policy
    save_load.load_weights(whole / "checkpoint_step_4", policy.trainable)
    trained = policy.model.language_model(input_ids=ids).logits
    torch.testing.assert_close(adapted, trained, atol=1e-6, rtol=0)
    assert (trained - untrained).abs().max() > 1e-3
