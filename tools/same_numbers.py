"""Compare what this tree computes with what another revision computed, bit for bit, on the CPU.

    python -m tools.same_numbers REVISION [--steps 20] [--seed 0]   # both revisions, then compare
    python -m tools.same_numbers --record FILE                      # this tree alone, into a file
    python -m tools.same_numbers --before FILE                      # this tree against such a file

Each tree runs the scenarios of its own `SCENARIOS` (reinforcement learning of both loops and of
points, supervised training, evaluation, export, reading of every data format) in float32 on one CPU
thread, on the same drawn data, and writes a digest of every result: every metric but those of time,
every field of every rollout, every evaluation result, every weight, every sample. `RENAMED` maps
names of the other revision to names here; `NOT_COMPARED` lists what only one of them computes.
Exits with status 1 and the first differences if any other result differs.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_train.utils.command_line import FlagParser, run_program

ROOT = Path(__file__).parents[1]
DEMO_CHECKPOINT = ROOT / "tools" / "demo" / "checkpoint"
POINTS_CHECKPOINT = ROOT / "tools" / "demo" / "points_checkpoint"
SMALL = "--dtype float32 --lora_r 16 --lora_alpha 32 --no-gradient_checkpointing --num_workers 1"
HALF_LIKELIHOOD = "--reward_weights loop2.meteor=0.5 loop2.likelihood=0.5"
LOOPS = (
    f"{SMALL} --max_completion_length 32 --micro_batch_size 16 --batch_size 4 --num_generations 8 "
    "--learning_rate 1.5e-4 --text_hidden_fcs_lr 1e-3 --ema_decay 0.95 --kl_coef 0.02 "
    f"--eval_samples 16 --eval_steps 0 {HALF_LIKELIHOOD} --merge_at_end none"
)
# Other ways through the same code: sequence ratios, several updates, accumulation.
LOOPS_OTHERWISE = (
    f"{SMALL} --max_completion_length 16 --micro_batch_size 8 --batch_size 2 --num_generations 4 "
    "--learning_rate 1e-4 --loss_type gspo --num_iterations 2 --gradient_accumulation_steps 2 "
    "--scale_rewards batch --scale_components --mask_truncated_completions "
    "--mask_loss_coef 0.1 --eval_samples 8 --eval_steps 1 --distractors "
    f"{HALF_LIKELIHOOD} --merge_at_end none"
)
POINTS = (
    f"{SMALL} --tasks point_segmentation --answer_style points --image_size 96 "
    "--max_completion_length 32 --micro_batch_size 32 --batch_size 4 --num_generations 8 "
    "--learning_rate 1e-3 --kl_coef 0.02 --eval_samples 8 --eval_steps 0 --merge_at_end none"
)
SFT = (
    f"{SMALL} --max_completion_length 24 --batch_size 4 --learning_rate 1e-4 "
    "--gradient_accumulation_steps 2 --eval_samples 8 --eval_steps 0"
)
SFT_POINTS = (
    f"{SMALL} --tasks point_answers --answer_style points --image_size 96 "
    "--max_completion_length 32 --batch_size 4 --learning_rate 1e-4 --eval_samples 8 --eval_steps 0"
)
OF_TIME = ("perf/",)
SHORT = 60  # characters of a value that is kept as it is; of a longer one its digest is

# What a name or a text value of the other revision is called here: (pattern, replacement).
RENAMED: list[tuple[str, str]] = [
    (r"/mask_sigma\b", "/latent_std"),
    (r"^export: loops ema ", "export: loops teacher "),
    (r"mask_to_caption_weight", "loop1_weight"),
    (r"caption_to_mask_weight", "loop2_weight"),
    (r"\brefused(_frac)?\b", r"unparsed\1"),
    (r"teacher/lag\b", "teacher/distance_to_policy"),
    (r"teacher/drift\b", "teacher/distance_to_reference"),
    (r"\b(seg|cycle)_hit\b", r"\1_on_target"),
    (r"/hit\b", "/on_target"),
    (r"\bdata/share/", "data/fraction/"),
    (r"(rollout .*) hit$", r"\1 on_target"),
    (r"(rollout \S+ line \d+) prompt\b", r"\1 sam_prompt"),
    (r"(rollout \S+ line \d+) mask_without\b", r"\1 mask_without_negatives"),
]
# Results that only one revision computes, or that changed on purpose: patterns of names.
NOT_COMPARED: list[str] = [
    r"^readers: dam report ignored_members",
    r"^export: \w+ \w+ files$",  # a CITATION.bib was among them
]

Results = dict[str, str]


def run(module: str, *arguments: str | Path | int):
    """Run `python -m module` of this tree on one CPU thread; its output is shown if it fails."""
    environment = dict(
        os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT)
    )
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def shown(value: Any) -> str:
    """Return a value as text: short ones as they are, others as their SHA-256."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()[:16]
    text = repr(value)
    return text if len(text) <= SHORT else hashlib.sha256(text.encode()).hexdigest()[:16]


def flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Return (name, shown value) of a JSON value, a pair for each key of its objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(f"{name} {key}", inner)
    else:
        yield name, shown(value)


# What runs wrote


def metrics_of(run_dir: Path) -> Results:
    """Every point of every TensorBoard metric that does not depend on time."""
    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0})
    events.Reload()
    return {
        f"metric {tag} at step {point.step}": shown(point.value)
        for tag in events.Tags()["scalars"]
        if not tag.startswith(OF_TIME)
        for point in events.Scalars(tag)
    }


def rollouts_of(run_dir: Path) -> Results:
    """Every field of every line of the rollout files."""
    results = {}
    for file in sorted((run_dir / "rollouts").glob("*.jsonl")):
        for number, line in enumerate(file.read_text().splitlines()):
            results |= flat(f"rollout {file.stem} line {number}", json.loads(line))
    return results


def evaluation_of(file: Path) -> Results:
    """Values by sample, means, intervals and captions of an evaluation file."""
    record = json.loads(file.read_text())
    kept = {key: record[key] for key in ("values", "means", "intervals", "captions")}
    return dict(flat(f"evaluation {file.stem}", kept))


def weights_of(folder: Path) -> Results:
    """Every tensor of the safetensors files below a folder."""
    results = {}
    for file in sorted(folder.rglob("*.safetensors")):
        for key, value in load_file(file).items():
            data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            results[f"weights {file.relative_to(folder)} {key}"] = shown(data)
    return results


def run_results(run_dir: Path, steps: int) -> Results:
    """All that a training run wrote and that does not depend on time."""
    results = metrics_of(run_dir) | rollouts_of(run_dir)
    for file in sorted((run_dir / "evaluation").glob("*.json")):
        results |= evaluation_of(file)
    return results | weights_of(run_dir / f"checkpoint_step_{steps}")


# Scenarios: each takes (data folder, output folder, steps, seed)


def train(
    module: str, flags: str, model_flags: list, data: Path, run_dir: Path, steps: int
) -> Results:
    """Train `steps` steps by a module of this tree and read what it wrote."""
    arguments = [*flags.split(), "--max_steps", steps, "--data_dir", data / "train"]
    arguments += ["--eval_data_dir", data / "heldout", "--output_dir", run_dir, *model_flags]
    run(module, *arguments)
    return run_results(run_dir, steps)


def loops(data: Path, output: Path, steps: int, seed: int) -> Results:
    """Both loops as the demo trains them."""
    model_flags = ["--model_path", DEMO_CHECKPOINT, "--seed", seed]
    return train("rl_train.train", LOOPS, model_flags, data / "demo", output / "loops", steps)


def loops_otherwise(data: Path, output: Path, steps: int, seed: int) -> Results:
    """Both loops with other losses, schedules and measures."""
    attributes = data / "demo" / "attributes.json"
    model_flags = ["--model_path", DEMO_CHECKPOINT, "--seed", seed, "--attributes", attributes]
    output = output / "loops_otherwise"
    return train("rl_train.train", LOOPS_OTHERWISE, model_flags, data / "demo", output, 2)


def points(data: Path, output: Path, steps: int, seed: int) -> Results:
    """Qwen2.5-VL and SAM2 as the demo of points trains them."""
    model_flags = ["--model_path", POINTS_CHECKPOINT / "qwen", "--seed", seed]
    model_flags += ["--sam_path", POINTS_CHECKPOINT / "sam"]
    return train("rl_train.train", POINTS, model_flags, data / "points", output / "points", 2)


def sft(data: Path, output: Path, steps: int, seed: int) -> Results:
    """Supervised training of captions and masks."""
    model_flags = ["--model_path", DEMO_CHECKPOINT, "--seed", seed]
    return train("rl_train.sft", SFT, model_flags, data / "demo", output / "sft", 2)


def sft_points(data: Path, output: Path, steps: int, seed: int) -> Results:
    """Supervised training of answers with points."""
    model_flags = ["--model_path", POINTS_CHECKPOINT / "qwen", "--seed", seed]
    model_flags += ["--sam_path", POINTS_CHECKPOINT / "sam"]
    output = output / "sft_points"
    return train("rl_train.sft", SFT_POINTS, model_flags, data / "points", output, 2)


def evaluation(data: Path, output: Path, steps: int, seed: int) -> Results:
    """`tools.evaluate` of a base, of a run's checkpoint, of RefCOCO's protocol and of points."""
    usual = "--batch_size 4 --num_workers 0 --dtype float32 --max_completion_length 24".split()
    demo = ["--data_dir", data / "demo" / "heldout", "--num_samples", 8]
    demo += ["--attributes", data / "demo" / "attributes.json", "--distractors", "--best_of", 2]
    refcoco = ["--data_dir", data / "refcoco", "--dataset", "refcoco", "--num_samples", 6]
    points = ["--data_dir", data / "points" / "heldout", "--num_samples", 6]
    results = {}
    for name, arguments in {
        "base": ["--model_path", DEMO_CHECKPOINT, *demo],
        "checkpoint": ["--model_path", output / "loops" / f"checkpoint_step_{steps}", *demo],
        "protocol": ["--model_path", DEMO_CHECKPOINT, *refcoco, "--protocol", "sa2va"],
        "points": ["--model_path", output / "points" / "checkpoint_step_2", *points],
    }.items():
        file = output / "evaluation" / f"{name}.json"
        run("tools.evaluate", *arguments, *usual, "--output", file)
        results |= evaluation_of(file)
    return results


def export(data: Path, output: Path, steps: int, seed: int) -> Results:
    """`tools.export` of a run of each kind: every weight, the configs, the names of the files."""
    results = {}
    for name, number in {"loops": steps, "points": 2, "sft": 2}.items():
        for role in ("policy", "teacher") if name == "loops" else ("policy",):
            folder = output / "exported" / f"{name}_{role}"
            checkpoint = output / name / f"checkpoint_step_{number}"
            run("tools.export", "--checkpoint", checkpoint, "--output", folder, "--role", role)
            exported = weights_of(folder)
            exported["files"] = shown(sorted(f.name for f in folder.iterdir()))
            exported |= flat("config", json.loads((folder / "config.json").read_text()))
            results |= {f"{name} {role} {key}": value for key, value in exported.items()}
    return results


def readers(data: Path, output: Path, steps: int, seed: int) -> Results:
    """Every sample of every format, with its report and the keys of its images."""
    from rl_train.data import EVAL_DATASETS

    results = {}
    folders = dict(gar="demo/train", dam="dam", segzero="segzero", reasonseg="reasonseg")
    folders |= dict(refcoco="refcoco", refcocog="refcocog")
    for name, folder in folders.items():
        dataset = EVAL_DATASETS[name](data / folder)
        results |= flat(f"{name} report", dataset.report())
        results[f"{name} image keys"] = shown(np.asarray(dataset.image_keys).tobytes())
        for index in range(len(dataset)):
            sample = dataset[index]
            image = np.asarray(sample["image"])
            sample |= dict(image=image.tobytes(), mask=np.asarray(sample["mask"]).tobytes())
            results |= flat(f"{name} sample {index}", sample)
    return results


SCENARIOS: dict[str, Callable[[Path, Path, int, int], Results]] = dict(
    readers=readers,
    loops=loops,
    loops_otherwise=loops_otherwise,
    points=points,
    sft=sft,
    sft_points=sft_points,
    evaluation=evaluation,
    export=export,
)


def record(file: Path, steps: int, seed: int):
    """Run every scenario on this tree and write {name of a result: value or digest}."""
    from tools.same_numbers_data import write_all

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        data, output = Path(folder) / "data", Path(folder) / "output"
        write_all(data)
        for name, scenario in SCENARIOS.items():
            print(f"{name} ...", flush=True)
            computed = scenario(data, output, steps, seed)
            results |= {f"{name}: {key}": value for key, value in computed.items()}
    file.write_text(json.dumps(results, indent=0))


def record_revision(revision: str, file: Path, steps: int, seed: int):
    """`record` of another revision, by its own code in a worktree of git."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        add = ["git", "worktree", "add", "-q", "--detach", tree, revision]
        subprocess.run(add, cwd=ROOT, check=True)
        command = [sys.executable, "-m", "tools.same_numbers", "--record", file.resolve()]
        command += ["--steps", str(steps), "--seed", str(seed)]
        try:
            subprocess.run(command, cwd=tree, env=dict(os.environ, PYTHONPATH=""), check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def renamed(results: Results) -> Results:
    """Return the compared results of the other revision under the names of this tree."""
    translated = {}
    for name, value in results.items():
        for pattern, replacement in RENAMED:
            name, value = re.sub(pattern, replacement, name), re.sub(pattern, replacement, value)
        translated[name] = value
    return compared(translated)


def compared(results: Results) -> Results:
    """Leave out the results of `NOT_COMPARED`."""
    return {
        name: value
        for name, value in results.items()
        if not any(re.search(pattern, name) for pattern in NOT_COMPARED)
    }


def differences(before: Results, after: Results) -> list[str]:
    """The names whose values differ or which one side lacks."""
    equal = {name for name in before.keys() & after.keys() if before[name] == after[name]}
    return sorted((before.keys() | after.keys()) - equal)


def kind_of(name: str, before: Results, after: Results) -> str:
    """A name without its numbers, with the side that lacks it: what differences are counted by."""
    lacks = "" if name in before and name in after else " (only before)"
    lacks = lacks if name in before else " (only here)"
    return re.sub(r"\b(line|step|sample|step_|rank) ?\d+\b", r"\1 N", name) + lacks


def main(argv: list[str] | None = None):
    parser = FlagParser(
        prog="python -m tools.same_numbers",
        description=__doc__,
    )
    parser.add_argument("revision", nargs="?", help="revision of git to compare this tree with")
    parser.add_argument("--steps", type=int, default=20, help="steps of the run of both loops")
    parser.add_argument("--seed", type=int, default=0, help="seed of all runs")
    parser.add_argument("--record", type=Path, help="JSON file that receives this tree's results")
    parser.add_argument("--before", type=Path, help="JSON file of --record to compare with")
    args = parser.parse_args(argv)
    if args.record:
        record(args.record, args.steps, args.seed)
        return
    if not args.revision and not args.before:
        parser.error("name a REVISION, or a file by --before or --record")
    with tempfile.TemporaryDirectory() as folder:
        before_file, here_file = Path(folder) / "before.json", Path(folder) / "here.json"
        if args.before is None:
            record_revision(args.revision, before_file, args.steps, args.seed)
        record(here_file, args.steps, args.seed)
        recorded = json.loads((args.before or before_file).read_text())
        here = compared(json.loads(here_file.read_text()))
    before = renamed(recorded)
    wrong = differences(before, here)
    gone = len(recorded) - len(before)
    print(f"{args.revision or args.before} and this tree: {len(before)} results,", end=" ")
    print(f"{len(wrong)} differ, {gone} are not compared")
    kinds = Counter(kind_of(name, before, here) for name in wrong)
    print("".join(f"  {name}: {count}\n" for name, count in list(kinds.items())[:60]), end="")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    run_program(main)
