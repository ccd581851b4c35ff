"""Texts that a run prints: machine, model and data, a line of a step, what to run next.

Functions return the text; `print0` prints it and writes it to train.log.
"""

import math
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from rl_train.config.grpo_config import Config
from rl_train.data.dataset_flags import eval_entry
from rl_train.data.errors import Report
from rl_train.distributed.process_group import RankInfo, print0
from rl_train.policies.lora import FROZEN
from rl_train.run.memory_estimate import GIB
from rl_train.utils.text import counted

LARGE_FOR_A_CPU = 1_000_000_000  # parameters
EQUAL_REWARDS = "all answers to each prompt got the same reward"
NO_UPDATE = (
    f"{EQUAL_REWARDS}, so no answer is better than another and no weight changes. Answers differ "
    "more at a higher --temperature, or with more --num_generations; another --reward may tell "
    "them apart"
)


# The start


def print_warning(sentence: str | None):
    """Print a warning, if there is one."""
    if sentence:
        print0(sentence)


def machine(ranks: RankInfo) -> str:
    """Return the device of this process and the number of processes."""
    if ranks.device.type == "cuda":
        device = torch.cuda.get_device_name(ranks.device)
    else:
        device = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    return f"device: {device}; {ranks.world_size} process{'es' * (ranks.world_size > 1)}"


def unused_gpu(ranks: RankInfo) -> str | None:
    """Return a warning if this process runs on the CPU though an NVIDIA GPU seems to be there."""
    hidden_by_user = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if ranks.device.type == "cuda" or hidden_by_user or not shutil.which("nvidia-smi"):
        return None
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; install a build with CUDA"
    else:
        reason = f"torch {torch.__version__} finds no GPU; nvidia-smi says whether its driver works"
    return f"warning: an NVIDIA GPU seems to be there, but training uses the CPU: {reason}"


def parameters(counts: Counter[str]) -> str:
    """Return how many parameters train, and their parts, from `parameter_counts`."""
    trained = {part: n for part, n in sorted(counts.items()) if not part.endswith(FROZEN)}
    frozen = {part: n for part, n in sorted(counts.items()) if part.endswith(FROZEN)}

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{part.removesuffix(FROZEN)} {n:,d}" for part, n in counts.items())

    fraction = sum(trained.values()) / counts.total()
    return (
        f"trainable parameters: {sum(trained.values()):,d} of {counts.total():,d} "
        f"({fraction:.2%}): {listed(trained)}\n"
        f"frozen parameters: {sum(frozen.values()):,d}: {listed(frozen)}"
    )


def large_on_cpu(num_parameters: int, ranks: RankInfo) -> str | None:
    """Return a warning if a large model is about to be trained on a CPU."""
    if ranks.device.type == "cuda" or num_parameters <= LARGE_FOR_A_CPU:
        return None
    return (
        f"warning: {num_parameters / 1e9:.1f} billion parameters are about to be trained on a CPU; "
        "a step may take hours"
    )


def memory(sizes: dict[str, int], ranks: RankInfo) -> str:
    """Return the memory that a process holds before activations, from {part: bytes}."""
    where = "per GPU" if ranks.device.type == "cuda" else "per process"
    parts = ", ".join(f"{part} {size_in_words(size)}" for part, size in sizes.items())
    total = size_in_words(sum(sizes.values()))
    return f"memory expected {where}, without activations: {total} ({parts})"


def size_in_words(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB if it is below one GiB."""
    if num_bytes < GIB:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"


def data_report(label: str, report: Report) -> str:
    """Return what was read of a data set, and what was skipped for which reason."""
    skipped = report["skipped"]
    reasons = ", ".join(f"{reason}: {count:,d}" for reason, count in skipped.items())
    resized = report.get("resized_masks")
    return (
        f"{label}: {counted(report['kept'], 'region')} of {counted(report['rows'], 'row')}; "
        + (f"skipped {sum(skipped.values()):,d} ({reasons})" if skipped else "none skipped")
        + (f"; resized to their image: {counted(resized, 'mask')}" if resized else "")
    )


# Steps


def step_line(
    step: int,
    max_steps: int,
    values: dict[str, float],
    components: dict[str, dict[str, bool]],
    seconds: float,
) -> str:
    """Return a line of the metrics of a step, or of their means over several.

    Args:
        values: {metric: value}; of a step without an update no loss.
        components: {task: {reward component: whether it counts in the reward}}; without any the
            task's losses are shown.
        seconds: of a step.
    """
    parts = [f"step {step}/{max_steps}"]
    # Without a signal no update is made, and there is no loss.
    if "total_loss" in values:
        parts.append(f"loss {number(values['total_loss'])}")
    else:
        parts.append("no update")
    for task, names in components.items():
        words = [f"{task}"]
        if f"{task}/reward_mean" in values:
            words.append(reward_words(task, values, names))
        shown = {"policy_loss": "policy_loss", "kl_div": "kl"} if names else {"loss": "loss"}
        for metric, word in shown.items():
            if f"{task}/{metric}" in values:
                words.append(f"{word} {number(values[f'{task}/{metric}'])}")
        parts.append(" ".join(words))
    parts += [f"learning rate {values['learning_rate']:.2e}", f"{seconds:.1f} s per step"]
    return " | ".join(parts)


def reward_words(task: str, values: dict[str, float], components: dict[str, bool]) -> str:
    """Format a task's mean reward, its weighted components in brackets, then unweighted ones.

    Args: see `step_line`; components: of this task.
    """
    reward = f"{values[f'{task}/reward_mean']:.3f}"
    figures = {n: f"{values[f'{task}/{n}']:.3f}" for n in components if f"{task}/{n}" in values}
    weighted = {name: figure for name, figure in figures.items() if components[name]}
    in_brackets = [f"{name} {figure}" for name, figure in weighted.items()]
    if list(weighted.values()) == [reward]:
        in_brackets = list(weighted)  # the reward is this component: its figure would stand twice
    measured = [f"{name} {figure}" for name, figure in figures.items() if not components[name]]
    return ", ".join([f"reward {reward} ({', '.join(in_brackets)})", *measured])


def number(value: float) -> str:
    """Format a loss: three decimals, or three digits of a small one."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"


def mean_values(steps: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it."""
    totals, counts = Counter(), Counter()
    for values in steps:
        totals.update(values)
        counts.update(values.keys())
    return {name: total / counts[name] for name, total in totals.items()}


def no_group_has_signal(values: dict[str, float], tasks: Iterable[str]) -> bool:
    """Return whether in a step no group's rewards differ, in any task."""
    return all(values.get(f"{task}/frac_zero_std", math.nan) == 1 for task in tasks)


# The end


def measured_role(has_teacher: bool, evaluation: Path) -> str:
    """Return the role whose metrics the last table shows; "" if the run keeps no teacher.

    Args:
        evaluation: the file of the last evaluation, which holds the teacher's too.
    """
    return f"the policy (the teacher's are in {evaluation})" if has_teacher else ""


def next_commands(config: Config, last: Path, role: str = "policy") -> str:
    """Return commands to run next in the working directory: look, read, measure.

    Args:
        last: the last checkpoint.
        role: policy or teacher, whose weights are measured: those that were merged.
    """
    output = config.run.output_dir
    commands = {
        "curves and pictures, in a browser": [
            "tensorboard.main",
            "--logdir",
            f"{output}/tensorboard",
        ]
    }
    if config.samples_answers:
        page = ["--run", output, "--output", f"{output}/rollouts.html"]
        commands["sampled answers, their masks and rewards, as a page"] = ["tools.rollouts", *page]
    measured = last.name if role == "policy" else f"{last.name}'s {role}"
    evaluate = evaluate_command(config, last)
    evaluate += [] if role == "policy" else ["--role", role]
    commands[f"metrics of {measured} and their intervals"] = evaluate
    lines = [f"next, in {Path.cwd()}:"]
    for purpose, words in commands.items():
        lines += [f"  # {purpose}", f"  {shlex.join([python(), '-m', *words])}"]
    return "\n".join(lines)


def evaluate_command(config: Config, checkpoint: Path) -> list[str]:
    """Return the words of the tools.evaluate command that measures a checkpoint as the run does."""
    data = config.data
    words = ["tools.evaluate", "--model_path", str(checkpoint)]
    if entry := eval_entry(data):
        name, subsets, folder = entry.name, entry.subsets, entry.folder
        words += ["--num_samples", str(data.eval_samples)]
    else:  # the evaluation split is a part of --data_dir: leave out what was trained on
        name, subsets, folder = data.dataset, data.subsets, data.data_dir
        words += ["--train_eval_overlap", "drop"]
    words += ["--data_dir", folder, "--dataset", name]
    options = dict(
        dtype=config.policy.dtype,
        max_tiles=config.policy.max_tiles,
        max_completion_length=config.rollout.max_completion_length,
        image_root=data.image_root,
        attributes=data.attributes,
    )
    for flag, value in options.items():
        words += [f"--{flag}", str(value)] if value is not None else []
    words += ["--subsets", *subsets] if subsets else []
    return words + (["--distractors"] if data.distractors else [])


def python() -> str:
    """Return this interpreter for a shell, relative to the working directory if it lies there."""
    program, here = Path(sys.executable), Path.cwd()
    return str(program.relative_to(here) if program.is_relative_to(here) else program)
