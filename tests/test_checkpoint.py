"""A killed run goes on as if nothing had happened, and a checkpoint can be read by others."""

import json
import shutil
import signal
import time

import pytest
import torch
from peft import PeftModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen2ForCausalLM

from rl_train import checkpoint, distributed, train
from rl_train.config import parse_args
from rl_train.distributed import Ranks
from rl_train.files import DamagedFile
from rl_train.policies.sa2va import build_policy
from rl_train.tb import Log
from sa2va_hf import Sa2VAModel
from tests.runs import CHECKPOINT, draw_data, flags, on_one_core, rollouts, run, start, weights

one_core = pytest.fixture(autouse=True)(on_one_core)
RUN = dict(
    max_steps=4,
    save_steps=1,
    save_total_limit=0,
    num_generations=4,
    learning_rate=1e-3,
    ema_decay=0.9,
)
WEIGHT_FILES = ("trainables.safetensors", "ema.safetensors")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_data(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of four steps that nobody disturbed."""
    monkeypatch = pytest.MonkeyPatch()
    for _ in on_one_core(monkeypatch):
        output = run(data, tmp_path_factory.mktemp("whole"), **RUN)
    monkeypatch.undo()
    return output


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory):
    """The same run in a process that SIGKILL ended after its second step."""
    output = tmp_path_factory.mktemp("killed")
    process = start(data, output, **RUN)
    deadline = time.monotonic() + 120
    while not (output / "checkpoint_step_2").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (output / "checkpoint_step_4").exists()
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
    (output / "checkpoint_step_9.tmp").mkdir()  # half-written, must not be taken for a checkpoint
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

    log = EventAccumulator(str(output / "tensorboard"), {"scalars": 0})
    log.Reload()
    for tag in ("total_loss", "loop1/reward_mean", "loop2/reward_mean", "learning_rate"):
        assert [e.step for e in log.Scalars(tag)] == [1, 2, 3, 4], tag


def test_resume_from_a_named_checkpoint_in_a_fresh_folder(data, whole, tmp_path):
    output = run(data, tmp_path, resume=whole / "checkpoint_step_3", **RUN)
    assert same_bytes(whole, output, 4) == [True, True]
    assert {line["step"] for line in rollouts(output)} == {3}


def test_a_checkpoint_of_another_machine_keeps_this_ones_optimizer_kernels(data, whole, tmp_path):
    """The fused ones of a GPU, say: what the checkpoint says of them is not what this run was built with."""
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
    """Two groups of parameters find their moments again, and --mask_sigma auto its number."""
    flags = RUN | dict(max_steps=2, prompt_learning_rate=5e-3, mask_sigma="auto", num_generations=2)
    whole = run(data, tmp_path / "whole", **flags)
    output = run(data, tmp_path / "broken", **flags, resume=whole / "checkpoint_step_1")
    run(data, output, **flags, resume="")  # and what is finished resumes without complaint
    assert same_bytes(whole, output, 2) == [True, True]
    before, after = training_state(whole, 2), training_state(output, 2)
    assert len(after["optimizer"]["param_groups"]) == 2
    assert all(same_state(before[part], after[part]) for part in ("optimizer", "scheduler"))
    found = [
        json.loads((folder / "config.json").read_text())["calibrated_mask_sigma"]
        for folder in (whole, output)
    ]
    assert (
        0 < found[0] == found[1] and capsys.readouterr().out.count("--mask_sigma auto: ") == 1
    )  # measured once, then kept


def test_resume_before_the_first_checkpoint_starts_over(data, whole, tmp_path):
    shutil.copy(whole / "config.json", tmp_path)
    args = parse_args(flags(data, tmp_path, resume="", **RUN))
    assert train.build(args, distributed.init()).resume is None


def test_resume_of_a_finished_run_changes_nothing(data, whole, tmp_path):
    output = shutil.copytree(whole, tmp_path / "run")
    run(data, output, resume="", **RUN)
    assert same_bytes(whole, output, 4) == [True, True] and rollouts(output) == rollouts(whole)
    points = (
        EventAccumulator(str(output / "tensorboard"), {"scalars": 0}, purge_orphaned_data=False)
        .Reload()
        .Scalars("eval/cycle_iou")
    )
    steps = [event.step for event in points]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 4  # each evaluation once


def test_training_state_is_plain_data(whole):
    state = training_state(whole, 4)
    assert set(state) == {"step", "optimizer", "scheduler", "rng"} and state["step"] == 4
    assert len(state["rng"]) == 1 and set(state["rng"][0]) == {"python", "numpy", "torch", "cuda"}


def test_rng_round_trip():
    import random

    import numpy as np

    state = checkpoint.rng_state()

    def draw():
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(2).tolist(),
        )

    first = draw()
    assert draw() != first
    checkpoint.restore_rng(state)
    assert draw() == first


def test_oldest_checkpoints_are_removed(data, whole, tmp_path):
    output = run(data, tmp_path, **RUN | dict(save_total_limit=2))
    assert [folder.name for folder in checkpoint.list_checkpoints(output)] == [
        "checkpoint_step_3",
        "checkpoint_step_4",
    ]
    assert sorted(p.name for p in output.glob("checkpoint*")) == [
        "checkpoint_step_3",
        "checkpoint_step_4",
    ]
    assert len(checkpoint.list_checkpoints(whole)) == 4  # 0 = all


def test_checkpoints_are_ordered_by_step(tmp_path):
    for name in (
        "checkpoint_step_10",
        "checkpoint_step_9",
        "checkpoint_step_11.tmp",
        "checkpoint_step_x",
    ):
        (tmp_path / name).mkdir()
    assert [folder.name for folder in checkpoint.list_checkpoints(tmp_path)] == [
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
    policy = build_policy(parse_args(flags(data, tmp_path, **RUN)), torch.device("cpu"))
    checkpoint.load_weights(whole / "checkpoint_step_4", policy.trainable)
    trained = policy.model.language_model(input_ids=ids).logits
    torch.testing.assert_close(adapted, trained, atol=1e-6, rtol=0)
    assert (trained - untrained).abs().max() > 1e-3


def test_weights_of_other_names_are_refused(whole):
    parameters = {name: torch.nn.Parameter(value) for name, value in weights(whole, 4).items()}
    gone = sorted(parameters)[0]
    del parameters[gone]
    with pytest.raises(ValueError, match="names differ") as raised:
        checkpoint.load_weights(whole / "checkpoint_step_4", parameters)
    assert gone in str(raised.value) and "trainables.safetensors" in str(raised.value)


@pytest.mark.parametrize("damage", ["missing", "empty", "halved"])
@pytest.mark.parametrize(
    "file", [*WEIGHT_FILES, "training_state.pt", "config.json", "eval.json", "../config.json"]
)
def test_a_damaged_file_ends_a_resume_before_its_first_evaluation(
    data, whole, tmp_path, monkeypatch, file, damage
):
    output = shutil.copytree(whole, tmp_path / "run")
    place = output / "checkpoint_step_4"
    if file == "eval.json":
        place = shutil.copytree(place, output / checkpoint.BEST)
        (place / file).write_text(json.dumps(dict(step=4, score=0.5, metrics={})))
    spoilt = (place / file).resolve()
    content = spoilt.read_bytes()
    spoilt.unlink()
    if damage != "missing":
        spoilt.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])
    monkeypatch.setattr(train, "evaluate_roles", None)
    with pytest.raises(SystemExit) as stopped:
        run(data, output, resume="", **RUN)
    reason = (
        "is missing or damaged: "
        if (file, damage) != ("../config.json", "missing")
        else "does not exist"
    )
    assert f"{spoilt} {reason}" in str(stopped.value) and "\n" not in str(stopped.value)


def test_a_damaged_line_of_rollouts_is_named(data, whole, tmp_path, monkeypatch):
    file = shutil.copytree(whole, tmp_path / "run") / "rollouts" / "rank0.jsonl"
    spoilt = file.read_bytes().replace(
        b'{"step": 2, "task": "loop1"', b'{"st', 1
    )  # 16 lines a step
    file.write_bytes(spoilt)
    monkeypatch.setattr(train, "evaluate_roles", None)
    with pytest.raises(SystemExit, match=f"^rl_train: {file} is missing or damaged: line 33: "):
        run(data, tmp_path / "run", resume="", **RUN)
    assert file.read_bytes() == spoilt


@pytest.mark.parametrize("content", [b"", b"hello", bytes(1000), b"PK\x03\x04" + bytes(1000)])
def test_a_state_that_is_none(tmp_path, content):
    (tmp_path / "training_state.pt").write_bytes(content)
    with pytest.raises(
        DamagedFile, match="training_state.pt is missing or damaged: torch.load cannot read it"
    ):
        checkpoint.read_state(tmp_path)


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\u2029"])
def test_rollouts_with_odd_line_separators_survive_a_resume(tmp_path, separator):
    """Of a rank that there no longer is, too, if its turn is this rank's."""
    (tmp_path / "rollouts").mkdir()
    lines = [f'{{"step": {step}, "completion": "a{separator}b"}}\n' for step in range(3)]
    for rank in range(4):
        (tmp_path / "rollouts" / f"rank{rank}.jsonl").write_text("".join(lines))
    Log(tmp_path, Ranks(1, 2, torch.device("cpu")), start=2).close()
    for rank in range(4):
        assert (tmp_path / "rollouts" / f"rank{rank}.jsonl").read_text() == "".join(
            lines[:2] if rank % 2 else lines
        )
