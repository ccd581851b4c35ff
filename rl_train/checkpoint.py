"""Checkpoints: everything that a run needs to go on as if it had never stopped.

checkpoint_step_N/
    adapter/                 the LoRA in PEFT's own format
    trainables.safetensors   all trainable weights by native name, float32
    ema.safetensors          the teacher's
    training_state.pt        optimizer, scheduler, step, tasks, torch's RNG of each rank
    config.json              the run's flags
checkpoint_best/             the same of the step that scored best on held-out samples, and
    eval.json                its step, its score and its held-out metrics
The reference is not stored: it is the base with a fresh LoRA.
"""

import json
import pickle
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_train.distributed import gather_objects
from rl_train.files import DamagedFile, give_usual_mode, read_json
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
    folders = Path(output_dir).glob("checkpoint_step_*")
    steps = {int(NAME.search(p.name)[1]): p for p in folders if NAME.search(p.name)}
    return [steps[step] for step in sorted(steps)]


def save(output_dir, state: RunState, flags: dict, total_limit: int, is_main: bool):
    """Write checkpoint_step_N, and remove the oldest beyond `total_limit` (0: none)."""
    rng = gather_objects(torch.get_rng_state())
    if not is_main:
        return
    new = Path(output_dir) / f"checkpoint_step_{state.step}"
    write(new, state, flags, rng)
    past = list_checkpoints(output_dir)
    past = past[: past.index(new) + 1]  # without later ones of a run that was resumed earlier
    for old in past[:-total_limit] if total_limit else ():
        shutil.rmtree(old)


def save_if_best(output_dir, state: RunState, flags: dict, metrics: dict, is_main: bool):
    """Write checkpoint_best if metrics["score"] is above that of the one there, if any."""
    if metrics["score"] <= gather_objects(best_score(output_dir) if is_main else None)[0]:
        return
    rng = gather_objects(torch.get_rng_state())
    if is_main:
        write(Path(output_dir) / BEST, state, flags, rng, metrics)


def write(final: Path, state: RunState, flags: dict, rng: list, metrics: dict | None = None):
    """Write the folder `final` under a temporary name, then rename it over one of that name."""
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
    give_usual_mode(folder)
    if final.exists():
        final.rename(replaced)  # removing it takes longer than the moment in which neither is there
    folder.rename(final)
    if replaced.exists():
        shutil.rmtree(replaced)


def find(resume: str | None, output_dir) -> Path | None:
    """The folder that --resume means, if any; "latest" may find a run without a checkpoint yet."""
    if resume in (None, "latest"):
        found = list_checkpoints(output_dir) if resume else []
        return found[-1] if found else None
    if not (Path(resume) / "training_state.pt").is_file():
        raise ValueError(f"--resume {resume}: it has no training_state.pt, it is no checkpoint")
    return Path(resume)


def read_state(folder) -> dict:
    """What training_state.pt holds. Raises DamagedFile."""
    file = Path(folder) / "training_state.pt"
    damages = (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError)  # by their place
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except damages as error:
        raise DamagedFile(file, f"torch.load cannot read it ({type(error).__name__})") from error


def open_weights(path: Path):
    """The open safetensors file, of which the header is read. Raises DamagedFile."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedFile(path, error) from error


def load_weights(folder: Path, parameters: dict, file: str = "trainables.safetensors"):
    """Copy a file's weights into the parameters.

    Raises ValueError if it is damaged, or of other names, shapes or types than these.
    """
    reader = open_weights(Path(folder) / file)
    if odd := set(reader.keys()) ^ set(parameters):
        raise ValueError(f"{folder}/{file}: names differ from what trains: {sorted(odd)[:5]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = reader.get_tensor(name)
            if (tensor.shape, tensor.dtype) != (parameter.shape, parameter.dtype):  # or it spreads
                found = f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
                wanted = f"{parameter.dtype} {tuple(parameter.shape)}"
                raise ValueError(f"{folder}/{file}: {found}, what trains is {wanted}")
            parameter.copy_(tensor)


def load(folder: Path, state: RunState, output_dir, rank: int):
    """Restore a run from `folder`. Raises ValueError if a file there or of the best is damaged."""
    load_weights(folder, state.policy.trainable)
    load_weights(folder, state.roles.banks["teacher"], "ema.safetensors")
    found = read_state(folder)
    state.load_state_dict(found)
    if rank < len(found["rng"]):  # nothing depends on it across another number of ranks
        torch.set_rng_state(found["rng"][rank])
    best_score(output_dir)  # known to be readable before the next evaluation


def best_score(output_dir) -> float:
    """The score of checkpoint_best, or minus infinity. Raises DamagedFile."""
    folder = Path(output_dir) / BEST
    return read_json(folder / "eval.json")["score"] if folder.exists() else float("-inf")
