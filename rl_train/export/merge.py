"""A checkpoint merged into its base: the folder that `tools.export` and --merge_at_end write."""

import json
import shutil
from pathlib import Path

import torch

from rl_train.checkpoint.save_load import WEIGHT_FILES, read_state, replacing
from rl_train.distributed.process_group import print0
from rl_train.evaluation.cycle_metrics import metrics_for_best, selection_score
from rl_train.export.load_policy import load_policy
from rl_train.export.model_card import CARD, name_of_base_card, write_card
from rl_train.utils.io import read_json
from sa2va_hf.hub import CHECKPOINT_FILE, model_folder

ROLES = ["auto", "policy", "teacher"]
# Flags of a run that an exported Sa2VA is asked by from now on: keys of its config.json.
KEPT_FLAGS = ("region_prompt",)
NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def export(
    folder: Path,
    output: Path,
    role: str = "policy",
    model_path: str | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """Write `output` from the checkpoint in `folder`, over a folder of that name; return the role.

    The LoRA is merged in float32 and the sum cast to `dtype`: in bfloat16 small updates would
    vanish one by one.

    Args:
        role: "policy", "teacher" or "auto", see `preferred_role`.
        model_path: the base; default is the one that the run was started with.
        dtype: of the written weights; default is that of the base's file.

    Raises:
        ValueError: a file of the checkpoint is missing or damaged, it trains other weights than the
            base has, or "auto" finds no metrics.
        CannotWrite: see `replacing`; `output` is then as it was.
    """
    check_is_checkpoint(folder)
    flags = read_json(folder / "config.json")
    model_path = model_path or flags["model_path"]
    base = model_folder("--model_path", model_path)
    role = preferred_role(folder) if role == "auto" else role
    # On the CPU: an export needs no GPU, and may run beside a training that fills it.
    policy = load_policy(folder, role, base, "cpu", dtype="float32")
    with replacing(output) as unfinished:
        write_card(unfinished, folder, base, role)
        policy.save_merged(unfinished, dtype)
        trained_with = {name: flags[name] for name in KEPT_FLAGS if flags.get(name)}
        copy_other_files(base, unfinished, dtype, trained_with)
    return role


def check_is_checkpoint(folder: Path):
    """Raise ValueError, naming the checkpoints nearby, if `folder` is none of a run."""
    if any((folder / name).is_file() for name in (CHECKPOINT_FILE, *WEIGHT_FILES.values())):
        return  # if one of its other files is missing, that is said where it is read
    nearby = [
        *folder.glob(f"*/{CHECKPOINT_FILE}"),
        *folder.resolve().parent.glob(f"*/{CHECKPOINT_FILE}"),
    ]
    newest = max(nearby, key=lambda file: file.stat().st_mtime, default=None)
    remedy = f"give one, such as {newest.parent}" if newest else "it is named checkpoint_step_N"
    raise ValueError(f"--checkpoint {folder}: is no checkpoint of a run; {remedy}")


def copy_other_files(
    base: Path, output: Path, dtype: torch.dtype | None, trained_with: dict[str, str] | None = None
):
    """Copy all but the weights byte for byte, so that whatever reads the base reads the output.

    config.json is written anew if the weights have another `dtype` than it names, which changes its
    two keys for that, or if it lacks what is in `trained_with`, {key: value}.
    """
    for file in base.iterdir():
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            name = name_of_base_card(base) if file.name == CARD else file.name
            shutil.copyfile(file, output / name)
    config, changes = read_json(base / "config.json"), dict(trained_with or {})
    if dtype:
        name = str(dtype).removeprefix("torch.")
        keys = [key for key in ("dtype", "torch_dtype") if config.get(key, name) != name]
        changes |= dict.fromkeys(keys, name)
    if config | changes != config:
        text = json.dumps(config | changes, indent=2, ensure_ascii=False)
        (output / "config.json").write_text(text + "\n")


def preferred_role(folder: Path) -> str:
    """Return the role of a checkpoint with the better score on the evaluation split at its step.

    The score is that of checkpoint_best, by the run's evaluation beside the checkpoint. Without a
    teacher it is the policy. Raises ValueError if the run has not evaluated both.
    """
    if not (folder / WEIGHT_FILES["teacher"]).is_file():
        return "policy"
    step = read_state(folder)["step"]
    file = folder.resolve().parent / "evaluation" / f"step_{step}.json"
    evaluation = read_json(file) if file.is_file() else {}
    if "teacher" not in evaluation:
        raise ValueError(
            f"--role auto: {file} does not hold metrics of policy and teacher; pass --role policy "
            f"or --role teacher, or measure both: tools.evaluate --model_path {folder} --role .."
        )
    names = evaluation["flags"]["metric_for_best_model"]
    metrics = dict(policy=evaluation["means"], teacher=evaluation["teacher"]["means"])
    scores = {role: selection_score(means, names) for role, means in metrics.items()}
    best = max(scores, key=scores.get)
    alike = len({f"{score:.4f}" for score in scores.values()}) == 1
    digits = 8 if alike else 4  # of equal scores the policy's counts
    shown = ", ".join(f"{role} {score:.{digits}f}" for role, score in scores.items())
    chosen = metrics_for_best(evaluation["means"], names)
    score = f"the mean of {' and '.join(chosen)}" if len(chosen) > 1 else chosen[0]
    print0(f"merging the {best}, by {score} on the evaluation split: {shown}")
    return best
