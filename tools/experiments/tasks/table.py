"""Figures of the comparisons: each arm at its best learning rate, on other regions than chose it.

If several learning rates were tried, the held-out samples are cut in two: the first metric on the
first half chooses an arm's rate, as mean over seeds, and all figures are of the second half.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_train.evaluation.bootstrap import paired_difference, rows_of, statistic
from rl_train.rewards.thinking import thinking_rewards
from tools.experiments.tasks.arms import Comparison

if TYPE_CHECKING:
    from tools.experiments.tasks.__main__ import Runs

FIRST, SECOND = slice(0, None, 2), slice(1, None, 2)  # halves of the held-out samples
ALL = slice(None)


def rows(file: Path, metric: str) -> torch.Tensor:
    """Return `rows_of` a metric in an evaluation's file; "form" is the form of its answers."""
    evaluation = json.loads(file.read_text())
    if metric == "form":
        return thinking_rewards(evaluation["captions"]).double()
    columns = evaluation["values"].items()
    return rows_of({k: torch.tensor(v, dtype=torch.float64) for k, v in columns}, metric)


def mean_rows(files: list[Path], metric: str) -> torch.Tensor:
    """Return the rows of a metric, each the mean of several evaluations of one sample."""
    return torch.stack([rows(file, metric) for file in files]).mean(0)


def of_comparison(
    comparison: Comparison, name: str, runs: "Runs", seeds: list[int], steps: int
) -> dict[str, Any]:
    """Return {"before": {metric: value}, arm: {"rate", "tried", metric: its change}}.

    A change is {"mean", "low", "high", "seeds"}: of the mean over seeds, with a paired bootstrap
    interval over regions, and of each seed. Seeds of which a rate is missing are left out. Arms
    beside the comparison's own have "own_minus", the `difference` in the first metric; "untrained"
    holds the figures of `untrained`.
    """
    figures, reported = {}, reported_samples(comparison)
    for arm in comparison.arms:
        folders = {
            seed: {rate: runs.output(name, arm, rate, seed) for rate in comparison.rates}
            for seed in seeds
        }
        last = f"evaluation/step_{steps}.json"
        done = [s for s in seeds if all((o / last).exists() for o in folders[s].values())]
        if not done:
            continue
        ends = {rate: [folders[seed][rate] / last for seed in done] for rate in comparison.rates}
        first = comparison.metrics[0]
        tried = {
            rate: float(statistic(mean_rows(files, first)[FIRST])) for rate, files in ends.items()
        }
        rate = max(tried, key=tried.get)
        base = folders[done[0]][rate] / "evaluation/step_0.json"
        figures["before"] = {
            m: float(statistic(rows(base, m)[reported])) for m in comparison.metrics
        }
        figures[arm] = dict(rate=rate, tried=tried, ends=[str(file) for file in ends[rate]])
        for metric in comparison.metrics:
            before, after = rows(base, metric)[reported], mean_rows(ends[rate], metric)[reported]
            change = dict(zip(("mean", "low", "high"), paired_difference(before, after)))
            of_seeds = [rows(file, metric)[reported] for file in ends[rate]]
            change["seeds"] = [float(statistic(r) - statistic(before)) for r in of_seeds]
            figures[arm][metric] = change
        if comparison.eval_steps:
            outputs = [folders[seed][rate] for seed in done]
            figures[arm] |= signal(outputs, comparison, steps)
    if comparison.own not in figures:
        return figures
    for arm, of_arm in figures.items():
        if "ends" in of_arm and arm != comparison.own:
            own_ends = figures[comparison.own]["ends"]
            of_arm["own_minus"] = difference(comparison, of_arm["ends"], own_ends)
    rivals = runs.untrained_file(name)
    if rivals.exists():
        figures["untrained"] = untrained(rivals, comparison, figures[comparison.own]["ends"])
    return figures


def reported_samples(comparison: Comparison) -> slice:
    """Return which held-out samples are reported: all where no rate was chosen on some of them."""
    return SECOND if len(comparison.rates) > 1 else ALL


def difference(comparison: Comparison, ends: list[str], own_ends: list[str]) -> dict[str, float]:
    """Return by how much the own arm's mean over seeds exceeds another arm's, in the first metric.

    Args: ends, own_ends: the last evaluations of the other arm and of the own one, of each seed.
    """
    metric, reported = comparison.metrics[0], reported_samples(comparison)
    other, own = (mean_rows([Path(e) for e in of], metric)[reported] for of in (ends, own_ends))
    return dict(zip(("mean", "low", "high"), paired_difference(other, own)))


# {metric of an evaluation: measure of `untrained`}
UNTRAINED_MEASURES = {
    "seg_iou": "iou",
    "seg_on_target": "found",
    "caption_meteor": "meteor",
    "gcg_matched": "matched",
    "gcg_meteor": "meteor",
}


def untrained(file: Path, comparison: Comparison, ends: list[str]) -> dict[str, Any]:
    """Return {cause: {"chosen", metric: its change, "own_minus": {metric: difference}}}.

    Both of the same held-out samples, with intervals over them; of the own arm the mean over seeds.

    Args: ends: last evaluations of the own arm at its best rate.
    """
    record, figures, reported = json.loads(file.read_text()), {}, reported_samples(comparison)
    references = json.loads(Path(ends[0]).read_text())["references"]
    if references != record["references"]:
        raise ValueError(f"{file}: of other samples than {ends[0]}")
    for rival in record["rivals"]:
        row = dict(chosen=rival["chosen"], own_minus={})
        for metric in comparison.metrics:
            measure = UNTRAINED_MEASURES.get(metric)
            if measure not in rival["values"]:
                continue
            before, after = (
                torch.tensor(values[measure], dtype=torch.float64)[reported]
                for values in (record["greedy"], rival["values"])
            )
            own = mean_rows([Path(end) for end in ends], metric)[reported]
            row[metric] = dict(zip(("mean", "low", "high"), paired_difference(before, after)))
            exceeds_by = paired_difference(after, own)
            row["own_minus"][metric] = dict(zip(("mean", "low", "high"), exceeds_by))
        figures[rival["name"]] = row
    return figures


def signal(outputs: list[Path], comparison: Comparison, steps: int) -> dict[str, Any]:
    """Return what a step's groups were worth, and the first metric at each evaluation.

    "useful" is the share of a step's groups whose rewards differ, "rollouts" the number of groups
    that were rolled out.
    """
    useful, rolled_out = 0, 0
    for output in outputs:
        lines = (output / "rollouts" / "rank0.jsonl").read_text().splitlines()
        config = json.loads((output / "config.json").read_text())
        G, per_step = config["num_generations"], config["batch_size"]
        rewards = [json.loads(line)["reward"] for line in lines]
        groups = [rewards[start : start + G] for start in range(0, len(rewards), G)]
        rolled_out += len(groups)
        useful += sum(len(set(group)) > 1 for group in groups) / (per_step * steps)
    curve = {}
    for step in range(0, steps + 1, comparison.eval_steps):
        files = [output / "evaluation" / f"step_{step}.json" for output in outputs]
        curve[step] = float(statistic(mean_rows(files, comparison.metrics[0])))
    return dict(useful=useful / len(outputs), rollouts=rolled_out / len(outputs), curve=curve)


def markdown(figures: dict[str, dict]) -> str:
    """Format the figures as tables."""
    lines = []
    for name, arms in figures.items():
        if not arms:
            continue
        metrics = list(arms["before"])
        compared = any("own_minus" in of_arm for of_arm in arms.values())
        head = ["", "rate", *metrics, *["own minus this"] * compared]
        lines += ["", f"**{name}**", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        before = " | ".join(f"{value:.3f}" for value in arms["before"].values())
        lines.append(f"| *before* | | {before} |")
        untrained_rows = arms.get("untrained", {})
        arms = {arm: of_arm for arm, of_arm in arms.items() if arm != "untrained"}
        for arm, of_arm in arms.items():
            if arm != "before":
                cells = [cell(of_arm[m]) if m in of_arm else "" for m in metrics]
                cells += [cell(of_arm["own_minus"])] if "own_minus" in of_arm else []
                lines.append(f"| {arm} | {of_arm['rate']} | {' | '.join(cells)} |")
        for arm, of_arm in arms.items():
            if "useful" in of_arm:
                curve = ", ".join(f"{step}: {v:.3f}" for step, v in of_arm["curve"].items())
                lines.append(
                    f"\n{arm}: {of_arm['useful']:.2f} of a step's groups differ, "
                    f"{of_arm['rollouts']:.0f} groups rolled out; {metrics[0]} by step {curve}"
                )
        lines += markdown_untrained(untrained_rows)
    return "\n".join(lines)


def markdown_untrained(rows: dict[str, dict]) -> list[str]:
    """Return the lines of a table of untrained changes, the largest gain first."""
    if not rows:
        return []
    metrics = list(next(iter(rows.values()))["own_minus"])
    head = [f"{metric} | own minus this" for metric in metrics]
    lines = ["", f"| untrained | chosen | {' | '.join(head)} |"]
    lines.append("|---" * (2 + 2 * len(metrics)) + "|")
    for name, row in sorted(rows.items(), key=lambda item: -item[1][metrics[0]]["mean"]):
        cells = [f"{cell(row[m])} | {cell(row['own_minus'][m])}" for m in metrics]
        lines.append(f"| {name} | {str(row['chosen'])[:60]} | {' | '.join(cells)} |")
    return lines


def cell(change: dict) -> str:
    """Format a change and its interval over regions."""
    return f"{change['mean']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
