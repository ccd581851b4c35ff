"""Summarise the changes in a sweep's runs: means with 95 % intervals, as markdown.

An interval over runs counts them as independent, though those of one checkpoint share it and its
held-out regions: it is for other seeds. Beside it stands the interval over checkpoints, of which
each counts once, where runs began from several.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from rl_train.grpo import group_std

HEAD = """\
Change of held-out measures, after minus before: mean over runs (demos x seeds) ± half of its 95 %
interval (Student's t of the runs' changes). Behind a comma, where runs began from several
checkpoints: the same over these, of the mean change of each one's runs. zero std: fraction of
groups without variance."""


def evaluations(output: Path) -> list[Path]:
    """Return the evaluation files before the first step and, of a complete run, after the last."""
    steps = json.loads((output / "config.json").read_text())["max_steps"]
    files = [output / "evaluation" / f"step_{step}.json" for step in (0, steps)]
    return [file for file in files if file.is_file()]


def complete(folder: Path) -> dict[str, dict[tuple[str, str], Path]]:
    """Return {arm: {(demo, seed): output folder}} of a sweep's complete runs, sorted."""
    runs_of = defaultdict(dict)
    for config in sorted(folder.glob("*/*/*/config.json")):
        output = config.parent
        if len(evaluations(output)) == 2:
            arm, demo, seed = output.relative_to(folder).parts
            runs_of[arm][demo, seed] = output
    return dict(runs_of)


def measures(file: Path) -> dict[str, float]:
    """Return {metric: mean} of an evaluation file; NaN among its values is left out."""
    record = json.loads(file.read_text())
    columns = {name: np.array(v, dtype=np.float64) for name, v in record["values"].items()}
    known = {name: column[~np.isnan(column)] for name, column in columns.items()}
    means = {name: float(column.mean()) for name, column in known.items() if len(column)}
    return means | record["means"]


def t_quantile(freedom: int) -> float:
    """Return the .975 quantile of Student's t with these degrees of freedom.

    In t = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1).
    """
    # The density is symmetric: its upper .025 is the upper .05 of the half above 0.
    angle = np.linspace(0, np.pi / 2, 100_001)
    area = np.cumsum(np.cos((angle[1:] + angle[:-1]) / 2) ** (freedom - 1))
    return freedom**0.5 * float(np.tan(np.interp(0.95 * area[-1], area, angle[1:])))


def interval(values: list[float]) -> dict:
    """Return the mean of n runs and half of its 95 % interval, infinite for a single run.

    Runs with NaN, a fraction of nothing, are left out.
    """
    runs = [value for value in values if not math.isnan(value)]
    n, mean, half = len(runs), math.nan, math.inf
    if n > 0:
        mean = float(np.mean(runs))
    if n > 1:
        half = t_quantile(n - 1) * float(np.std(runs, ddof=1)) / n**0.5
    return dict(mean=mean, half=half, runs=runs)


def start_of(output: Path) -> str:
    """Return the digest of the checkpoint that a run began from; if unknown, its demo's name."""
    settings = json.loads(evaluations(output)[0].read_text()).get("settings", {})
    return settings.get("base") or output.parent.name


def change_cell(changed: dict[tuple, float], start: dict[tuple, str]) -> dict:
    """Return the `interval` over runs, and that over checkpoints where there are several.

    Args:
        changed: {run: change}, NaN where it is not known.
        start: {run: checkpoint that it began from}.
    """
    of_checkpoint = defaultdict(list)
    for run, value in changed.items():
        if not math.isnan(value):
            of_checkpoint[start[run]].append(value)
    statistics = interval(list(changed.values()))
    if len(of_checkpoint) > 1:
        statistics["over_checkpoints"] = interval(
            [float(np.mean(v)) for v in of_checkpoint.values()]
        )
    return statistics


def zero_std(output: Path) -> dict[str, float]:
    """Return {task: fraction of a run's groups whose rewards were equal}."""
    groups = defaultdict(list)
    for line in (output / "rollouts" / "rank0.jsonl").read_text().split("\n")[:-1]:
        row = json.loads(line)
        # Lines of a group follow each other, so G of them in turn are one.
        groups[row["task"]].append(np.nan if row["reward"] is None else row["reward"])
    size = json.loads((output / "config.json").read_text())["num_generations"]
    return {
        task: float((group_std(torch.tensor(rewards), size) == 0).float().mean())
        for task, rewards in groups.items()
    }


def summary(folder: Path, metrics: list[str], against: list[str]) -> dict:
    """Return the numbers that `markdown` prints of complete runs: each arm, and arms minus others.

    Args:
        against: arms from which the others are told apart, paired by (demo, seed).

    Raises:
        ValueError: a metric or an arm of `against` is not there.
    """
    runs = complete(folder)
    ends = {
        arm: {run: list(map(measures, evaluations(output))) for run, output in of_arm.items()}
        for arm, of_arm in runs.items()
    }
    bases = [before for of_arm in ends.values() for before, _ in of_arm.values()]
    check_names(folder, ends, metrics, against)
    changed = {arm: {m: changes(of_arm, m) for m in metrics} for arm, of_arm in ends.items()}
    before = {m: interval([base.get(m, math.nan) for base in bases])["mean"] for m in metrics}
    summarised = dict(before=before, arms={}, against={control: {} for control in against})
    start = {run: start_of(output) for of_arm in runs.values() for run, output in of_arm.items()}
    for arm, of_arm in runs.items():
        of_runs = [zero_std(output) for output in of_arm.values()]
        fractions = {task: float(np.mean([run[task] for run in of_runs])) for task in of_runs[0]}
        cells = {m: change_cell(changed[arm][m], start) for m in metrics}
        summarised["arms"][arm] = dict(num_runs=len(of_arm), zero_std=fractions, **cells)
        for control in set(against) - {arm}:
            # Paired by (demo, seed): both runs began alike.
            pairs = [run for run in of_arm if run in runs[control]]
            if pairs:
                cells = {}
                for m in metrics:
                    own, other = changed[arm][m], changed[control][m]
                    cells[m] = change_cell({pair: own[pair] - other[pair] for pair in pairs}, start)
                summarised["against"][control][arm] = dict(num_runs=len(pairs)) | cells
    return summarised


def check_names(folder: Path, ends: dict, metrics: list[str], against: list[str]):
    """Raise ValueError if an arm of `against` or a metric is in none of a folder's runs."""
    for arm in against:
        if arm not in ends:
            known = ", ".join(ends) or "none"
            raise ValueError(f"--against {arm}: {folder} has no complete run of it, but of {known}")
    files = [file for of_arm in ends.values() for pair in of_arm.values() for file in pair]
    known = list(dict.fromkeys(name for file in files for name in file))
    for metric in metrics:
        if files and metric not in known:
            raise ValueError(
                f"--metrics {metric}: no run in {folder} measured it, but {', '.join(known)}"
            )


def changes(ends: dict[tuple, list], metric: str) -> dict[tuple, float]:
    """Return {run: after minus before} of a metric; NaN where a run does not know both."""
    return {
        run: after.get(metric, math.nan) - before.get(metric, math.nan)
        for run, (before, after) in ends.items()
    }


def markdown(summarised: dict, metrics: list[str]) -> str:
    """Format a `summary` as tables."""
    lines = [HEAD, "", row("arm", "runs", [*metrics, "zero std"])]
    lines.append("|---" * (3 + len(metrics)) + "|")
    if summarised["arms"]:
        lines.append(
            row("*before*", "", [*(f"{x:.3f}" for x in summarised["before"].values()), ""])
        )
    for arm, of_arm in summarised["arms"].items():
        fractions = ", ".join(f"{task} {value:.2f}" for task, value in of_arm["zero_std"].items())
        cells = [*(cell(of_arm[m], of_arm["num_runs"]) for m in metrics), fractions]
        lines.append(row(f"`{arm}`", of_arm["num_runs"], cells))
    for control, arms in summarised["against"].items():
        lines += ["", f"Minus `{control}`, paired by demo and seed:", ""]
        lines += [row("arm", "pairs", metrics), "|---" * (2 + len(metrics)) + "|"]
        for arm, pairs in arms.items():
            lines.append(
                row(
                    f"`{arm}`",
                    pairs["num_runs"],
                    [cell(pairs[m], pairs["num_runs"]) for m in metrics],
                )
            )
    return "\n".join(lines)


def row(name: str, count: int | str, cells: Iterable[str]) -> str:
    """Format one row of a table."""
    return f"| {name} | {count} | {' | '.join(cells)} |"


def cell(change: dict, num_runs: int) -> str:
    """Format mean ± half of the interval, the number of runs if not all, and over checkpoints."""
    n = len(change["runs"])
    count = "" if n == num_runs else f" ({n})"
    text = f"{change['mean']:+.3f} ± {change['half']:.3f}{count}"
    if over := change.get("over_checkpoints"):
        text += f", ± {over['half']:.3f} over {len(over['runs'])}"
    return text
