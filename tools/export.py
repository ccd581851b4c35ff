"""Merge a run's checkpoint into its base model: one folder in the layout of its base.

    python -m tools.export --checkpoint O/checkpoint_step_N --output D [--role policy]
                           [--model_path M] [--dtype bfloat16]

It takes policy or teacher, whichever scored better on the evaluation split at that step.
The folder holds the weights (safetensors, original key names), a copy of every other file of the
base's folder: config, tokenizer and, if it is there, the original code, which can then load what
was trained here; and a model card with what the run knows of itself. Of a run with Qwen-VL it is
as transformers loads it, without the SAM2 that stood beside it. A run's --merge_at_end does the
same at its end.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from rl_train.export.merge import ROLES, export
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import CannotWrite, check_writable


def main(argv: Sequence[str] | None = None):
    parser = FlagParser(
        prog="python -m tools.export",
        description=__doc__,
    )
    parser.add_argument("--checkpoint", required=True, type=Path, help="checkpoint folder of a run")
    parser.add_argument(
        "--output", required=True, type=Path, help="folder to write; must be empty or absent"
    )
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="auto",
        help="weights to merge; auto: those that were better on the evaluation split",
    )
    parser.add_argument("--model_path", help="the base; default: the --model_path of the run")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the written weights; default: the base's",
    )
    args = parser.parse_args(argv)
    try:
        for path in (args.output, args.output.parent):
            check_writable("--output", path)
        if args.output.exists() and any(args.output.iterdir()):
            raise ValueError(f"--output {args.output} is not empty")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        role = export(
            args.checkpoint,
            args.output,
            args.role,
            args.model_path,
            getattr(torch, args.dtype) if args.dtype else None,
        )
    except (ValueError, CannotWrite) as error:
        raise SystemExit(f"export: {error}") from error
    print(f"{args.output}: {role} of {args.checkpoint}, merged")


if __name__ == "__main__":
    run_program(main)
