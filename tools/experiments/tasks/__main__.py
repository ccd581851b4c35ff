"""Train each direct task, its loop, supervision and cheap rivals alike, and compare them.

    python -m tools.experiments.tasks --work_dir outputs/tasks --output outputs/tasks.json --jobs 16
    # a part of it, with few steps
    python -m tools.experiments.tasks --work_dir outputs/try --output outputs/try.json \
        --comparisons referring --seeds 51 --steps 2 --base_steps 2 --eval_samples 8

Every run is a process of one thread. A run that is complete is not run again. What is compared, and
what came out: README.md beside this file.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.utils.command_line import FlagParser, run_program
from tools.demo import make_demo
from tools.experiments.tasks.arms import BASES, COMPARISONS, RANK, SFT, UNTRAINED, Comparison
from tools.experiments.tasks.data import write_grounded, write_several
from tools.experiments.tasks.table import markdown, of_comparison

SCENES = {"train": 400, "heldout": 80}
GROUNDED_SCENES = {"train": 400, "heldout": 800}  # a sample a scene
BEST_FRACTION = 0.5  # of the ranked samples, which --sample_list keeps


class Runs:
    """Commands of one folder, each in a process of one thread, at most so many at a time."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, args.work_dir.resolve()
        self.data = self.folder / "data"
        self.pool = ThreadPoolExecutor(args.jobs)  # threads only wait
        self.until = time.monotonic() + args.seconds

    def lists(self, name: str) -> dict[str, Path]:
        """Return files for --sample_list of a comparison, by the names that arms.py has.

        The phrases that name something; the ranked samples, and the better half of these.
        """
        ranks = self.folder / "ranks" / name
        return dict(
            named=self.data / "named.txt", some=ranks / "some.txt", best=ranks / "best.jsonl"
        )

    def command(self, name: str, module: str, words: list[str], done: Path) -> str | None:
        """Run a module unless `done` is there; return what went wrong."""
        if done.exists():
            return None
        if time.monotonic() > self.until:
            return f"{name}: not begun within --seconds"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        log = self.folder / "logs" / f"{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        began, line = time.monotonic(), [sys.executable, "-m", module, *words]
        with log.open("w") as file:
            status = subprocess.run(
                line, env=environment, stdout=file, stderr=subprocess.STDOUT
            ).returncode
        ending = f"exit status {status}" if status else "done"
        print(f"{name}: {ending}, {time.monotonic() - began:.0f} s", flush=True)
        return f"{name}: {ending}: {log.read_text()[-600:]}" if status else None

    def make_data(self, folders: set[str]):
        """Draw the data sets that are not there."""
        if "demo" in folders:
            make_demo.main(["--output_dir", str(self.data / "demo")])
        writers = dict(several=(write_several, SCENES), grounded=(write_grounded, GROUNDED_SCENES))
        for name, (write, num_scenes) in writers.items():
            if name in folders and not (self.data / name).exists():
                unfinished = self.data / f"{name}.part"
                write(unfinished, 0, num_scenes)
                unfinished.rename(self.data / name)
        if "several" in folders:
            dataset = GraspAnyRegionDataset(self.data / "several" / "train")
            some = [i for i in range(len(dataset)) if len(dataset[i]["objects"])]
            write_ids(self.lists("several")["named"], dataset, some)

    def data_words(self, comparison: Comparison) -> list[str]:
        """Return the flags of a comparison's data."""
        folder, samples = self.data / comparison.data, self.args.eval_samples
        return [
            *("--data_dir", str(folder / "train"), "--eval_data_dir", str(folder / "heldout")),
            *("--eval_samples", str(samples), *comparison.flags.split()),
        ]

    def base(self, comparison: Comparison) -> str | None:
        """Train a comparison's base, unless it is the demo's checkpoint."""
        if not comparison.base:
            return None
        base, output = BASES[comparison.base], self.folder / "bases" / comparison.base
        words = ["--model_path", str(make_demo.SHIPPED_CHECKPOINT), "--output_dir", str(output)]
        words += [*self.data_words(comparison), *SFT.replace("size 8", "size 16").split()]
        words += ["--eval_steps", "0", "--merge_at_end", "policy", *base.flags.split()]
        words += ["--max_steps", str(self.args.base_steps or base.steps), "--resume", "auto"]
        words = [word.format(**self.lists(comparison.base)) for word in words]
        done = output / "final_model" / "README.md"
        return self.command(f"base_{comparison.base}", "rl_train.sft", words, done)

    def model(self, comparison: Comparison) -> str:
        if not comparison.base:
            return str(make_demo.SHIPPED_CHECKPOINT)
        return str(self.folder / "bases" / comparison.base / "final_model")

    def rank(self, name: str, base: Future[str | None]) -> str | None:
        """Rank the training samples of a comparison by its base's rewards, for --sample_list."""
        if fault := base.result():
            return fault
        comparison, lists = COMPARISONS[name], self.lists(name)
        dataset = GraspAnyRegionDataset(self.data / comparison.data / "train")
        folder = lists["some"].parent
        folder.mkdir(parents=True, exist_ok=True)
        stride = -(-len(dataset) // self.args.ranked_samples)
        write_ids(lists["some"], dataset, range(0, len(dataset), stride))
        words = ["--model_path", self.model(comparison), *self.data_words(comparison)]
        words += ["--sample_list", str(lists["some"]), *RANK.split()]
        words += ["--max_completion_length", str(comparison.tokens)]
        words += ["--output", str(folder / "ranks.jsonl"), "--seed", "50"]
        words += ["--best", str(lists["best"]), "--best_fraction", str(BEST_FRACTION)]
        return self.command(f"rank_{name}", "tools.rank_samples", words, lists["best"])

    def untrained(self, name: str, base: Future[str | None]) -> str | None:
        """Measure what untrained changes of a comparison's base gain; return what went wrong."""
        if base.result():
            return None
        comparison, output = COMPARISONS[name], self.untrained_file(name)
        folder, samples = self.data / comparison.data, str(self.args.eval_samples)
        words = ["--comparison", name, "--model_path", self.model(comparison)]
        words += ["--data_dir", str(folder / "train"), "--eval_data_dir", str(folder / "heldout")]
        words += ["--num_samples", samples, "--eval_samples", samples]
        words += ["--max_completion_length", str(comparison.tokens), *UNTRAINED.split()]
        words += [*comparison.dataset_words, "--output", str(output)]
        return self.command(f"untrained_{name}", "tools.experiments.tasks.untrained", words, output)

    def untrained_file(self, name: str) -> Path:
        return self.folder / "untrained" / f"{name}.json"

    def arm(
        self, name: str, arm_name: str, rate: str, seed: int, needs: list[Future[str | None]]
    ) -> str | None:
        """Train an arm of a comparison at a learning rate and a seed; return what went wrong."""
        if any(need.result() for need in needs):
            return None  # told once, of the base
        comparison, steps = COMPARISONS[name], self.args.steps
        arm, output = comparison.arms[arm_name], self.output(name, arm_name, rate, seed)
        words = ["--model_path", self.model(comparison), "--output_dir", str(output)]
        words += [*self.data_words(comparison), *arm.words, "--seed", str(seed)]
        words += ["--max_completion_length", str(comparison.tokens), "--learning_rate", rate]
        words += ["--max_steps", str(steps), "--eval_steps", str(comparison.eval_steps)]
        words += ["--save_steps", "1000", "--merge_at_end", "none"]
        words += ["--resume", "auto"]  # of a run that was broken off
        words = [word.format(**self.lists(name)) for word in words]
        done = output / "evaluation" / f"step_{steps}.json"
        return self.command("-".join(output.parts[-4:]), arm.module, words, done)

    def output(self, name: str, arm_name: str, rate: str, seed: int) -> Path:
        arm_folder = arm_name.replace("--", "").replace(",", "").replace(" ", "_")
        return self.folder / "runs" / name / arm_folder / rate / f"seed{seed}"

    def run_all(self) -> list[str]:
        """Run all that the command line asks for; return what went wrong."""
        names = self.args.comparisons
        self.make_data({COMPARISONS[name].data for name in names} | {"demo"})
        by_base = {COMPARISONS[name].base: COMPARISONS[name] for name in names}
        # Bases and the ranking come first: the pool takes jobs in order, so that no job waits for
        # one that has not begun.
        bases = {base: self.pool.submit(self.base, of) for base, of in by_base.items()}
        ranked = {
            name: self.pool.submit(self.rank, name, bases[COMPARISONS[name].base])
            for name in names
            if COMPARISONS[name].uses_ranking
        }
        jobs: list[Future[str | None]] = [*bases.values(), *ranked.values()]
        jobs += [
            self.pool.submit(self.untrained, name, bases[COMPARISONS[name].base])
            for name in names
            if COMPARISONS[name].own
        ]
        # Those that need no base first, then those that wait for it.
        ordered = sorted(names, key=lambda name: (name in ranked, COMPARISONS[name].base))
        for seed in self.args.seeds:
            for name in ordered:
                comparison, needs = COMPARISONS[name], [bases[COMPARISONS[name].base]]
                needs += [ranked[name]] if name in ranked else []
                for rate in comparison.rates:
                    for arm in comparison.arms:
                        jobs.append(self.pool.submit(self.arm, name, arm, rate, seed, needs))
        return [fault for job in jobs if (fault := job.result())]


def write_ids(file: Path, dataset: GraspAnyRegionDataset, samples: Iterable[int]):
    """Write the ids of samples, for --sample_list."""
    file.write_text("\n".join(dataset.image_id(i) for i in samples) + "\n")


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.tasks", description=__doc__)
    add = parser.add_argument
    add("--work_dir", type=Path, required=True, help="folder of data, bases, runs and logs")
    add("--output", type=Path, required=True, help="JSON file of all figures")
    add("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    add("--comparisons", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    add("--seeds", nargs="+", type=int, default=[51, 52])
    add("--steps", type=int, default=60, help="of every arm, of 8 samples each")
    add("--base_steps", type=int, help="of the bases; default: those of arms.BASES")
    add("--eval_samples", type=int, default=192, help="held-out samples")
    ranked = 'training samples that `ranking` ranks, which its "all samples" trains on too'
    add("--ranked_samples", type=int, default=640, help=ranked)
    limit = "after which no further run begins; what is complete is written"
    add("--seconds", type=float, default=float("inf"), help=limit)
    return parser


def main(argv: list[str] | None = None):
    args = build_parser().parse_args(argv)
    runs = Runs(args)
    faults = runs.run_all()
    figures = {
        name: of_comparison(COMPARISONS[name], name, runs, args.seeds, args.steps)
        for name in args.comparisons
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(dict(figures=figures, faults=faults), indent=1) + "\n")
    print(markdown(figures))
    if faults:
        raise SystemExit("tasks: " + "; ".join(faults))


if __name__ == "__main__":
    run_program(main)
