"""Merge a run's checkpoint into its base model: one folder in the original Sa2VA layout.

    python -m tools.export --checkpoint O/checkpoint_step_N --output D [--role ema]
                           [--model_path M] [--dtype bfloat16]

The folder holds the weights (safetensors, original key names), and a copy of every other file of
the base's folder: config, tokenizer and, if it is there, the original code, which can then load
what was trained here.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors import safe_open

from rl_train.files import check_writable
from tools.trained_policy import load_policy

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def export(
    folder: Path,
    output: Path,
    role: str = "policy",
    model_path: str | None = None,
    dtype: torch.dtype | None = None,
):
    """Write `output` from the checkpoint in `folder`.

    The LoRA is merged in float32 and the sum cast to `dtype`: in bfloat16 small updates would
    vanish one by one.

    Args:
        role: "policy" or "ema" (the teacher).
        model_path: the base; default is the one that the run was started with.
        dtype: of the written weights; default is that of the base's file.

    Raises:
        ValueError: `output` is not empty or cannot be written, `folder` is no checkpoint or lacks a
            file, or it trains other weights than the base has.
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
    policy = load_policy(folder, role, model_path, "cpu", dtype="float32")
    base = policy.model.folder
    policy.engine.release()  # weights that it has taken over cannot be merged and saved
    policy.peft.merge_and_unload()
    unfinished = output.with_name(output.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed export left
    policy.model.save_pretrained(unfinished, dtype or stored_dtype(base))
    for file in base.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name != "config.json":
            shutil.copyfile(file, unfinished / file.name)
    if output.exists():
        output.rmdir()
    unfinished.rename(output)


def stored_dtype(folder: Path) -> torch.dtype:
    """Dtype of the LLM's embedding in the safetensors of `folder`."""
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            for key in reader.keys():
                if key.startswith("language_model.") and key.endswith("norm.weight"):
                    return names[reader.get_slice(key).get_dtype()]
    raise ValueError(f"{folder} holds no safetensors with a language model")


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
        "--role", choices=["policy", "ema"], default="policy", help="whose weights to merge"
    )
    parser.add_argument("--model_path", help="the base; default: the --model_path of the run")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the written weights; default: the base's",
    )
    args = parser.parse_args(argv)
    try:
        export(
            args.checkpoint,
            args.output,
            args.role,
            args.model_path,
            args.dtype and getattr(torch, args.dtype),
        )
    except ValueError as error:
        raise SystemExit(f"export: {error}") from error
    print(f"{args.output}: {args.role} of {args.checkpoint}, merged")


if __name__ == "__main__":
    main()
