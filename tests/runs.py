"""Short runs of `rl_train.train` on drawn data: what the tests of the entry point share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_train import train
from rl_train.evaluation import evaluate
from rl_train.loggers import tensorboard
from rl_train.tasks import DEFAULT_TASKS
from rl_train.utils.command_line import SEE_HELP
from tools.demo.make_demo import HELDOUT, TRAIN, write_split

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "tools" / "demo" / "checkpoint"
REGIONS = 84  # training regions of `draw_data`
# Beginnings of a help text that is no whole phrase: "of everything", "whose weights".
FRAGMENT = r"(of|its|whose|which|where|as|with|one) "
# Held-out metrics that are measured only where a flag asks for them: --distractors, --best_of.
SAMPLED = {"best_of_G_cycle_iou", "by_logp_cycle_iou", "sampled_cycle_iou", "best_of_G_meteor"}
SAMPLED |= {"by_cycle_meteor", "by_logp_meteor", "sampled_meteor"}
ASKED = {"cycle_on_target", "seg_on_target"} | SAMPLED
# A process on one CPU core, without what a launcher around the tests may have set.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
} | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def draw_data(folder: Path) -> Path:
    """`folder` with 20 training scenes (four or five regions each) and 4 held-out ones."""
    write_split(folder / "train", seed=0, split=TRAIN, num_scenes=20)
    write_split(folder / "heldout", seed=0, split=HELDOUT, num_scenes=4)
    return folder


def on_one_core(monkeypatch):
    """Make in-process runs what the subprocesses are: on the CPU, with one thread, alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def measure(policy, batch, *_) -> dict[str, list]:
    """Replace `cycle_metrics.measure`: every number follows from the weights."""
    number = sum(p.detach().double().sum().item() for p in policy.trainable.values()) % 1
    texts = dict(image_id=batch.image_ids, reference=batch.captions, caption=batch.captions)
    values = ("cycle_iou", "cycle_meteor", "seg_iou", "seg_intersection", "seg_union")
    values += ("caption_meteor",)
    return texts | {name: [number] * len(batch) for name in values} | dict(index=batch.index)


def picture(image, work, row):
    """Replace `loggers.tensorboard.rollout_picture` by a small one."""
    return np.full((4, 4, 3), int(work.reward[row].item() * 1e6) % 256, np.uint8)


def unmeasured(monkeypatch):
    """`on_one_core`, with evaluations and pictures drawn from the weights instead of measured."""
    monkeypatch.setattr(evaluate, "measure", measure)
    monkeypatch.setattr(tensorboard, "rollout_picture", picture)
    yield from on_one_core(monkeypatch)


def flags(data: Path, output: Path, **changes) -> list[str]:
    """Command line of a short run, with `changes` by flag.

    Its masks are so spread that loop 2 has unequal rewards. None leaves a flag out, "" gives it no
    value.
    """
    values = (
        dict(
            model_path=CHECKPOINT,
            data_dir=data / "train",
            eval_data_dir=data / "heldout",
            output_dir=output,
            dtype="float32",
            batch_size=2,
            num_generations=2,
            max_completion_length=12,
            lora_r=4,
            lora_alpha=8,
            eval_samples=1,
            eval_steps=0,
            num_workers=0,
            micro_batch_size=4,
            max_steps=2,
            learning_rate=1e-4,
            merge_at_end="none",
        )
        | (
            dict(latent_std=1)
            if "caption_mask_caption" in (changes.get("tasks") or DEFAULT_TASKS)
            else {}
        )
        | changes
    )
    argv = []
    for name, value in values.items():
        if value is not None:
            argv += [
                f"--{name}",
                *map(str, value if isinstance(value, list) else [value] if value != "" else []),
            ]
    return argv


def run(data: Path, output: Path, **changes) -> Path:
    """A run in this process; returns its output folder."""
    train.main(flags(data, output, **changes))
    return output


def run_unmeasured(data: Path, output: Path, **changes) -> Path:
    """`run` under `unmeasured`, for the fixtures of a module."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for _ in unmeasured(monkeypatch):
            run(data, output, **changes)
    return output


def start(
    data: Path, output: Path, environment: dict[str, str] | None = None, **changes
) -> subprocess.Popen:
    """A run in a process of its own, its output in the pipe stdout."""
    return subprocess.Popen(
        [sys.executable, "-m", "rl_train.train", *flags(data, output, **changes)],
        cwd=ROOT,
        text=True,
        env=ENVIRONMENT | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def weights(
    output: Path, step: int, file: str = "trainables.safetensors"
) -> dict[str, torch.Tensor]:
    return load_file(output / f"checkpoint_step_{step}" / file)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of two sets of weights, without the biases of attention's keys.

    A softmax does not see them, so their gradient is rounding alone, which AdamW makes as large as
    any other.
    """
    assert set(a) == set(b)
    return max(
        (a[name] - b[name]).abs().max().item() for name in a if not name.endswith(".k_proj.bias")
    )


def rollouts(output: Path) -> list[dict]:
    """The JSON lines of all ranks."""
    return [
        json.loads(line)
        for file in sorted((output / "rollouts").iterdir())
        for line in file.read_text().split("\n")[:-1]
    ]


def events(output: Path) -> EventAccumulator:
    """Return TensorBoard's view of a run, all points of it."""
    accumulator = EventAccumulator(
        str(output / "tensorboard"), {"scalars": 0, "images": 0, "tensors": 0}
    )
    accumulator.Reload()
    return accumulator


def curve(output: Path, tag: str) -> dict[int, float]:
    """{step: value}"""
    return {e.step: e.value for e in events(output).Scalars(tag)}


def parts_of(monkeypatch) -> list:
    """A list that receives what the next `main` builds."""
    built, build = [], train.start_run
    monkeypatch.setattr(train, "start_run", lambda *args: built.append(build(*args)) or built[-1])
    return built


def complaint_of(argv: list[str]) -> str:
    """The one sentence with which the command line `argv` ends; only a hint may follow it."""
    with pytest.raises(SystemExit) as stopped:
        train.main(argv)
    sentence, _, hint = stopped.value.code.partition("\n")
    assert sentence.startswith("rl_train: ") and hint in ("", SEE_HELP)
    assert "Traceback" not in sentence and "usage:" not in sentence
    return sentence
