"""A checkpoint merged into its base: the folder that `tools.export` and --export_final write."""

import shutil
from pathlib import Path

import torch

from rl_train import checkpoint
from rl_train.distributed import print0
from rl_train.files import CannotWrite, check_writable, give_usual_mode, read_json, writing
from rl_train.hub import model_folder
from rl_train.model_card import COPIED_AS, write_card
from rl_train.tasks.cycle_measures import SCORES, score
from rl_train.trained_policy import FILES, load_policy
from sa2va_hf.loading import stored_dtype

ROLES = ["auto", "policy", "ema"]
GIB = 2**30
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def export(
    folder: Path,
    output: Path,
    role: str = "policy",
    model_path: str | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """Write `output` from the checkpoint in `folder`; returns the role that it holds.

    The LoRA is merged in float32 and the sum cast to `dtype`: in bfloat16 small updates would
    vanish one by one.

    Args:
        role: "policy", "ema" (the teacher) or "auto", see `preferred_role`.
        model_path: the base; default is the one that the run was started with.
        dtype: of the written weights; default is that of the base's file.

    Raises:
        ValueError: `output` is not empty or cannot be written, `folder` is no checkpoint or lacks a
            file, it trains other weights than the base has, or "auto" finds no measures.
        CannotWrite: the disk is too small; whatever it is, `output` is then as it was.
    """
    folder, output = Path(folder), Path(output)
    if not (folder / "config.json").is_file() or not (folder / "trainables.safetensors").is_file():
        raise ValueError(
            f"--checkpoint {folder}: config.json and trainables.safetensors are not both there, "
            "it is not a checkpoint_step_N folder"
        )
    for place in (output, output.parent):  # beside it lies what is unfinished
        check_writable("--output", place)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty")
    role = role_of(folder, role)
    base, policy = load(folder, output, role, model_path, dtype)
    unfinished = output.with_name(output.name + ".tmp")
    with writing(output):
        shutil.rmtree(unfinished, ignore_errors=True)  # what a killed export left
        unfinished.mkdir(parents=True)
        write(unfinished, folder, base, role, policy, dtype)
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
    return role


def export_final(folder: Path, output: Path, role: str) -> str:
    """`export` of the run's own last checkpoint, in place of what an earlier end has written."""
    role = role_of(folder, role)
    base, policy = load(folder, output, role)
    with checkpoint.replacing(output) as unfinished:
        write(unfinished, folder, base, role, policy)
    return role


def load(folder: Path, output: Path, role: str, model_path=None, dtype=None) -> tuple:
    """(folder of the base, the policy) of a checkpoint, if there is room for it at `output`."""
    started = read_json(folder / "config.json")["model_path"]
    base = model_folder("--model_path", model_path or started)
    policy = load_policy(folder, role, base, "cpu", dtype="float32", **beside(folder))
    if lack := lacking(base, output, dtype):
        raise CannotWrite(f"{output} cannot be written: {lack}")
    return base, policy


def write(unfinished: Path, folder: Path, base: Path, role: str, policy, dtype=None):
    """Write all files of an export into the folder `unfinished`; ends the policy's use."""
    write_card(unfinished, folder, base, role, policy)
    policy.save_merged(unfinished, dtype)
    for file in base.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name != "config.json":
            shutil.copyfile(file, unfinished / COPIED_AS.get(file.name, file.name))
    give_usual_mode(unfinished)


def lacking(base: Path, place: Path, dtype: torch.dtype | None = None) -> str:
    """What the disk of `place` lacks for the model of folder `base` in `dtype`, "" if nothing.

    By the size of its files; each checkpoint to come needs room of its own.
    """
    there = next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())
    larger = dtype.itemsize / stored_dtype(base).itemsize if dtype else 1
    needed = larger * sum(file.stat().st_size for file in base.iterdir() if file.is_file())
    free = shutil.disk_usage(there).free
    return f"{needed / GIB:.2f} GiB are needed, {free / GIB:.2f} are free" * (needed > free)


def beside(folder: Path) -> dict[str, object]:
    """What a checkpoint's run was told of what stands beside its base, as of `PolicyConfig`."""
    flags = read_json(folder / "config.json")
    names = ("sam_path", "image_side", "max_image_tokens")
    return {name: flags[name] for name in names if name in flags}  # runs of Sa2VA may have none


def role_of(folder: Path, role: str) -> str:
    """The role that `role` means of a checkpoint: "auto" is the better one, if there are two."""
    if role != "auto":
        return role
    return preferred_role(folder) if (folder / FILES["ema"]).is_file() else "policy"


def preferred_role(folder: Path) -> str:
    """The role of a checkpoint that held-out samples prefer, by the score of checkpoint_best.

    That is the mean that its --best_by names. The run has measured both roles at that step: in the
    checkpoint's own eval.json, or in evaluation/ beside it. Raises ValueError if it has not.
    """
    at_step = checkpoint.NAME.search(folder.resolve().name)
    file = folder / "eval.json"
    if at_step:
        file = folder.resolve().parent / "evaluation" / f"step_{at_step[1]}.json"
    found = read_json(file) if file.is_file() else {}
    policy = found.get("means" if at_step else "metrics", {})
    teacher = found.get("teacher", {}).get("means") if at_step else policy.get("teacher")
    if not teacher:
        raise ValueError(
            f"--role auto: {file} does not hold held-out measures of policy and teacher; pass "
            f"--role policy or --role ema, or measure both: tools.evaluate --model_path {folder} "
            "--role .."
        )
    names = read_json(folder / "config.json").get("best_by", [])  # older runs have none
    scores = dict(policy=score(policy, names), ema=score(teacher, names))
    role = max(scores, key=scores.get)
    words = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    means = " and ".join(names or SCORES)
    print0(f"--role auto: {role}, by the mean of {means} on held-out samples: {words}")
    return role
