"""Checkpoints: everything that a run needs to go on as if it had never stopped.

checkpoint_step_N/
    adapter/                 the LoRA in PEFT's own format
    trainables.safetensors   all trainable weights by native name, float32
    ema.safetensors          the teacher's
    training_state.pt        optimizer, scheduler, RNG of each rank, step; loads with weights_only=True
    config.json              the run's flags
checkpoint_best/             the same of the step that scored best on held-out samples, and
    eval.json                its step, its score and its held-out metrics
N = steps done. The reference is not stored: it is the base with a fresh LoRA, rebuilt from --model_path.
"""

import json
import pickle
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_train.distributed import gather_objects
from rl_train.files import DamagedFile, read_json
from rl_train.roles import Roles

NAME = re.compile(r"checkpoint_step_(\d+)$")
BEST = "checkpoint_best"


@dataclass
class RunState:
    """All that a run carries from step to step; the weights lie in the policy and the roles."""

    policy: object
    roles: Roles
    tasks: list
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    step: int = 0  # steps done

    def state_dict(self) -> dict:
        """What is neither weights nor random numbers, as training_state.pt holds it."""
        return dict(
            step=self.step,
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict(),
            tasks={task.name: task.action.state_dict() for task in self.tasks if task.action},
        )

    def load_state_dict(self, state: dict):
        for group in state["optimizer"]["param_groups"]:
            group["fused"] = self.optimizer.defaults["fused"]  # this machine's, not the writer's
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        for task in self.tasks:
            if task.action:
                task.action.load_state_dict(state["tasks"][task.name])


def list_checkpoints(output_dir) -> list[Path]:
    """Complete checkpoints in order of their steps."""
    found = [p for p in Path(output_dir).glob("checkpoint_step_*") if NAME.search(p.name)]
    return sorted(found, key=lambda p: int(NAME.search(p.name)[1]))


def save(output_dir, state: RunState, flags: dict, total_limit: int, is_main: bool):
    """Write checkpoint_step_N, and remove the oldest beyond `total_limit` (0: none)."""
    rng = gather_objects(rng_state())
    if not is_main:
        return
    write(Path(output_dir) / f"checkpoint_step_{state.step}", state, flags, rng)
    past = [p for p in list_checkpoints(output_dir) if int(NAME.search(p.name)[1]) <= state.step]
    for old in past[:-total_limit] if total_limit else ():
        shutil.rmtree(old)


def save_if_best(
    output_dir, state: RunState, flags: dict, metrics: dict[str, float], is_main: bool
):
    """Write checkpoint_best if metrics["score"] is above that of the one that is there, or none is; a resumed run goes on comparing."""
    final = Path(output_dir) / BEST
    best = float("-inf")
    if is_main and final.exists():
        best = read_json(final / "eval.json")["score"]
    if metrics["score"] <= gather_objects(best)[0]:
        return
    rng = gather_objects(rng_state())
    if is_main:
        write(final, state, flags, rng, metrics)


def write(final: Path, state: RunState, flags: dict, rng: list, metrics: dict | None = None):
    """Write the folder `final` under a temporary name and rename it; it replaces one of that name."""
    folder, replaced = final.with_name(final.name + ".tmp"), final.with_name(final.name + ".old")
    for leftover in (folder, replaced):  # of a killed run
        if leftover.exists():
            shutil.rmtree(leftover)
    folder.mkdir(parents=True)
    state.policy.peft.save_pretrained(folder / "adapter")
    own = {name: parameter.detach() for name, parameter in state.policy.trainable.items()}
    weights = dict(trainables=own, ema=state.roles.banks["teacher"])
    for name, bank in weights.items():
        on_cpu = {n: tensor.cpu().contiguous() for n, tensor in bank.items()}
        save_file(on_cpu, folder / f"{name}.safetensors")
    torch.save(state.state_dict() | dict(rng=rng), folder / "training_state.pt")
    (folder / "config.json").write_text(json.dumps(flags, indent=2) + "\n")
    if metrics:
        scores = dict(step=state.step, score=metrics["score"], metrics=metrics)
        (folder / "eval.json").write_text(json.dumps(scores, indent=2) + "\n")
    if final.exists():
        final.rename(replaced)  # removing it takes longer than the moment in which neither is there
    folder.rename(final)
    if replaced.exists():
        shutil.rmtree(replaced)


def find(resume: str, output_dir) -> Path | None:
    """The folder that --resume means, or None if "latest" finds a run without a checkpoint yet."""
    if resume != "latest":
        if not (Path(resume) / "training_state.pt").is_file():
            raise ValueError(
                f"--resume {resume}: no training_state.pt there, it is not a checkpoint folder"
            )
        return Path(resume)
    found = list_checkpoints(output_dir)
    return found[-1] if found else None


def read_state(folder) -> dict:
    """What training_state.pt holds. Raises DamagedFile."""
    file = Path(folder) / "training_state.pt"
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (
        OSError,
        RuntimeError,
        EOFError,
        KeyError,
        pickle.UnpicklingError,
    ) as error:  # by the place of the damage
        raise DamagedFile(file, f"torch.load cannot read it ({type(error).__name__})") from error


def open_weights(file: Path, names):
    """The open safetensors file, of which the header is read. Raises DamagedFile, or ValueError if its names are not `names`."""
    try:
        reader = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedFile(file, error) from error
    if set(reader.keys()) != set(names):
        raise ValueError(
            f"{file}: names differ from what this run trains: {sorted(set(reader.keys()) ^ set(names))[:5]}"
        )
    return reader


def load_weights(
    folder: Path, parameters: dict[str, torch.nn.Parameter], file: str = "trainables.safetensors"
):
    """Copy trainables.safetensors or ema.safetensors into the parameters. Raises ValueError if it is damaged or its names differ."""
    reader = open_weights(Path(folder) / file, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(reader.get_tensor(name))


def check(folder: Path, names, output_dir) -> int:
    """Number of steps done in a checkpoint that `load` and `save_if_best` will be able to read.

    Args:
        names: of what this run trains; output_dir: of the run, whose checkpoint_best is compared with.

    Raises:
        ValueError: they will not, because of the file that it names: known before the minutes of an evaluation.
    """
    for file in ("trainables.safetensors", "ema.safetensors"):
        open_weights(folder / file, names)
    if (Path(output_dir) / BEST).exists():
        read_json(Path(output_dir) / BEST / "eval.json")
    return read_state(folder)["step"]


def load(folder: Path, state: RunState, rank: int):
    """Restore a run from `folder`."""
    load_weights(folder, state.policy.trainable)
    load_weights(folder, state.roles.banks["teacher"], "ema.safetensors")
    found = read_state(folder)
    state.load_state_dict(found)
    if rank < len(found["rng"]):  # nothing depends on it across another number of ranks
        restore_rng(found["rng"][rank])


def rng_state() -> dict:
    """Generators of python, numpy and torch, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return dict(
        python=[version, list(internal), gauss],
        numpy=[name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    )


def restore_rng(state: dict):
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
