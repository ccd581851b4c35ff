"""Merge a run's checkpoint into its base model: one folder in the layout of its base.

    python -m tools.export --checkpoint O/checkpoint_step_N --output D [--role policy]
                           [--model_path M] [--dtype bfloat16]

Of policy and teacher (ema) it takes the one that the run's held-out measures of that step prefer.
The folder holds the weights (safetensors, original key names), and a copy of every other file of
the base's folder: config, tokenizer and, if it is there, the original code, which can then load
what was trained here. Of a run with Qwen2.5-VL it is as transformers loads it, without the SAM2
that stood beside it.
"""

import argparse
import shutil
from pathlib import Path

import torch

from rl_train import checkpoint
from rl_train.files import check_writable, read_json
from rl_train.hub import model_folder
from rl_train.tasks.cycle_measures import SCORES, score
from tools.trained_policy import FILES, load_policy

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
    if role == "auto":
        role = preferred_role(folder) if (folder / FILES["ema"]).is_file() else "policy"
    policy = load_policy(folder, role, model_path, "cpu", dtype="float32", **beside(folder))
    base = model_folder(
        "--model_path", model_path or read_json(folder / "config.json")["model_path"]
    )
    unfinished = output.with_name(output.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed export left
    policy.save_merged(unfinished, dtype)
    for file in base.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name != "config.json":
            shutil.copyfile(file, unfinished / file.name)
    if output.exists():
        output.rmdir()
    unfinished.rename(output)
    return role


def beside(folder: Path) -> dict[str, object]:
    """What a checkpoint's run was told of what stands beside its base, as of `PolicyConfig`."""
    flags = read_json(folder / "config.json")
    names = ("sam_path", "image_side", "max_image_tokens")
    return {name: flags[name] for name in names if name in flags}  # runs of Sa2VA may have none


def preferred_role(folder: Path) -> str:
    """The role of a checkpoint that held-out samples prefer, by the score of checkpoint_best.

    The run has measured both roles at that step: in the checkpoint's own eval.json, or in
    evaluation/ beside it. Raises ValueError if it has not.
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
    scores = dict(policy=score(policy), ema=score(teacher))
    role = max(scores, key=scores.get)
    words = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    print(
        f"--role auto: {role}, by the mean of {' and '.join(SCORES)} on held-out samples: {words}"
    )
    return role


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="checkpoint_step_N folder of a run"
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="folder to write; must be empty or absent"
    )
    parser.add_argument(
        "--role",
        choices=["auto", "policy", "ema"],
        default="auto",
        help="whose weights to merge; auto: those that were better on held-out samples",
    )
    parser.add_argument("--model_path", help="the base; default: the --model_path of the run")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the written weights; default: the base's",
    )
    args = parser.parse_args(argv)
    try:
        role = export(
            args.checkpoint,
            args.output,
            args.role,
            args.model_path,
            args.dtype and getattr(torch, args.dtype),
        )
    except ValueError as error:
        raise SystemExit(f"export: {error}") from error
    print(f"{args.output}: {role} of {args.checkpoint}, merged")


if __name__ == "__main__":
    main()
