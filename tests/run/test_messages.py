"""Lines that a run prints, by hand."""

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from rl_train import cli
from rl_train.distributed.process_group import RankInfo
from rl_train.run import messages
from tests.runs import flags

ALONE = RankInfo(0, 1, torch.device("cpu"))
GPU = RankInfo(0, 8, torch.device("cuda", 0))


def test_machine(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert messages.machine(ALONE) == "device: CPU, 6 threads; 1 process"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU {device.index}")
    assert messages.machine(GPU) == "device: a GPU 0; 8 processes"


def test_a_gpu_that_torch_does_not_use(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shutil, "which", {"nvidia-smi": "/bin/nvidia-smi"}.get)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in messages.unused_gpu(ALONE)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert " finds no GPU; nvidia-smi says" in messages.unused_gpu(ALONE)
    assert messages.unused_gpu(GPU) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides it
    assert messages.unused_gpu(ALONE) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert messages.unused_gpu(ALONE) is None


def test_a_large_model_on_a_cpu():
    assert "4.2 billion parameters" in messages.large_on_cpu(4_200_000_000, ALONE)
    assert messages.large_on_cpu(4_200_000_000, GPU) is None
    assert messages.large_on_cpu(1_000_000_000, ALONE) is None


def test_parameters_and_memory():
    counts = Counter({"lora": 1000, "mlp1": 500, "vision_model (frozen)": 4500})
    assert messages.parameters(counts).splitlines() == [
        "trainable parameters: 1,500 of 6,000 (25.00%): lora 1,000, mlp1 500",
        "frozen parameters: 4,500: vision_model 4,500",
    ]
    sizes = {"frozen base": 8 * 2**30, "optimizer": 2**29}
    assert messages.memory(sizes, GPU) == (
        "memory expected per GPU, without activations: 8.5 GiB "
        "(frozen base 8.0 GiB, optimizer 512.0 MiB)"
    )


def test_what_was_read_and_what_was_skipped():
    report = dict(kept=1200, rows=1300, skipped={"no mask": 3, "no image": 2}, resized_masks=4)
    assert messages.data_report("train", report) == (
        "train: 1,200 regions of 1,300 rows; skipped 5 (no mask: 3, no image: 2); "
        "resized to their image: 4 masks"
    )
    whole = dict(kept=2, rows=2, skipped={}, resized_masks=0)
    assert messages.data_report("train", whole) == "train: 2 regions of 2 rows; none skipped"


VALUES = {
    "total_loss": 0.25,
    "loop1/reward_mean": 0.5,
    "loop1/iou": 0.5,
    "loop1/length": 0.125,
    "loop1/policy_loss": -0.002,
    "loop1/kl_div": 0.0123,
    "learning_rate": 1e-5,
}


def test_a_line_of_a_step():
    # The judge has failed: no value.
    components = {"loop1": dict(iou=True, length=True, judge=True)}
    line = messages.step_line(10, 120, VALUES, components, 2.04)
    assert line == (
        "step 10/120 | loss 0.250 | loop1 reward 0.500 (iou 0.500, length 0.125) "
        "policy_loss -2.0e-03 kl 0.012 | learning rate 1.00e-05 | 2.0 s per step"
    )
    skipped = {name: VALUES[name] for name in ("loop1/reward_mean", "loop1/iou", "learning_rate")}
    assert "| no update | loop1 reward 0.500 (iou) | learning" in messages.step_line(
        1, 2, skipped, components, 1.0
    )
    components["loop1"] |= dict(length=False)  # measured, and no part of the reward
    line = messages.step_line(10, 120, VALUES, components, 2.04)
    assert "| loop1 reward 0.500 (iou), length 0.125 policy_loss" in line
    supervised = {"total_loss": 1.5, "masks/loss": 1.5, "learning_rate": 1e-5}
    assert "| masks loss 1.500 |" in messages.step_line(1, 2, supervised, {"masks": {}}, 1.0)


def test_means_are_of_the_steps_that_have_a_metric():
    assert messages.mean_values([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}


def test_no_group_has_a_signal():
    values = {"loop1/frac_zero_std": 1.0, "loop2/frac_zero_std": 1.0}
    assert messages.no_group_has_signal(values, ["loop1", "loop2"])
    values["loop2/frac_zero_std"] = 0.75
    assert not messages.no_group_has_signal(values, ["loop1", "loop2"])
    assert not messages.no_group_has_signal({}, ["masks"])  # supervised: no groups


@pytest.fixture
def here(monkeypatch, tmp_path) -> Path:
    """The working directory, with an interpreter in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    return tmp_path


def commands(config: cli.Config) -> list[str]:
    text = messages.next_commands(config, Path(config.run.output_dir) / "checkpoint_step_2")
    return [line.strip() for line in text.splitlines() if line.startswith("  .venv")]


def test_commands_to_run_next(data, here):
    argv = flags(data, Path("out put"), eval_samples=4, distractors="")
    assert commands(cli.parse(argv)) == [
        ".venv/bin/python -m tensorboard.main --logdir 'out put/tensorboard'",
        ".venv/bin/python -m tools.rollouts --run 'out put' --output 'out put/rollouts.html'",
        ".venv/bin/python -m tools.evaluate --model_path 'out put/checkpoint_step_2' "
        f"--num_samples 4 --data_dir {data}/heldout --dataset gar --dtype float32 --max_tiles 1 "
        "--max_completion_length 12 --distractors",
    ]


def test_the_teacher_is_measured_if_it_was_merged(data, here):
    config, last = cli.parse(flags(data, Path("run"))), Path("run/checkpoint_step_2")
    text = messages.next_commands(config, last, "teacher")
    assert "  # metrics of checkpoint_step_2's teacher and their intervals" in text
    assert text.endswith(" --role teacher")


def test_the_command_measures_what_the_flags_name(data, here):
    """A format and subsets in --eval_data_dir; without it images that were not trained on."""
    named = flags(data, Path("run"), eval_data_dir=f"gar/a,b:{data}/heldout")
    assert commands(cli.parse(named))[-1].endswith(" --max_completion_length 12 --subsets a b")
    assert f"--data_dir {data}/heldout --dataset gar" in commands(cli.parse(named))[-1]
    split = commands(cli.parse(flags(data, Path("run"), eval_data_dir=None)))[-1]
    assert f" --train_eval_overlap drop --data_dir {data}/train --dataset gar" in split
