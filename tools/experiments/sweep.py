"""Train arms on demos over seeds, side by side, and print what each changed.

    python -m tools.demo.make_demo --output_dir outputs/demo
    python -m tools.experiments.sweep --arms loop1 loop1_length --jobs 2 --output outputs/sweep
    python -m tools.experiments.sweep --arms loop1 loop1_length --seeds 0 1 2 3 4 --gpu \
        --demos outputs/demo_0 outputs/demo_1 --output outputs/sweep
    # no arms: the tables
    python -m tools.experiments.sweep --output outputs/sweep --against loop1_length
    # on the lab's bases (tools/experiments/base)
    python -m tools.experiments.sweep --arms loop1 loop1_confidence --seeds 0 --jobs 10 --gpu \
        --lab bases/loop1/lab --demos bases/loop1/0 bases/loop1/1 \
        --output outputs/sweep_lab -- --max_steps 150
    python -m tools.demo.make_points_demo --output_dir outputs/points_demo
    python -m tools.experiments.sweep --arms points points_hidden --demos outputs/points_demo \
        --output outputs/p

An arm is a name in ARMS: flags of `rl_train.train` that are added to those of the demo; one in
POINT_ARMS wants a demo of `tools.demo.make_points_demo`. Every run is one process on one CPU core
(with --gpu also on one of the GPUs, in turn), in the folder OUTPUT/ARM/DEMO/seedN; a run that is
complete is not run again, and one of other flags stops the sweep's arm. The tables of
docs/results.md and docs/points.md are made by this program.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rl_train.cli import check_same, parse
from rl_train.rewards import ablations
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import read_json
from tools.experiments.sweep_plot import draw
from tools.experiments.sweep_table import evaluations, markdown, summary

# Flags of rl_train.train: what of a demo's folder a run is given, those of the demo in
# run_rl_train.sh, what makes a run shorter, and what each arm changes.
OF_DEMO = (
    "--model_path {demo}/checkpoint --data_dir {demo}/train --eval_data_dir {demo}/heldout "
    "--attributes {demo}/attributes.json --distractors"
)
DEMO = (
    "--dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 24 --micro_batch_size 64 "
    "--batch_size 8 --num_generations 8 --learning_rate 1.5e-3 --text_hidden_fcs_lr 1e-3 "
    "--kl_coef 0.06"
)
SHORT = (
    "--no-gradient_checkpointing --num_workers 0 --max_steps 160 "
    "--eval_samples 128 --eval_steps 0 --save_steps 1000 --merge_at_end none"
)
HALF_LIKELIHOOD = "--reward_weights loop2.meteor=0.5 loop2.likelihood=0.5"
POLICY_TERM = "--mask_loss_coef 0"  # without the supervised mask term
LOOPS = dict(  # and the direct tasks beside them
    loop1="--tasks mask_caption_mask",
    loop2=f"--tasks caption_mask_caption {POLICY_TERM}",
    referring=f"--tasks referring {POLICY_TERM}",
    captioning="--tasks captioning",
)
ARMS = LOOPS | {
    f"{loop}_{control}": f"{flags} --ablation_reward {control}"
    for loop, flags in LOOPS.items()
    for control in ablations.ablations_of(loop)
}
ARMS |= {  # loop2's reward is METEOR
    "loop2_half_likelihood": f"{LOOPS['loop2']} {HALF_LIKELIHOOD}",
    "loop2_likelihood": f"{LOOPS['loop2']} --reward_weights loop2.meteor=0 loop2.likelihood=1",
    "loop2_scaled": f"{LOOPS['loop2']} {HALF_LIKELIHOOD} --scale_components",
    "loop2_tokens": f"{LOOPS['loop2']} --latent_std 0",
    "both": POLICY_TERM,  # the demo as it ships
    "defaults": "",  # both loops, with the mask term
}
OF_POINTS = (
    "--tasks point_segmentation --answer_style points --image_size 96 --model_path {demo}/qwen "
    "--sam_path {demo}/sam --data_dir {demo}/train --eval_data_dir {demo}/heldout"
)
POINTS = (
    "--dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 32 --micro_batch_size 32 "
    "--batch_size 4 --num_generations 8 --learning_rate 1e-3 --kl_coef 0.02"
)
POINT_ARMS = dict(
    points="",
    points_positive="--negative_points off",
    points_hidden="--hide_negatives",
    points_bonus="--negative_weight 0.3",
    points_two_passes="--sam_passes 2",
)
POINT_ARMS |= {
    f"points_{control}": f"--ablation_reward {control} --distractors"
    for control in ablations.ablations_of(ablations.POINTS)
    if f"points_{control}" not in POINT_ARMS
}
ARMS |= POINT_ARMS
# The lab: of a base and of its scenes, and the part of the scenes that a task trains on.
OF_LAB = (
    "--model_path {demo}/base --data_dir {lab}/train --subsets {part} "
    "--eval_data_dir {lab}/heldout --distractors"
)
LAB = (
    "--dtype bfloat16 --lora_r 32 --lora_alpha 64 --max_completion_length 24 "
    "--micro_batch_size 128 --batch_size 16 --num_generations 8 --learning_rate 4e-4 "
    "--text_hidden_fcs_lr 1e-3 --kl_coef 0.04"
)
PART_OF_TASK = dict(loop1="regions", loop2="phrases", referring="segmented", captioning="captioned")
DEMO_FOLDER = Path("outputs/demo")
METRICS = ("cycle_iou", "cycle_meteor", "seg_iou", "caption_meteor")
POINT_METRICS = ("seg_iou", "gain_negative", "gain_over_swapped", "gain_over_random")


def command(
    arm: str, seed: int, demo: Path, output: Path, extra: list[str], lab: Path | None = None
) -> list[str]:
    """Return the command line of one run; of a flag given several times the last counts.

    Args: lab: the scenes, if `demo` is one of the lab's bases.
    """
    of_demo, flags = (OF_POINTS, POINTS) if arm in POINT_ARMS else (OF_DEMO, DEMO)
    if lab:
        of_demo, flags = OF_LAB, LAB
    part = PART_OF_TASK.get(arm.partition("_")[0])
    return [
        *(sys.executable, "-m", "rl_train.train", "--output_dir", str(output)),
        *(word.format(demo=demo, lab=lab, part=part) for word in of_demo.split()),
        *f"{flags} {SHORT} {ARMS[arm]}".split(),
        *("--seed", str(seed)),
        *extra,
    ]


def run(number: int, arm: str, demo: Path, seed: int, args: argparse.Namespace) -> str | None:
    """Train one arm on a demo at a seed, as job `number`, unless done; return what went wrong."""
    output = args.output / arm / demo.name / f"seed{seed}"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": args.gpus[number % len(args.gpus)],
    }
    line = command(arm, seed, demo, output, args.extra, args.lab)
    if (output / "config.json").is_file():
        try:
            # Behind `python -m rl_train.train`.
            config = parse(line[3:])
            check_same(output / "config.json", config, config.flags, str(output))
            # A resume may extend a run, but the runs of a table have one length.
            steps = read_json(output / "config.json")["max_steps"]
            if steps != config.optim.max_steps:
                raise ValueError(f"{output}: --max_steps was {steps}, now {config.optim.max_steps}")
        except ValueError as error:
            return str(error)
        if evaluations(output)[1:]:
            return None
        # A run that was broken off goes on from its last checkpoint.
        line.append("--resume")
    output.mkdir(parents=True, exist_ok=True)
    with (output / "log.txt").open("a") as log:
        status = subprocess.run(
            line, env=environment, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    name, ending = f"{arm} {demo.name} seed {seed}", f"exit status {status}"
    print(f"{name}: {ending if status else 'done'}", flush=True)
    return f"{name}: {ending}, see {output / 'log.txt'}" if status else None


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m tools.experiments.sweep",
        description=__doc__,
    )
    add = parser.add_argument
    add(
        "--arms",
        nargs="+",
        choices=sorted(ARMS),
        default=[],
        help="what to run; none: only print the tables",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    add(
        "--demos",
        nargs="+",
        type=Path,
        help=f"default: {DEMO_FOLDER}; folders of tools.demo.make_demo or make_points_demo",
    )
    lab = "folder of the lab's scenes (tools.experiments.pictures); --demos are then bases on them"
    add("--lab", type=Path, help=lab)
    jobs = "runs at a time; default: one for each CPU core, with --gpu one for each GPU"
    add("--jobs", type=int, help=jobs)
    add("--output", type=Path, required=True, help="folder of all runs, and of table.json")
    add("--gpu", action="store_true", help="run on the GPUs")
    measures = "columns: any of the means and values in a run's evaluation/step_N.json; default: "
    measures += f"{' '.join(METRICS)}, of points {' '.join(POINT_METRICS)}"
    add("--metrics", nargs="+", help=measures)
    paired = "arms from which the others are told apart, paired by demo and seed"
    add("--against", nargs="+", default=[], metavar="ARM", help=paired)
    picture = "also draw a value of TensorBoard, such as loop1/on_target, of --arms or of all runs"
    add("--plot", nargs=2, metavar=("TAG", "FILE"), help=f"{picture}; needs matplotlib")
    extra = "further flags of rl_train.train, for all arms"
    add("extra", nargs="*", metavar="-- FLAGS", help=extra)
    return parser


def main(argv: list[str] | None = None):
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu: there is none")
    if not args.arms and not args.output.is_dir():
        parser.error(f"--output {args.output}: no such folder, and no --arms to fill it")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot: matplotlib is not installed (pip install matplotlib)")
    if args.lab:
        if not args.demos:
            parser.error("--lab: name the bases in --demos")
        args.lab = args.lab.resolve()
        for arm in args.arms:
            if arm.partition("_")[0] not in PART_OF_TASK:
                parser.error(f"--arms {arm}: not with --lab, whose parts teach one task each")
    of_points = args.arms and set(args.arms) <= set(POINT_ARMS)
    args.metrics = args.metrics or list(POINT_METRICS if of_points else METRICS)
    args.demos = [demo.resolve() for demo in args.demos or [DEMO_FOLDER]]
    for name, count in Counter(demo.name for demo in args.demos).items():
        if count > 1:
            parser.error(f"--demos: {count} folders are called {name}, as their runs would be")
    devices = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or devices
    args.gpus = visible.split(",") if args.gpu else [""]
    jobs = [(arm, demo, seed) for seed in args.seeds for demo in args.demos for arm in args.arms]
    workers = args.jobs or (len(args.gpus) if args.gpu else os.cpu_count())
    # Threads only wait: each run is a process of its own.
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(lambda job: run(job[0], *job[1], args), enumerate(jobs))
        faults = [fault for fault in done if fault]
    try:
        summarised = summary(args.output, args.metrics, args.against)
    except ValueError as error:
        faults.append(str(error))
    else:
        print(markdown(summarised, args.metrics))
        (args.output / "table.json").write_text(json.dumps(summarised, indent=1) + "\n")
    if args.plot:
        tag, file = args.plot
        try:
            draw(args.output, tag, args.arms).savefig(file, dpi=110)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise SystemExit("sweep: " + "; ".join(faults))


if __name__ == "__main__":
    run_program(main)
