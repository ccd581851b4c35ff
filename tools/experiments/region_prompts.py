"""Teach a demo's base each way to be asked about a region, and measure its captions.

    python -m tools.demo.make_demo --output_dir outputs/demo
    python -m tools.experiments.region_prompts --jobs 2 --output outputs/regions

Supervised training by `rl_train.sft` of region captions and of masks, with all of the vision
encoder and the language model, once for each way and seed; one process on one CPU core each, in
OUTPUT/WAY/seedN. The demo's base was trained on the regions' tokens and never saw another way. A
run that is complete is not run again. In 40 steps of 16 samples captions get their form, and none
of the three new ways says which region is meant; in 600 outlines and boxes do, coordinates alone
the position.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rl_train.utils.command_line import FlagParser, run_program
from tools.experiments.sweep_table import evaluations, interval, measures

WAYS = ("tokens", "outline", "box", "coordinates")
FLAGS = (
    "--trainable_modules vision mlp1 language_model embeddings text_hidden_fcs "
    "--one_answer --distractors --dtype float32 --max_completion_length 24 --num_workers 0 "
    "--no-gradient_checkpointing --learning_rate 5e-4 --batch_size 16 --eval_steps 0 "
    "--save_steps 1000 --merge_at_end none"
)
METRICS = ("caption_meteor", "cycle_iou", "cycle_on_target")
METRICS += ("pattern_accuracy", "color_accuracy", "shape_accuracy", "position_accuracy")


def train(way: str, seed: int, args: argparse.Namespace) -> str | None:
    """Train a way at a seed, unless that is done; return what went wrong."""
    output = args.output / way / f"seed{seed}"
    if (output / "config.json").is_file() and len(evaluations(output)) == 2:
        return None
    if output.exists():
        return f"{output}: an unfinished run, remove it"
    demo = args.demo
    line = [sys.executable, "-m", "rl_train.sft", "--output_dir", str(output), *FLAGS.split()]
    line += ["--model_path", f"{demo}/checkpoint", "--data_dir", f"{demo}/train"]
    line += ["--eval_data_dir", f"{demo}/heldout", "--attributes", f"{demo}/attributes.json"]
    line += ["--region_prompt", way, "--seed", str(seed), "--max_steps", str(args.max_steps)]
    line += ["--eval_samples", str(args.eval_samples)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not args.gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = output.with_name(f"seed{seed}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        status = subprocess.run(
            line, env=environment, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    return f"{way}, seed {seed}: exit status {status}, see {log}" if status else None


def table(output: Path, ways: list[str], seeds: list[int]) -> str:
    """Format means over seeds, before training and after it, as markdown."""
    lines = [
        f"Held-out captions, before and after: mean of {len(seeds)} seeds \u00b1 half of its 95 % "
        "interval",
        "",
        f"| way | {' | '.join(METRICS)} |",
        "|---" * (1 + len(METRICS)) + "|",
    ]
    for way in ways:
        ends = [[measures(f) for f in evaluations(output / way / f"seed{s}")] for s in seeds]
        cells = []
        for metric in METRICS:
            before = interval([run[0][metric] for run in ends])["mean"]
            after = interval([run[1][metric] for run in ends])
            cells.append(f"{before:.3f}, {after['mean']:.3f} \u00b1 {after['half']:.3f}")
        lines.append(f"| `{way}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None):
    parser = FlagParser(prog="python -m tools.experiments.region_prompts", description=__doc__)
    add = parser.add_argument
    add("--demo", type=Path, default=Path("outputs/demo"), help="folder of tools.demo.make_demo")
    add("--output", type=Path, required=True, help="folder of the runs")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which are taught")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the training")
    add("--jobs", type=int, default=1, help="runs at a time, one CPU core each")
    add("--gpu", action="store_true", help="all runs on one GPU; default: on CPU cores alone")
    add("--max_steps", type=int, default=100, help="of each run")
    add("--eval_samples", type=int, default=128, help="held-out regions")
    args = parser.parse_args(argv)
    if not (args.demo / "checkpoint" / "config.json").is_file():
        parser.error(f"--demo {args.demo}: no checkpoint in it, make it by tools.demo.make_demo")
    runs = [(way, seed) for seed in args.seeds for way in args.ways]
    with ThreadPoolExecutor(args.jobs) as pool:
        faults = list(filter(None, pool.map(lambda run: train(*run, args), runs)))
    if faults:
        raise ValueError("; ".join(faults))
    print(table(args.output, args.ways, args.seeds))


if __name__ == "__main__":
    run_program(main)
