"""What the runs of a sweep changed: means over runs with 95 % intervals, as markdown."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from rl_train.grpo import group_std

HEAD = """\
Change of held-out measures, after minus before: mean over runs (demos x seeds) ± half of its 95 %
interval (Student's t of the runs' changes). zero std: share of groups without variance."""


def evaluations(output: Path) -> list[Path]:
    """The files of the measures before the first step and, of a complete run, after the last."""
    steps = json.loads((output / "config.json").read_text())["max_steps"]
    files = [output / "evaluation" / f"step_{step}.json" for step in (0, steps)]
    return [file for file in files if file.is_file()]


def complete(folder: Path) -> dict[str, dict[tuple[str, str], Path]]:
    """{arm: {(demo, seed): output folder}} of the complete runs in a sweep's folder, sorted."""
    found = defaultdict(dict)
    for config in sorted(folder.glob("*/*/*/config.json")):
        output = config.parent
        if len(evaluations(output)) == 2:
            arm, demo, seed = output.relative_to(folder).parts
            found[arm][demo, seed] = output
    return dict(found)


def measure(file: Path, metric: str) -> float:
    """A metric of an evaluation: of its "means", or else the mean of the "values" that are known.

    Raises:
        ValueError: it is in neither; names --metrics and what is there.
    """
    found = json.loads(file.read_text())
    means, values = found.get("means", {}), found.get("values", {})
    if metric in means:
        return means[metric]
    if metric in values:
        return float(np.nanmean(np.array(values[metric], dtype=np.float64)))
    known = ", ".join(dict.fromkeys([*means, *values]))
    raise ValueError(f"--metrics {metric}: not measured in {file}, which knows {known}")


def changes(runs: dict[tuple, Path], metric: str) -> dict[tuple, float]:
    """{run: after minus before} of a metric."""
    ends = {run: evaluations(output) for run, output in runs.items()}
    return {run: measure(b, metric) - measure(a, metric) for run, (a, b) in ends.items()}


def t_quantile(freedom: int) -> float:
    """The .975 quantile of Student's t with these degrees of freedom.

    In t = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1).
    """
    angle = np.linspace(0, np.pi / 2, 100_001)
    area = np.cumsum(np.cos((angle[1:] + angle[:-1]) / 2) ** (freedom - 1))
    return freedom**0.5 * float(np.tan(np.interp(0.95 * area[-1], area, angle[1:])))


def interval(values: list[float]) -> dict:
    """The mean of n runs and half of its 95 % interval, infinite for a single run."""
    n, half = len(values), float("inf")
    if n > 1:
        half = t_quantile(n - 1) * float(np.std(values, ddof=1)) / n**0.5
    return dict(mean=float(np.mean(values)), half=half, runs=values)


def zero_std(output: Path) -> dict[str, float]:
    """{task: share of all groups of a run whose rewards were equal}."""
    groups = defaultdict(list)
    for line in (output / "rollouts" / "rank0.jsonl").read_text().split("\n")[:-1]:
        row = json.loads(line)
        groups[row["task"]].append(np.nan if row["reward"] is None else row["reward"])
    size = json.loads((output / "config.json").read_text())["num_generations"]
    return {
        task: float((group_std(torch.tensor(rewards), size) == 0).float().mean())
        for task, rewards in groups.items()
    }


def summary(folder: Path, metrics: list[str], against: list[str]) -> dict:
    """What `markdown` prints of all complete runs: each arm, and arms minus some of them.

    Args:
        against: arms from which the others are told apart, paired by (demo, seed).

    Raises:
        ValueError: a metric or an arm of `against` is not there.
    """
    runs = complete(folder)
    for arm in against:
        if arm not in runs:
            known = ", ".join(runs) or "none"
            raise ValueError(f"--against {arm}: {folder} has no complete run of it, but of {known}")
    changed = {arm: {m: changes(of_arm, m) for m in metrics} for arm, of_arm in runs.items()}
    bases = [evaluations(output)[0] for of_arm in runs.values() for output in of_arm.values()]
    found = dict(before={}, arms={}, against={control: {} for control in against})
    if bases:
        found["before"] = {m: float(np.mean([measure(base, m) for base in bases])) for m in metrics}
    for arm, of_arm in runs.items():
        shares = [zero_std(output) for output in of_arm.values()]
        share = {task: float(np.mean([s[task] for s in shares])) for task in shares[0]}
        cells = {m: interval(list(changed[arm][m].values())) for m in metrics}
        found["arms"][arm] = dict(runs=len(of_arm), zero_std=share, **cells)
        for control in set(against) - {arm}:
            pairs = [run for run in of_arm if run in runs[control]]
            if pairs:
                found["against"][control][arm] = dict(runs=len(pairs)) | {
                    m: interval([changed[arm][m][p] - changed[control][m][p] for p in pairs])
                    for m in metrics
                }
    return found


def markdown(found: dict, metrics: list[str]) -> str:
    """A `summary` as tables."""
    lines = [HEAD, "", row("arm", "runs", [*metrics, "zero std"])]
    lines.append("|---" * (3 + len(metrics)) + "|")
    if found["before"]:
        lines.append(row("*before*", "", [*(f"{x:.3f}" for x in found["before"].values()), ""]))
    for arm, of_arm in found["arms"].items():
        shares = ", ".join(f"{task} {share:.2f}" for task, share in of_arm["zero_std"].items())
        cells = [*(cell(of_arm[m]) for m in metrics), shares]
        lines.append(row(f"`{arm}`", of_arm["runs"], cells))
    for control, arms in found["against"].items():
        lines += ["", f"Minus `{control}`, paired by demo and seed:", ""]
        lines += [row("arm", "pairs", metrics), "|---" * (2 + len(metrics)) + "|"]
        for arm, pairs in arms.items():
            lines.append(row(f"`{arm}`", pairs["runs"], [cell(pairs[m]) for m in metrics]))
    return "\n".join(lines)


def row(name: str, count, cells) -> str:
    return f"| {name} | {count} | {' | '.join(cells)} |"


def cell(found: dict) -> str:
    return f"{found['mean']:+.3f} ± {found['half']:.3f}"
