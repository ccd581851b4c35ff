"""Train several arms over several seeds, side by side, and print what each changed.

    python -m tools.make_demo --output_dir outputs/demo
    python -m tools.sweep --arms loop1 loop1_shuffled --jobs 2 --output outputs/sweep
    python -m tools.sweep --output outputs/sweep          # no arms: the table of what is there

An arm is a name in ARMS: flags of `rl_train.train` that are added to those of the demo. Every run
is one process on one CPU core (with --gpu also on one of the GPUs, in turn); a run that is complete
is not run again, and one of other flags stops the sweep's arm. docs/results.md was made by this
program.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from rl_train.cli import check_same, parse
from rl_train.grpo import group_std
from rl_train.statistics import bootstrap, rows_of

# Flags of rl_train.train: those of the demo in run_rl_train.sh, what makes a run shorter, and what
# each arm changes.
DEMO = (
    "--dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 32 --micro_batch_size 32 "
    "--batch_size 4 --num_generations 8 --learning_rate 1.5e-4 --prompt_learning_rate 1e-3 "
    "--kl_coef 0.02"
)
SHORT = (
    "--no-gradient_checkpointing --likelihood_share 1 --num_workers 0 --max_steps 120 "
    "--eval_samples 128 --eval_steps 0 --save_steps 1000"
)
LOOP1 = "--tasks mask_caption_mask"
LOOP2 = "--tasks caption_mask_caption --mask_loss_coef 0"  # policy term only
BOTH = "--mask_loss_coef 0"
FOUR = "--num_iterations 4"
SMALL = f"{BOTH} --batch_size 2 --max_steps 60 --eval_samples 64"  # 16 rollouts a step
ARMS = {
    "loop1": LOOP1,
    "loop2": LOOP2,
    "both": BOTH,
    "loop1_shuffled": f"{LOOP1} --control shuffled",
    "loop2_shuffled": f"{LOOP2} --control shuffled",
    "small_constant": f"{SMALL} --control constant",
    "loop2_tokens": f"{LOOP2} --mask_sigma 0",
    "small": SMALL,
    "small_teacher_reference": f"{SMALL} --ema_decay 1",
    "small_teacher_self": f"{SMALL} --ema_decay 0",
    "small_G2": f"{SMALL} --num_generations 2 --batch_size 8",
    "small_G4": f"{SMALL} --num_generations 4 --batch_size 4",
    "small_G16": f"{SMALL} --num_generations 16 --batch_size 1",
    "loop2_meteor": f"{LOOP2} --likelihood_share 0",
    "loop2_half": f"{LOOP2} --likelihood_share 0.5",
    "loop2_sigma_1": f"{LOOP2} --mask_sigma 1",
    "loop2_sigma_6": f"{LOOP2} --mask_sigma 6",
    "loop2_one_rate": f"{LOOP2} --prompt_learning_rate 1.5e-4",
    "loop2_mask_term": f"{LOOP2} --mask_loss_coef 0.1",
    "loop2_four": f"{LOOP2} {FOUR}",  # the demo's embedding has 64 dimensions
    "loop2_four_joint_clip": f"{LOOP2} {FOUR} --latent_clip_range 0.003125",
    "loop2_four_joint_kl": f"{LOOP2} {FOUR} --latent_kl_weight 64",
    "loop2_four_joint_both": f"{LOOP2} {FOUR} --latent_clip_range 0.003125 --latent_kl_weight 64",
    "loop2_joint_kl": f"{LOOP2} --latent_kl_weight 64",
    "loop1_no_kl": f"{LOOP1} --kl_coef 0",
    "loop1_kl_0.1": f"{LOOP1} --kl_coef 0.1",
    "loop1_cool": f"{LOOP1} --temperature 0.7",
    "loop1_no_warmup": f"{LOOP1} --warmup_ratio 0",
    "loop1_high_rate": f"{LOOP1} --learning_rate 5e-4",
    "loop1_twice": f"{LOOP1} --num_iterations 2",
    "loop1_twice_clip_0.1": f"{LOOP1} --num_iterations 2 --clip_range 0.1",
}
METRICS = ("cycle_iou", "cycle_meteor", "seg_iou", "caption_meteor")
T_QUANTILE = dict(
    enumerate(
        (
            12.706,
            4.303,
            3.182,
            2.776,
            2.571,
            2.447,
            2.365,
            2.306,
            2.262,
            2.228,
            2.201,
            2.179,
            2.160,
            2.145,
            2.131,
            2.120,
            2.110,
            2.101,
            2.093,
        ),
        1,
    )
)  # of Student's t at .975, by degrees of freedom


def command(arm: str, seed: int, demo: Path, output: Path, extra: list[str]) -> list[str]:
    """Command line of one run; of a flag that is given several times the last counts."""
    paths = [
        f"--model_path={demo / 'checkpoint'}",
        f"--data_dir={demo / 'train'}",
        f"--eval_data_dir={demo / 'heldout'}",
        f"--output_dir={output}",
    ]
    return [
        sys.executable,
        "-m",
        "rl_train.train",
        *paths,
        *f"{DEMO} {SHORT}".split(),
        *ARMS[arm].split(),
        "--seed",
        str(seed),
        *extra,
    ]


def run(number: int, arm: str, seed: int, args) -> str | None:
    """Train one arm at one seed, as job `number`, unless that is done; returns what went wrong."""
    output = args.output / arm / f"seed{seed}"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": args.gpus[number % len(args.gpus)],
    }
    line = command(arm, seed, args.demo, output, args.extra)
    if (output / "config.json").is_file():
        try:
            check_same(output / "config.json", parse(line[3:]).flags, str(output))
        except ValueError as error:
            return str(error)
        if evaluations(output)[1:]:
            return None
        line.append("--resume")
    output.mkdir(parents=True, exist_ok=True)
    with (output / "log.txt").open("a") as log:
        status = subprocess.run(
            line, env=environment, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    print(f"{arm} seed {seed}: {'done' if status == 0 else f'exit status {status}'}", flush=True)
    return (
        None
        if status == 0
        else f"{arm} seed {seed}: exit status {status}, see {output / 'log.txt'}"
    )


def evaluations(output: Path) -> list[dict[str, torch.Tensor]]:
    """The measures before the first step and, of a run that got there, after the last one."""
    files = sorted(
        (output / "evaluation").glob("step_*.json"),
        key=lambda file: int(file.stem.removeprefix("step_")),
    )
    steps = json.loads((output / "config.json").read_text())["max_steps"]
    wanted = [file for file in files if file.stem in ("step_0", f"step_{steps}")]
    return [
        {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in json.loads(file.read_text())["values"].items()
        }
        for file in wanted
    ]


def change(runs: list[Path], metric: str) -> dict:
    """Of a metric, after minus before: the mean over runs (seeds), and its 95 % intervals.

    Over seeds: Student's t of the runs' means, for other seeds on these regions. Over regions:
    bootstrap of the regions' means over runs, for other regions with these seeds; regions count as
    independent, though some share an image.
    """
    before, after = zip(*(evaluations(output) for output in runs))
    rows = torch.stack(
        [rows_of(b, metric) - rows_of(a, metric) for a, b in zip(before, after)]
    )  # (runs, n)
    seeds = rows.mean(1).numpy()
    half = (
        T_QUANTILE.get(len(seeds) - 1, 2.09) * seeds.std(ddof=1) / len(seeds) ** 0.5
        if len(seeds) > 1
        else float("inf")
    )
    return dict(
        before=float(torch.stack([rows_of(a, metric) for a in before]).mean()),
        mean=float(seeds.mean()),
        half=half,
        regions=bootstrap(rows.mean(0)),
        seeds=seeds.tolist(),
    )


def zero_std(output: Path) -> dict[str, float]:
    """{task: share of all groups of a run whose rewards were equal}."""
    groups = {}
    for line in (output / "rollouts" / "rank0.jsonl").read_text().split("\n")[:-1]:
        row = json.loads(line)
        groups.setdefault(row["task"], []).append(
            np.nan if row["reward"] is None else row["reward"]
        )
    size = json.loads((output / "config.json").read_text())["num_generations"]
    return {
        task: float((group_std(torch.tensor(rewards), size) == 0).float().mean())
        for task, rewards in groups.items()
    }


def table(folder: Path) -> dict:
    """Print the table of all complete runs in `folder`; returns it."""
    found = {}
    for arm in sorted(path for path in folder.iterdir() if path.is_dir()):
        runs = [
            path
            for path in sorted(arm.iterdir())
            if (path / "config.json").is_file() and len(evaluations(path)) == 2
        ]
        if runs:
            shares = [zero_std(path) for path in runs]
            found[arm.name] = dict(
                runs=len(runs),
                zero_std={task: float(np.mean([s[task] for s in shares])) for task in shares[0]},
                **{metric: change(runs, metric) for metric in METRICS},
            )
    head = "".join(f"{metric:>38s}" for metric in METRICS)
    print(
        "change on held-out regions: mean over seeds, +- 95 % over seeds [95 % over regions]; "
        "zero_std: groups without variance\n"
        f"{'arm':24s} runs{head}   zero_std"
    )
    for arm, row in found.items():
        cells = "".join(
            f"{c['mean']:+10.4f} +-{c['half']:.4f} [{c['regions'][0]:+.4f}, {c['regions'][1]:+.4f}]"
            for c in (row[metric] for metric in METRICS)
        )
        print(
            f"{arm:24s} {row['runs']:4d}{cells}   "
            + " ".join(f"{task} {share:.2f}" for task, share in row["zero_std"].items())
        )
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--arms",
        nargs="+",
        choices=sorted(ARMS),
        default=[],
        help="what to run; none: only print the table",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    add(
        "--jobs",
        type=int,
        help="runs at a time; default: one for each CPU core, with --gpu one for each GPU",
    )
    add("--demo", type=Path, default=Path("outputs/demo"), help="what tools.make_demo wrote")
    add("--output", type=Path, required=True, help="folder of all runs, and of table.json")
    add("--gpu", action="store_true", help="run on the GPUs")
    add(
        "extra", nargs="*", metavar="-- FLAGS", help="further flags of rl_train.train, for all arms"
    )
    args = parser.parse_args(argv)
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu: there is none")
    if not args.arms and not args.output.is_dir():
        parser.error(f"--output {args.output}: no such folder, and no --arms to fill it")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    args.gpus = visible.split(",") if args.gpu else [""]
    jobs = [
        (number, *job)
        for number, job in enumerate((arm, seed) for seed in args.seeds for arm in args.arms)
    ]
    with ThreadPoolExecutor(args.jobs or (len(args.gpus) if args.gpu else os.cpu_count())) as pool:
        faults = [fault for fault in pool.map(lambda job: run(*job, args), jobs) if fault]
    (args.output / "table.json").write_text(json.dumps(table(args.output), indent=1) + "\n")
    if faults:
        raise SystemExit("sweep: " + "; ".join(faults))


if __name__ == "__main__":
    main()
