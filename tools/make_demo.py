"""Make the demo: drawn scenes in GAR's Arrow layout, and a tiny but complete Sa2VA checkpoint.

    python -m tools.make_demo --output_dir outputs/demo      # data + the checkpoint that ships here
    python -m tools.make_demo --output_dir outputs/demo --train_checkpoint  # data + one made anew
    python -m tools.make_demo --size mid --device cuda --workers 16 --output_dir outputs/mid \\
        --train_checkpoint     # richer scenes at 448 px and 63 M weights, on a GPU

Everything is drawn by code from --seed, which also begins the checkpoint. That, in the original
layout, is warm-started by supervised training on the prompts and the encode rule of
`sa2va_hf.prompts` and `sa2va_hf.templates`, so that there is something to learn of either loop, and
no shortcut: its captions are of one kind and length and mistake half of the values of each
attribute for another (`demo_warm_start.MISTAKES`), though it can tell them apart; its masks are
decided, but `text_hidden_fcs`, through which [SEG] prompts SAM2, is disturbed, so that three of
ten lie on a wrong object (`demo_unsettle`). It answers with one wording of Sa2VA's five, so that
in loop 2 nothing but the sampled mask can differ. `tools.demo_report` shows it.
"""

import argparse
import json
import shutil
import time
from functools import partial
from pathlib import Path

import torch

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo_model import initialise, make_tokenizer
from tools.demo_scenes import HELDOUT, TINY, TRAIN, Kind, in_order, make_scene
from tools.demo_sizes import SIZES, Size
from tools.demo_unsettle import decide, unsettle
from tools.demo_warm_start import WarmStart
from tools.gar_writer import write_gar
from tools.new_folder import save

SHIPPED_CHECKPOINT = Path(__file__).parent / "demo_checkpoint"
PARTS = ("look", "talk", "err", "see", "draw", "unsettle", "decide")  # of the warm start, in order


def write_split(
    folder: Path, seed: int, split: int, num_scenes: int, kind: Kind = TINY, workers: int = 0
):
    """Write one row per object of each scene, in GAR layout; drawn by so many processes."""

    def rows():
        draw = partial(make_scene, seed, split, kind=kind)
        for scene in in_order(draw, num_scenes, workers):
            for obj in scene.objects:
                yield dict(
                    image=scene.image, mask=obj.mask, caption=obj.caption, category=obj.shape
                )

    write_gar(rows(), folder)


def train_checkpoint(output_dir: Path, size: Size, args):
    """Train a Sa2VA from random weights into output_dir/checkpoint (bf16 numbers, tokenizer).

    After each part it is saved as output_dir/warm_start, from which a later one may begin.
    """
    torch.manual_seed(args.seed)
    halfway = output_dir / "warm_start"
    tokenizer = make_tokenizer(args.seed, size.kind, args.workers)
    if args.parts[0] == PARTS[0]:
        llm = size.config["llm_config"] | {"vocab_size": len(tokenizer)}
        model = Sa2VAModel(Sa2VAConfig(**size.config | {"llm_config": llm}))
        initialise(model)
    else:
        model = Sa2VAModel.from_pretrained(halfway)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights")
    warm_start = WarmStart(
        model.to(args.device),
        tokenizer,
        Sa2VAProcessor(model.config, max_tiles=1),
        args.seed,
        args.warm_start_scenes or size.warm_start_scenes,
        kind=size.kind,
        batch_size=size.batch_size,
        learning_rate=args.warm_start_learning_rate or size.learning_rate,
        workers=args.workers,
        bfloat16=size.bfloat16 and args.device != "cpu",
    )
    steps = size.warm_start_steps
    if args.warm_start_steps:
        steps = dict(zip(steps, args.warm_start_steps))
    for part in args.parts:
        began = time.perf_counter()
        if part == "unsettle":
            unsettle(warm_start)
        elif part == "decide":
            decide(warm_start, steps[part])
        else:
            getattr(warm_start, part)(steps[part])
        save(model, tokenizer, halfway)
        print(f"{part}: {time.perf_counter() - began:.0f} s, saved as {halfway}", flush=True)
    save(model, tokenizer, output_dir / "checkpoint")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    outputs = "receives train/, heldout/, checkpoint/, attributes.json"
    add("--output_dir", type=Path, required=True, help=outputs)
    add("--size", choices=list(SIZES), default="tiny", help="of scenes and model (demo_sizes.py)")
    add("--train_scenes", type=int, help="scenes drawn for training; default: the size's")
    add("--heldout_scenes", type=int, help="scenes drawn for evaluation; default: the size's")
    add(
        "--train_checkpoint",
        action="store_true",
        help="train the checkpoint instead of copying the shipped one, which is tiny",
    )
    add(
        "--warm_start_steps",
        type=int,
        nargs=6,
        metavar=("LOOK", "TALK", "ERR", "SEE", "DRAW", "DECIDE"),
        help="optimizer steps of the parts of the supervised warm start: vision encoder, captions, "
        "mistakes, SAM2's vision encoder, masks, decided masks; default: the size's",
    )
    add(
        "--warm_start_scenes", type=int, help="scenes drawn for the warm start; default: the size's"
    )
    add("--warm_start_learning_rate", type=float, help="its peak; default: the size's")
    add(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="of the warm start, to do again those after one that is in OUTPUT_DIR/warm_start",
    )
    add("--device", default="cpu", help="of the warm start")
    add("--workers", type=int, default=0, help="processes that draw scenes; 0: this one")
    add("--seed", type=int, default=0)
    return parser


def main(argv=None):
    parser = build_parser()
    args = parser.parse_args(argv)
    size = SIZES[args.size]
    if args.size != "tiny" and not args.train_checkpoint:
        parser.error(f"--size {args.size} needs --train_checkpoint: only the tiny one ships")
    if args.parts != [part for part in PARTS if part in args.parts]:
        parser.error(f"--parts {' '.join(args.parts)}: their order is {' '.join(PARTS)}")
    if size.bfloat16 and args.device != "cpu":
        torch.set_float32_matmul_precision("high")  # of what is not in bfloat16
    args.output_dir.mkdir(parents=True, exist_ok=True)
    values = size.kind.attributes
    vocabulary = {name: {value: [value] for value in vs} for name, vs in values.items()}
    (args.output_dir / "attributes.json").write_text(json.dumps(vocabulary, indent=1) + "\n")
    for name, split, count in (
        ("train", TRAIN, args.train_scenes or size.train_scenes),
        ("heldout", HELDOUT, args.heldout_scenes or size.heldout_scenes),
    ):
        if not (args.output_dir / name).exists():
            began, folder = time.perf_counter(), args.output_dir / name
            write_split(folder, args.seed, split, count, size.kind, args.workers)
            print(f"{name}: {count} scenes in {time.perf_counter() - began:.0f} s", flush=True)
    checkpoint = args.output_dir / "checkpoint"
    if args.train_checkpoint:
        train_checkpoint(args.output_dir, size, args)
    elif not checkpoint.exists():
        shutil.copytree(SHIPPED_CHECKPOINT, checkpoint)
    load_tokenizer(checkpoint)
    print(f"demo: {args.output_dir}/train, {args.output_dir}/heldout, {checkpoint}")


if __name__ == "__main__":
    main()
