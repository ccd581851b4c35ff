"""The lab's base: a small Sa2VA from random weights on scenes of pictures nobody here made.

    python -m tools.experiments.base train --data_dir lab --output_dir bases/0 --seed 0
    python -m tools.experiments.base measure --data_dir lab --model_path bases/*/base \\
        --output bases/measures.json
    python -m tools.experiments.base table bases/measures-*.json --output bases/measures.md

train: captions of 10 % of the regions and masks of all that may be named, by `rl_train.sft`,
stopped early; nothing is injected. few_masks: the mirror of it, for loop 2: its LLM learns captions
of all and masks of part `captioned` alone. measure: accuracy by split, artist and concept, what is
taken for what, and a probe of what the features hold beyond what is said. table: what several
measure commands wrote, of the same regions, as one table.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl_train.config.flags import COUNT, COUNT_OR_0, SEED
from rl_train.config.grpo_config import DataConfig
from rl_train.data.workers import reporting_dead_workers
from rl_train.distributed import process_group
from rl_train.export.load_policy import find_base, open_policy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import CannotWrite, check_writable, read_json
from tools.demo.warm_start import MAX_ANSWER_TOKENS, PARTS
from tools.experiments.base.few_masks import BEFORE, train_few_masks
from tools.experiments.base.measure import markdown, measure_base
from tools.experiments.base.train import SIZES, train_on_scenes
from tools.experiments.pictures.dataset import TRUTH


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.base", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    scenes = "folder of scenes, of tools.experiments.pictures"
    train = commands.add_parser("train", help="train a base for loop 1")
    few = commands.add_parser("few_masks", help="train a base for loop 2")
    parts = {train: tuple(PARTS), few: (*BEFORE, "few_masks")}
    for command, names in parts.items():
        command.add_argument("--data_dir", required=True, type=Path, help=scenes)
        command.add_argument("--output_dir", required=True, type=Path, help="receives base/")
        command.add_argument("--size", choices=list(SIZES), default="small")
        command.add_argument("--seed", type=SEED, default=0, help="of the weights and the samples")
        steps = dict(nargs=len(names), type=COUNT, metavar=tuple(map(str.upper, names)))
        command.add_argument("--steps", **steps, help="of each part; default: the size's")
    measure = commands.add_parser("measure", help="measure bases")
    measure.add_argument("--data_dir", required=True, type=Path, help=scenes)
    measure.add_argument("--model_path", nargs="+", required=True, type=Path, help="bases")
    measure.add_argument("--output", required=True, type=Path, help="JSON file; table beside it")
    measure.add_argument("--num_samples", type=COUNT, default=400, help="regions of each split")
    probed = "training regions of the probe; 0: without it"
    measure.add_argument("--probe_samples", type=COUNT_OR_0, default=1500, help=probed)
    measure.set_defaults(max_completion_length=MAX_ANSWER_TOKENS)
    measure.set_defaults(max_prompt_length=DataConfig.max_prompt_length)
    measure.add_argument("--batch_size", type=COUNT, default=32)
    table = commands.add_parser("table", help="join what measure wrote of several bases")
    table.add_argument("measures", nargs="+", type=Path, help="JSON files")
    table.add_argument("--output", required=True, type=Path, help="Markdown file")
    for command in (train, few, measure):
        command.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
        command.add_argument("--num_workers", type=COUNT_OR_0, default=2, help="that read data")
    return parser


def check_scenes(args: argparse.Namespace):
    """Raise ValueError if a base cannot be trained on --data_dir into --output_dir."""
    check_writable("--output_dir", args.output_dir)
    if not (args.data_dir / "train" / TRUTH).is_file():
        raise ValueError(
            f"--data_dir {args.data_dir}: holds no scenes, make them with "
            "python -m tools.experiments.pictures scenes"
        )


def run_train(args: argparse.Namespace):
    check_scenes(args)
    size = SIZES[args.size]
    if args.steps:
        size = replace(size, loop1=replace(size.loop1, steps=tuple(args.steps)))
    train_on_scenes(size, args.data_dir, args.output_dir, args.seed, args.dtype, args.num_workers)


def run_few_masks(args: argparse.Namespace):
    check_scenes(args)
    size = SIZES[args.size]
    if args.steps:
        size = replace(size, loop2=replace(size.loop2, steps=tuple(args.steps)))
    train_few_masks(size, args.data_dir, args.output_dir, args.seed, args.dtype, args.num_workers)


def run_measure(args: argparse.Namespace):
    check_writable("--output", args.output, is_file=True)
    for path in args.model_path:  # said before data are read
        find_base(path, None, "--model_path", Sa2VAPolicy.family)
    ranks, records = process_group.init(), []
    try:
        for path in args.model_path:
            policy = open_policy(
                path, None, "policy", ranks.device, args.max_completion_length, dtype=args.dtype
            )
            records.append(reporting_dead_workers(args.num_workers, measure_base, policy, args))
    finally:
        process_group.close()
    text = markdown(records)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(dict(zip(map(str, args.model_path), records))) + "\n")
    args.output.with_suffix(".md").write_text(text)


def run_table(args: argparse.Namespace):
    check_writable("--output", args.output, is_file=True)
    records = []
    for file in args.measures:
        records += read_json(file).values()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(markdown(records))


RUN = dict(train=run_train, few_masks=run_few_masks, measure=run_measure, table=run_table)


def main(argv: Sequence[str] | None = None):
    args = build_parser().parse_args(argv)
    try:
        RUN[args.command](args)
    except (ValueError, CannotWrite) as error:  # the user's input: one sentence, no traceback
        raise SystemExit(f"base: {error}") from error


if __name__ == "__main__":
    run_program(main)
