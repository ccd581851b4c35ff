"""Make the demo: drawn scenes in GAR's Arrow layout, and a tiny but complete Sa2VA checkpoint.

    python -m tools.demo.make_demo --output_dir outputs/demo # data + the checkpoint that ships here
    # data + one made anew
    python -m tools.demo.make_demo --output_dir outputs/demo --train_checkpoint

Everything is drawn by code from --seed, which also begins the checkpoint. The checkpoint, in the
original layout, is trained from random weights as the lab's bases are (`tools.demo.warm_start`):
masks of all regions, captions of one in a hundred, then it is stopped. No wrong word is taught: its
mistakes are those of too little data. It answers with one wording of Sa2VA's five, so that in loop
2 only the sampled mask can differ.
"""

import argparse
import json
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rl_train.config.flags import COUNT
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import read_json, write_json
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo.model import CONFIG
from tools.demo.new_folder import complete_or_absent
from tools.demo.scenes import ATTRIBUTES, HELDOUT, TRAIN, WARM_START, in_order, make_scene
from tools.demo.seen_masks import label_in
from tools.demo.warm_start import PARTS, Schedule, train_base
from tools.experiments.pictures.dataset import CAPTIONED, SEGMENTED, TRUTH
from tools.gar_writer import write_gar

SHIPPED_CHECKPOINT = Path(__file__).parent / "checkpoint"
SCHEDULE = Schedule((1200, 150, 150), (64, 64, 16), (1.5e-3, 4e-4, 6e-4))
TRAIN_SCENES, HELDOUT_SCENES, WARM_START_SCENES = 800, 100, 3000
CAPTIONED_ONE_IN = 100  # regions of the warm start
FLAGS_FILE = "flags.json"  # in warm_start/
VOCAB_SIZE = 640  # of the tokenizer at most, without special tokens


def write_split(folder: Path, seed: int, split: int, num_scenes: int, workers: int = 0):
    """Write one row per object of each scene, in GAR layout; drawn by `workers` processes."""

    def rows():
        scenes = in_order(partial(make_scene, seed, split), num_scenes, workers)
        # disable=None: no bar where the output is no terminal
        for scene in tqdm(scenes, desc="scenes", total=num_scenes, leave=False, disable=None):
            for obj in scene.objects:
                yield dict(
                    image=scene.image, mask=obj.mask, caption=obj.caption, category=obj.shape
                )

    write_gar(rows(), folder)


def write_warm_start(
    folder: Path, seed: int, num_scenes: int, captioned_one_in: int, workers: int = 0
):
    """Write what the checkpoint is trained on, in the layout of `tools.demo.warm_start`."""
    scenes = in_order(partial(make_scene, seed, WARM_START), num_scenes, workers)
    regions = [(i, scene.image, obj) for i, scene in enumerate(scenes) for obj in scene.objects]
    parts = {SEGMENTED: regions, CAPTIONED: regions[::captioned_one_in]}
    for part, members in parts.items():
        rows = (
            dict(image=image, mask=obj.mask, caption=obj.caption, category=obj.shape)
            for _, image, obj in members
        )
        write_gar(rows, folder, part=part)
    lines = (
        dict(scene=i, label=label_in(obj.caption), caption=obj.caption, unnamed=False)
        for i, _, obj in regions
    )
    (folder / TRUTH).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def warm_start_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that a checkpoint follows from."""
    names = ("seed", "warm_start_scenes", "captioned_one_in", "warm_start_steps", "dtype")
    return {name: getattr(args, name) for name in names}


def fault_of(args: argparse.Namespace) -> str | None:
    """Return why --train_checkpoint cannot write to --output_dir, or None."""
    checkpoint, warm_start = (args.output_dir / name for name in ("checkpoint", "warm_start"))
    if checkpoint.exists():
        return f"{checkpoint} is there already, name another --output_dir"
    if warm_start.exists():
        record = warm_start / FLAGS_FILE
        if not record.exists() or read_json(record) != warm_start_flags(args):
            return f"{warm_start} was begun with other flags, name another --output_dir"
    return None


def train_checkpoint(output_dir: Path, args: argparse.Namespace):
    """Train a Sa2VA from random weights into output_dir/checkpoint (bf16 numbers, tokenizer).

    A part of the training that output_dir/warm_start has is not done again.
    """
    warm_start = output_dir / "warm_start"
    data = warm_start / "data"
    warm_start.mkdir(exist_ok=True)
    write_json(warm_start / FLAGS_FILE, warm_start_flags(args))
    if not data.exists():
        with complete_or_absent(data) as unfinished:
            write_warm_start(
                unfinished, args.seed, args.warm_start_scenes, args.captioned_one_in, args.workers
            )
    schedule = replace(SCHEDULE, steps=tuple(args.warm_start_steps))
    heldout = output_dir / "heldout"
    train_base(
        CONFIG, VOCAB_SIZE, schedule, data, heldout, warm_start, args.seed, args.dtype, args.workers
    )
    with complete_or_absent(output_dir / "checkpoint") as unfinished:
        shutil.copytree(warm_start / "base", unfinished, dirs_exist_ok=True)


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.demo.make_demo", description=__doc__)
    add = parser.add_argument
    outputs = "receives train/, heldout/, checkpoint/, attributes.json"
    add("--output_dir", type=Path, required=True, help=outputs)
    add("--train_scenes", type=int, default=TRAIN_SCENES, help="scenes drawn for training")
    add("--heldout_scenes", type=int, default=HELDOUT_SCENES, help="scenes drawn for evaluation")
    add(
        "--train_checkpoint",
        action="store_true",
        help="train the checkpoint instead of copying the shipped one",
    )
    add(
        "--warm_start_steps",
        type=int,
        nargs=len(PARTS),
        default=list(SCHEDULE.steps),
        metavar=tuple(map(str.upper, PARTS)),
        help="steps of the supervised training's parts",
    )
    add(
        "--warm_start_scenes",
        type=int,
        default=WARM_START_SCENES,
        help="scenes drawn for the warm start",
    )
    add(
        "--captioned_one_in",
        type=COUNT,
        default=CAPTIONED_ONE_IN,
        help="of how many regions of the warm start one has a caption",
    )
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the training")
    add("--workers", type=int, default=0, help="processes that draw and read; 0: this one")
    add("--seed", type=int, default=0)
    return parser


def main(argv: list[str] | None = None):
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.train_checkpoint and (fault := fault_of(args)):
        parser.error(f"--train_checkpoint: {fault}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    attribute_phrases = {name: {value: [value] for value in vs} for name, vs in ATTRIBUTES.items()}
    (args.output_dir / "attributes.json").write_text(json.dumps(attribute_phrases, indent=1) + "\n")
    for name, split, count in (
        ("train", TRAIN, args.train_scenes),
        ("heldout", HELDOUT, args.heldout_scenes),
    ):
        if not (args.output_dir / name).exists():
            began, folder = time.perf_counter(), args.output_dir / name
            print(f"drawing {count} scenes into {folder}", flush=True)
            with complete_or_absent(folder) as unfinished:
                write_split(unfinished, args.seed, split, count, args.workers)
            print(f"drawn in {time.perf_counter() - began:.0f} s", flush=True)
    checkpoint = args.output_dir / "checkpoint"
    if args.train_checkpoint:
        train_checkpoint(args.output_dir, args)
    elif not checkpoint.exists():
        with complete_or_absent(checkpoint) as unfinished:
            shutil.copytree(SHIPPED_CHECKPOINT, unfinished, dirs_exist_ok=True)
    load_tokenizer(checkpoint)
    print(f"demo: {args.output_dir}/train, {args.output_dir}/heldout, {checkpoint}", flush=True)


if __name__ == "__main__":
    run_program(main)
