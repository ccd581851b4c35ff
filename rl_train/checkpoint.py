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
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_train.distributed import gather_objects
from rl_train.files import DamagedFile, read_json

NAME = re.compile(r"checkpoint_step_(\d+)$")
BEST = "checkpoint_best"


def list_checkpoints(output_dir) -> list[Path]:
    """Complete checkpoints in order of their steps."""
    found = [p for p in Path(output_dir).glob("checkpoint_step_*") if NAME.search(p.name)]
    return sorted(found, key=lambda p: int(NAME.search(p.name)[1]))


def save(output_dir, step: int, policy, roles, optimizer, scheduler, args, is_main: bool):
    """Write checkpoint_step_N, and remove the oldest beyond --save_total_limit."""
    rng = gather_objects(rng_state())
    if not is_main:
        return
    write(
        Path(output_dir) / f"checkpoint_step_{step}",
        step,
        policy,
        roles,
        optimizer,
        scheduler,
        args,
        rng,
    )
    if args.save_total_limit:
        past = [p for p in list_checkpoints(output_dir) if int(NAME.search(p.name)[1]) <= step]
        for old in past[: -args.save_total_limit]:
            shutil.rmtree(old)


def save_if_best(
    output_dir,
    step: int,
    score: float,
    metrics: dict[str, float],
    policy,
    roles,
    optimizer,
    scheduler,
    args,
    is_main: bool,
):
    """Write checkpoint_best if `score` is above that of the one that is there, or none is; a resumed run goes on comparing."""
    final = Path(output_dir) / BEST
    best = float("-inf")
    if is_main and final.exists():
        best = read_json(final / "eval.json")["score"]
    if score <= gather_objects(best)[0]:
        return
    rng = gather_objects(rng_state())
    if is_main:
        write(
            final,
            step,
            policy,
            roles,
            optimizer,
            scheduler,
            args,
            rng,
            dict(step=step, score=score, metrics=metrics),
        )


def write(
    final: Path,
    step: int,
    policy,
    roles,
    optimizer,
    scheduler,
    args,
    rng: list,
    scores: dict | None = None,
):
    """Write the folder `final` under a temporary name and rename it; it replaces one of that name."""
    folder, replaced = final.with_name(final.name + ".tmp"), final.with_name(final.name + ".old")
    for leftover in (folder, replaced):  # of a killed run
        if leftover.exists():
            shutil.rmtree(leftover)
    folder.mkdir(parents=True)
    policy.peft.save_pretrained(folder / "adapter")
    save_file(
        {n: p.detach().cpu().contiguous() for n, p in policy.trainable.items()},
        folder / "trainables.safetensors",
    )
    save_file(
        {n: t.cpu().contiguous() for n, t in roles.banks["teacher"].items()},
        folder / "ema.safetensors",
    )
    torch.save(
        dict(
            step=step, optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict(), rng=rng
        ),
        folder / "training_state.pt",
    )
    (folder / "config.json").write_text(json.dumps(vars(args), indent=2) + "\n")
    if scores:
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


def load(folder: Path, policy, roles, optimizer, scheduler, rank: int):
    """Restore a run from `folder`."""
    load_weights(folder, policy.trainable)
    load_weights(folder, roles.banks["teacher"], "ema.safetensors")
    state = read_state(folder)
    for group in state["optimizer"]["param_groups"]:
        group["fused"] = optimizer.defaults[
            "fused"
        ]  # is this machine's, not that of the one which wrote the checkpoint
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if rank < len(state["rng"]):  # nothing depends on it across another number of ranks
        restore_rng(state["rng"][rank])


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
