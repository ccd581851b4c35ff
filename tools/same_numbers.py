"""Whether this tree computes what another revision computed, bit for bit.

    python -m tools.same_numbers REVISION [--steps 20] [--seed 0]

Trains the demo for some steps, both loops, float32 on one CPU thread, by the code of REVISION (in a
worktree of git) and by the code here, on the same drawn data. Compares every curve but those of
time, every rollout, every held-out measure and every final weight; exits with status 1 and the
first differences if any bit differs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tools.demo_scenes import HELDOUT, TRAIN
from tools.make_demo import write_split

ROOT = Path(__file__).parents[1]
FLAGS = (
    "--dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 32 --micro_batch_size 16 "
    "--batch_size 4 --num_generations 8 --learning_rate 1.5e-4 --prompt_learning_rate 1e-3 "
    "--ema_decay 0.95 --kl_coef 0.02 --no-gradient_checkpointing --num_workers 1 "
    "--eval_samples 16 --eval_steps 0"
)
OF_TIME = "perf/"


def train(tree: Path, data: Path, output: Path, steps: int, seed: int, *more: str):
    """Train the demo checkpoint by the code in `tree`."""
    environment = dict(
        os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(tree)
    )
    command = [sys.executable, "-m", "rl_train.train", *FLAGS.split(), "--max_steps", str(steps)]
    command += ["--model_path", str(tree / "tools" / "demo_checkpoint"), "--seed", str(seed)]
    command += ["--data_dir", str(data / "train"), "--eval_data_dir", str(data / "heldout")]
    command += ["--output_dir", str(output), *more]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)


def numbers(output: Path, steps: int) -> dict[str, object]:
    """{name: value} of all that a run wrote and that does not depend on time."""
    events = EventAccumulator(str(output / "tensorboard"), {"scalars": 0})
    events.Reload()
    found = {
        f"curve {tag} at step {point.step}": point.value
        for tag in events.Tags()["scalars"]
        if not tag.startswith(OF_TIME)
        for point in events.Scalars(tag)
    }
    for file in sorted((output / "rollouts").iterdir()):
        for number, line in enumerate(file.read_text().splitlines()):
            found[f"rollout {file.stem} line {number}"] = sorted(json.loads(line).items())
    for file in sorted((output / "evaluation").iterdir()):
        record = json.loads(file.read_text())
        found |= {f"held out {file.stem} {key}": record[key] for key in ("values", "captions")}
    for name in ("trainables", "ema"):
        weights = load_file(output / f"checkpoint_step_{steps}" / f"{name}.safetensors")
        found |= {f"{name} {key}": value.tobytes() for key, value in weights.items()}
    return found


def differences(before: dict, after: dict) -> list[str]:
    """The names whose values differ or which one side lacks."""
    equal = {
        name for name in before.keys() & after.keys() if repr(before[name]) == repr(after[name])
    }
    return sorted((before.keys() | after.keys()) - equal)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.same_numbers", description=__doc__)
    parser.add_argument("revision", help="what git calls the code to compare with")
    parser.add_argument("--steps", type=int, default=20, help="of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument(
        "--before", type=Path, help="folder that keeps the other revision's run, or has it already"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data = args.before / "data" if args.before else Path(folder) / "data"
        before = args.before / "run" if args.before else Path(folder) / "before"
        if not before.exists():
            write_split(data / "train", 0, TRAIN, 60)
            write_split(data / "heldout", 0, HELDOUT, 8)
            tree = Path(folder) / "tree"
            subprocess.run(
                ["git", "worktree", "add", "-q", "--detach", tree, args.revision],
                cwd=ROOT,
                check=True,
            )
            try:
                train(tree, data, before, args.steps, args.seed)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        train(ROOT, data, Path(folder) / "here", args.steps, args.seed)
        expected, found = numbers(before, args.steps), numbers(Path(folder) / "here", args.steps)
        wrong = differences(expected, found)
    print(f"{args.revision} and this tree: {len(expected)} results, {len(wrong)} differ")
    kinds = Counter(re.sub(r" (at step|line) \d+$", "", name) for name in wrong)
    print("".join(f"  {name}: {count}\n" for name, count in list(kinds.items())[:40]), end="")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
