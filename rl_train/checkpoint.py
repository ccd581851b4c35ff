"""Checkpoints: everything that a run needs to go on as if it had never stopped.

checkpoint_step_N/
    adapter/                 the LoRA in PEFT's own format
    trainables.safetensors   all trainable weights by native name, float32, and of which base
    ema.safetensors          the teacher's, if a task has one
    training_state.pt        optimizer, scheduler, step, tasks, what is watched, RNG of each rank
    config.json              the run's flags
checkpoint_best/             the same of the step that scored best on held-out samples, and
    eval.json                its step, its score and its held-out metrics, the teacher's too
The reference is not stored: it is the base with a fresh LoRA.

final_model/                 with --export_final: the last one merged into the base (`export`)

A folder of one of these names is whole: it is written as NAME.tmp and renamed. NAME.old is what
checkpoint_best was while another takes its place.
"""

import json
import pickle
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_train.base import Base
from rl_train.distributed import gather_objects, print0
from rl_train.files import DamagedFile, give_usual_mode, read_json, sync, writing
from rl_train.roles import Roles

NAME = re.compile(r"checkpoint_step_(\d+)$")
BEST = "checkpoint_best"
FINAL = "final_model"  # what --export_final writes of the last checkpoint


@dataclass
class RunState:
    """All that a run carries from step to step; the weights lie in the policy and the roles."""

    policy: object
    roles: Roles
    tasks: list
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    step: int = 0  # steps done
    watched: dict[str, object] = field(default_factory=dict)  # what counts over many steps
    base: Base | None = None  # that the weights stand on
    # What a resumed run began with, on the CPU until that is measured, if no reference is kept
    began: dict[str, torch.Tensor] | None = None

    def state_dict(self) -> dict:
        """What is neither weights nor random numbers, as training_state.pt holds it."""
        return dict(
            step=self.step,
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict(),
            tasks={task.name: task.action.state_dict() for task in self.tasks if task.action},
            watched={name: part.state_dict() for name, part in self.watched.items()},
        )

    def check_finite(self):
        """Raise FloatingPointError if a weight of policy or teacher, alike on all ranks, is not."""
        weights = dict(policy=self.policy.trainable)
        if self.roles.has_teacher:
            weights["teacher"] = self.roles.banks["teacher"]
        for role, of_role in weights.items():
            finite = torch.stack([weight.isfinite().all() for weight in of_role.values()])
            if names := [n for n, fine in zip(of_role, finite.tolist()) if not fine]:
                raise FloatingPointError(f"not finite: {role}: {', '.join(names[:5])}")

    def load_state_dict(self, state: dict):
        for group in state["optimizer"]["param_groups"]:
            group["fused"] = self.optimizer.defaults["fused"]  # this machine's, not the writer's
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        for task in self.tasks:
            if task.action:
                task.action.load_state_dict(state["tasks"][task.name])
        for name, part in self.watched.items():
            part.load_state_dict(state["watched"][name])


def step_of(folder: Path) -> int:
    return int(NAME.search(folder.name)[1])


def list_checkpoints(output_dir) -> list[Path]:
    """Complete checkpoints in order of their steps."""
    folders = Path(output_dir).glob("checkpoint_step_*")
    return sorted((p for p in folders if NAME.search(p.name)), key=step_of)


def how_to_go_on(output_dir) -> str:
    """What a run that ends early tells about its last checkpoint."""
    if found := list_checkpoints(output_dir):
        return f"the last whole checkpoint is {found[-1]}, --resume goes on from it"
    if (Path(output_dir) / "config.json").is_file():
        return f"{output_dir} holds no checkpoint yet, --resume begins anew"
    return f"{output_dir} holds no run yet, the same command begins one"


def save(output_dir, state: RunState, flags: dict, total_limit: int, is_main: bool):
    """Write checkpoint_step_N, and remove the oldest beyond `total_limit` (0: none).

    Raises FloatingPointError, on all ranks, if a weight is not finite.
    """
    state.check_finite()
    rng = gather_objects(torch.get_rng_state())
    if not is_main:
        return
    new = Path(output_dir) / f"checkpoint_step_{state.step}"
    write(new, state, flags, rng)
    remove_oldest(output_dir, total_limit)


def remove_oldest(output_dir, total_limit: int):
    """Remove the oldest checkpoints beyond `total_limit` (0: none)."""
    for old in list_checkpoints(output_dir)[:-total_limit] if total_limit else ():
        with writing(old):  # half removed it must not look whole
            shutil.rmtree(old.rename(old.with_name(old.name + ".tmp")))


def tidy(output_dir, start: int, total_limit: int):
    """Make a folder that of a run at step `start`: no leftovers of a kill, nothing later.

    Later checkpoints are there if a run goes on from one before the latest: they, their
    evaluations, their checkpoint_best and final_model move to set_aside_K, so that the next
    --resume finds the run that went on.
    """
    output = Path(output_dir)
    names = [f"{kind}.{end}" for kind in ("checkpoint_*", FINAL) for end in ("tmp", "old")]
    for leftover in [place for name in names for place in output.glob(name)]:
        recover(leftover.with_suffix(""))
    if later := [p for p in list_checkpoints(output) if step_of(p) > start]:
        aside = next(p for k in count(1) if not (p := output / f"set_aside_{k}").exists())
        best = output / BEST
        if best.exists() and read_json(best / "eval.json")["step"] > start:
            later.insert(0, best)
        if (output / FINAL).exists():
            later.insert(0, output / FINAL)
        measured = [p for p in output.glob("evaluation/step_*.json") if int(p.stem[5:]) > start]
        with writing(aside):
            (aside / "evaluation").mkdir(parents=True)
            for place in (*measured, *later):  # the latest last, which a --resume looks for
                place.rename(aside / place.relative_to(output))
        print0(f"going on from step {start}: what is later in {output} is now in {aside}")
    remove_oldest(output, total_limit)


def recover(final: Path):
    """Remove or bring back what a kill in `write` or `remove_oldest` left of a folder."""
    new, replaced = final.with_name(final.name + ".tmp"), final.with_name(final.name + ".old")
    with writing(final):
        if new.exists():
            shutil.rmtree(new)
        if replaced.exists() and final.exists():
            shutil.rmtree(replaced)
        elif replaced.exists():
            replaced.rename(final)


def save_if_best(output_dir, state: RunState, flags: dict, metrics: dict, is_main: bool):
    """Write checkpoint_best if metrics["score"] is above that of the one there, if any."""
    if metrics["score"] <= gather_objects(best_score(output_dir) if is_main else None)[0]:
        return
    state.check_finite()
    rng = gather_objects(torch.get_rng_state())
    if is_main:
        write(Path(output_dir) / BEST, state, flags, rng, metrics)


def write(final: Path, state: RunState, flags: dict, rng: list, metrics: dict | None = None):
    """Write the folder `final`, over one of that name. Raises CannotWrite as `replacing` does."""
    with replacing(final) as folder:
        write_files(folder, state, flags, rng, metrics)


@contextmanager
def replacing(final: Path):
    """A context that gives a new folder, which at its end takes the name `final`, whole.

    Raises CannotWrite, after which `final` is what it was.
    """
    recover(final)
    folder, replaced = final.with_name(final.name + ".tmp"), final.with_name(final.name + ".old")
    with writing(final):
        folder.mkdir()  # without parents: an output folder that was removed stays away
        yield folder
        for place in (*folder.rglob("*"), folder):
            sync(place)
        if final.exists():
            final.rename(replaced)  # removing it takes longer than the moment with neither there
        folder.rename(final)
        sync(final.parent)
        if replaced.exists():
            shutil.rmtree(replaced)


def write_files(folder: Path, state: RunState, flags: dict, rng: list, metrics: dict | None):
    """Write the files of a checkpoint into a folder."""
    if state.policy.peft:  # supervised training may train the language model whole
        state.policy.peft.save_pretrained(folder / "adapter")
    own = {name: parameter.detach() for name, parameter in state.policy.trainable.items()}
    weights = dict(trainables=own)
    if state.roles.has_teacher:
        weights["ema"] = state.roles.banks["teacher"]
    for name, bank in weights.items():
        on_cpu = {n: tensor.cpu().contiguous() for n, tensor in bank.items()}
        of_base = {"base": state.base.digest} if state.base else None
        save_file(on_cpu, folder / f"{name}.safetensors", of_base)
    with (folder / "training_state.pt").open("wb") as file:  # whose faults say what was wrong
        torch.save(state.state_dict() | dict(rng=rng), file)
    (folder / "config.json").write_text(json.dumps(flags, indent=2) + "\n")
    if metrics:
        scores = dict(step=state.step, score=metrics["score"], metrics=metrics)
        (folder / "eval.json").write_text(json.dumps(scores, indent=2) + "\n")
    give_usual_mode(folder)


def find(resume: str | None, output_dir) -> Path | None:
    """The folder that --resume means, if any; there may be a run without a checkpoint yet."""
    if resume in (None, "latest", "auto"):
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
            if not tensor.isfinite().all():
                raise ValueError(f"{folder}/{file}: {name} is not finite")
            parameter.copy_(tensor)


def check_base(folder: Path, file: str, base: Base):
    """Raise ValueError, naming both folders, if a file's weights were trained on another base.

    A file that does not say so, as older ones do not, is taken with a sentence.
    """
    stated = (open_weights(Path(folder) / file).metadata() or {}).get("base")
    if stated is None:
        print0(
            f"{folder}/{file} does not say on which base it was trained: taken for that of "
            f"{base.folders}"
        )
    elif stated != base.digest:
        began = read_json(Path(folder) / "config.json")
        began = " and ".join(began[n] for n in ("model_path", "sam_path") if began.get(n))
        raise ValueError(
            f"{folder} was trained on another base than the one in {base.folders}: the run started "
            f"from what then lay in {began}. Give that base as --model_path"
        )


def load(folder: Path, state: RunState, output_dir, rank: int):
    """Restore a run from `folder`.

    Raises ValueError if a file there or of the best is damaged, or its base was another.
    """
    if state.base:
        check_base(folder, "trainables.safetensors", state.base)
    load_weights(folder, state.policy.trainable)
    if state.roles.has_teacher:
        load_weights(folder, state.roles.banks["teacher"], "ema.safetensors")
    found = read_state(folder)
    if missing := sorted(set(state.state_dict()) - set(found)):
        raise ValueError(f"{folder}/training_state.pt has no {missing}, it is of another version")
    state.load_state_dict(found)
    if rank < len(found["rng"]):  # nothing depends on it across another number of ranks
        torch.set_rng_state(found["rng"][rank])
    best_score(output_dir)  # known to be readable before the next evaluation


def best_score(output_dir) -> float:
    """The score of checkpoint_best, or minus infinity. Raises DamagedFile."""
    folder = Path(output_dir) / BEST
    return read_json(folder / "eval.json")["score"] if folder.exists() else float("-inf")
