"""Make the demo: drawn scenes in GAR's Arrow layout, and a tiny but complete Sa2VA checkpoint.

    python -m tools.make_demo --output_dir outputs/demo      # data + the checkpoint that ships here
    python -m tools.make_demo --output_dir outputs/demo --train_checkpoint  # data + one made anew

Everything is drawn by code from --seed, which also begins the checkpoint. That, in the original
layout, is warm-started by supervised training on the prompts and the encode rule of
`sa2va_hf.prompts` and `sa2va_hf.templates`, so that there is something to learn of either loop, and
no shortcut: its captions are of one kind and length and mistake half of the values of each
attribute for another (`demo_warm_start.MISTAKES`), though it can tell them apart; its masks are
decided, but `text_hidden_fcs`, through which [SEG] prompts SAM2, is disturbed, so that a third of
them lie on a wrong object. It answers with one wording of Sa2VA's five,
so that in loop 2 nothing but the sampled mask can differ. `tools.demo_report` shows it.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo_model import CONFIG, initialise, make_tokenizer
from tools.demo_scenes import ATTRIBUTES, HELDOUT, TRAIN, make_scene
from tools.demo_warm_start import WarmStart
from tools.gar_writer import write_gar
from tools.new_folder import save

SHIPPED_CHECKPOINT = Path(__file__).parent / "demo_checkpoint"


def write_split(folder: Path, seed: int, split: int, num_scenes: int):
    """Write one row per object of each scene, in GAR layout."""

    def rows():
        for i in range(num_scenes):
            scene = make_scene(seed, split, i)
            for obj in scene.objects:
                yield dict(
                    image=scene.image, mask=obj.mask, caption=obj.caption, category=obj.shape
                )

    write_gar(rows(), folder)


def train_checkpoint(folder: Path, seed: int, steps: list[int], num_scenes: int):
    """Train the tiny Sa2VA from random weights and save it (bf16 numbers) with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(seed)
    config = Sa2VAConfig(
        **{**CONFIG, "llm_config": {**CONFIG["llm_config"], "vocab_size": len(tokenizer)}}
    )
    model = Sa2VAModel(config)
    initialise(model)
    warm_start = WarmStart(model, tokenizer, Sa2VAProcessor(config, max_tiles=1), seed, num_scenes)
    parts = (warm_start.look, warm_start.talk, warm_start.see, warm_start.draw)
    for part, number in zip(parts, steps):
        part(number)
    warm_start.unsettle_prompt_head()
    warm_start.scale_prompt_head()
    save(model, tokenizer, folder)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        required=True,
        help="receives train/, heldout/, checkpoint/, attributes.json",
    )
    parser.add_argument("--train_scenes", type=int, default=800, help="scenes drawn for training")
    parser.add_argument(
        "--heldout_scenes", type=int, default=100, help="scenes drawn for evaluation"
    )
    parser.add_argument(
        "--train_checkpoint",
        action="store_true",
        help="train the checkpoint instead of copying the shipped one",
    )
    parser.add_argument(
        "--warm_start_steps",
        type=int,
        nargs=4,
        default=[1000, 450, 700, 1200],
        metavar=("LOOK", "TALK", "SEE", "DRAW"),
        help="optimizer steps of the parts of the supervised warm start: vision encoder, captions, "
        "SAM2's vision encoder, masks",
    )
    parser.add_argument(
        "--warm_start_scenes", type=int, default=1500, help="scenes drawn for the warm start"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    vocabulary = {name: {value: [value] for value in vs} for name, vs in ATTRIBUTES.items()}
    (args.output_dir / "attributes.json").write_text(json.dumps(vocabulary, indent=1) + "\n")
    for name, split, count in (
        ("train", TRAIN, args.train_scenes),
        ("heldout", HELDOUT, args.heldout_scenes),
    ):
        if not (args.output_dir / name).exists():
            write_split(args.output_dir / name, args.seed, split, count)
    checkpoint = args.output_dir / "checkpoint"
    if args.train_checkpoint:
        train_checkpoint(checkpoint, args.seed, args.warm_start_steps, args.warm_start_scenes)
    elif not checkpoint.exists():
        shutil.copytree(SHIPPED_CHECKPOINT, checkpoint)
    load_tokenizer(checkpoint)
    print(f"demo: {args.output_dir}/train, {args.output_dir}/heldout, {checkpoint}")


if __name__ == "__main__":
    main()
