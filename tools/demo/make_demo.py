"""Make the demo: drawn scenes in GAR's Arrow layout, and a tiny but complete Sa2VA checkpoint.

    python -m tools.demo.make_demo --output_dir outputs/demo # data + the checkpoint that ships here
    # data + one made anew
    python -m tools.demo.make_demo --output_dir outputs/demo --train_checkpoint

Everything is drawn by code from --seed, which also begins the checkpoint. The checkpoint, in the
original layout, is trained by `rl_train.sft` from random weights. Its mistakes are put in by hand,
so that the rewards of both loops have room: its captions have one form and length and swap the
words of some pairs (`tools.demo.mistakes`); noise on `text_hidden_fcs`, through which [SEG] prompts
SAM2, moves three or four of ten masks to a wrong object (`tools.demo.unsettle`). Cheaper causes
than reading the picture mend both (docs/results.md): the demo shows the loops working, not
learning. It answers with one wording of Sa2VA's five, so that in loop 2 only the sampled mask can
differ.
"""

import argparse
import json
import shutil
import time
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from rl_train import sft
from rl_train.config.grpo_config import PolicyConfig
from rl_train.policies.sa2va import build_policy
from rl_train.train import main as run_training
from rl_train.utils.command_line import FlagParser, run_program
from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo.model import CONFIG, initialise, make_tokenizer
from tools.demo.new_folder import complete_or_absent, save
from tools.demo.scenes import ATTRIBUTES, HELDOUT, TRAIN, WARM_START, in_order, make_scene
from tools.demo.unsettle import unsettle
from tools.gar_writer import write_gar

SHIPPED_CHECKPOINT = Path(__file__).parent / "checkpoint"
ALL = "vision mlp1 language_model embeddings text_hidden_fcs sam2 sam2_encoder"
# Flags of the supervised training's parts, in order; "unsettle" comes before the last.
PARTS = dict(
    hints="--tasks tools.demo.hints:HintedCaptions tools.demo.hints:HintedMasks --one_answer "
    f"--distractors --trainable_modules {ALL}",
    learn=f"--tasks region_captions referring_segmentation --one_answer --trainable_modules {ALL}",
    err="--tasks tools.demo.mistakes:MistakenCaptions referring_segmentation --one_answer "
    "--trainable_modules language_model embeddings text_hidden_fcs",
    unsettle="",
    decide="--tasks tools.demo.unsettle:Decided --distractors --trainable_modules hypernetworks",
)
# (max_steps, learning_rate) of each part that trains
SCHEDULES = dict(hints=(750, 1e-3), learn=(150, 6e-4), err=(200, 5e-4), decide=(20, 1e-3))
BATCH_SIZE = 64
TRAIN_SCENES, HELDOUT_SCENES, WARM_START_SCENES = 800, 100, 1500
MAX_ANSWER_TOKENS = 24


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


def train_checkpoint(output_dir: Path, args: argparse.Namespace):
    """Train a Sa2VA from random weights into output_dir/checkpoint (bf16 numbers, tokenizer).

    Each part of PARTS begins with what the one before it left in output_dir/warm_start/part.
    """
    torch.manual_seed(args.seed)
    warm_start = output_dir / "warm_start"
    before = warm_start / "random"
    tokenizer = make_tokenizer(args.seed, args.workers)
    if args.parts[0] == "hints":
        llm = CONFIG["llm_config"] | {"vocab_size": len(tokenizer)}
        model = Sa2VAModel(Sa2VAConfig(**CONFIG | {"llm_config": llm}))
        initialise(model)
        model.save_pretrained(before, torch.float32)
        tokenizer.save_pretrained(before)
        shutil.rmtree(warm_start / "data", ignore_errors=True)
        scenes = args.warm_start_scenes
        write_split(warm_start / "data", args.seed, WARM_START, scenes, args.workers)
    steps = dict(zip(SCHEDULES, args.warm_start_steps))
    for part in PARTS:
        model = warm_start / part / "final_model"
        # Parts that were done before are only passed on to the next.
        if part in args.parts:
            began = time.perf_counter()
            if part == "unsettle":
                unsettled(before, model, warm_start / "data", args.seed)
            else:
                supervise(part, before, output_dir, steps[part], args)
            print(f"{part}: {time.perf_counter() - began:.0f} s, {model}", flush=True)
        before = model
    save(Sa2VAModel.from_pretrained(before), tokenizer, output_dir / "checkpoint")


def supervise(part: str, base: Path, output_dir: Path, max_steps: int, args: argparse.Namespace):
    """Train the model in `base` by a part of PARTS: the run in output_dir/warm_start/part."""
    flags = dict(model_path=base, data_dir=output_dir / "warm_start" / "data")
    flags |= dict(eval_data_dir=output_dir / "heldout", eval_steps=0, eval_samples=64)
    flags |= dict(output_dir=output_dir / "warm_start" / part, seed=args.seed)
    flags |= dict(dtype="float32", max_completion_length=MAX_ANSWER_TOKENS)
    flags |= dict(num_workers=args.workers, weight_decay=0.01, batch_size=BATCH_SIZE)
    flags |= dict(max_steps=max_steps, save_steps=max_steps, learning_rate=SCHEDULES[part][1])
    argv = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    argv += ["--no-gradient_checkpointing", *PARTS[part].split()]
    run_training(argv, sft.SFT, sft.train)


def unsettled(base: Path, folder: Path, data: Path, seed: int):
    """Write the model in `base`, its prompt head disturbed, to `folder`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = PolicyConfig(model_path=str(base), dtype="float32", gradient_checkpointing=False)
    policy = build_policy(config, ("text_hidden_fcs",), MAX_ANSWER_TOKENS, device)
    unsettle(policy, data, seed)
    policy.save_merged(folder, torch.float32)
    policy.tokenizer.save_pretrained(folder)


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
        nargs=4,
        default=[steps for steps, _ in SCHEDULES.values()],
        metavar=("HINTS", "LEARN", "ERR", "DECIDE"),
        help="steps of the supervised training's parts: examples with hints, without, mistakes, "
        "decided masks",
    )
    add(
        "--warm_start_scenes",
        type=int,
        default=WARM_START_SCENES,
        help="scenes drawn for the warm start",
    )
    add(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="of the warm start, to do those that come after what OUTPUT_DIR/warm_start has",
    )
    add("--workers", type=int, default=0, help="processes that draw and read; 0: this one")
    add("--seed", type=int, default=0)
    return parser


def main(argv: list[str] | None = None):
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.parts != list(PARTS)[-len(args.parts) :]:
        parser.error(f"--parts {' '.join(args.parts)}: not the last of {' '.join(PARTS)}, in order")
    for part in args.parts if args.train_checkpoint else ():
        if (folder := args.output_dir / "warm_start" / part).exists():
            parser.error(f"--parts {part}: {folder} holds an earlier one, remove it")
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
