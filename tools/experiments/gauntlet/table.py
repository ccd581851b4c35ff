"""The gauntlet's table: gains of cheap causes, and as fractions of what the true reward gains.

Letters: K checkpoints, n held-out regions.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_train.distributed.process_group import print0
from rl_train.evaluation.bootstrap import bootstrap, paired_difference
from rl_train.utils.io import check_writable
from tools.experiments.sweep_table import interval

Measures = dict[str, list[float]]  # {measure: its value at each of n held-out regions}
BASELINES = {"greedy": "greedy answer", "samples": "mean of samples"}
TOO_MUCH = 0.5  # fraction of the true reward's gain above which a cheap cause is marked
MARK = "**"
FILES = ("table.md", "table.json")


@dataclass(frozen=True)
class Rival:
    """A cheap cause on held-out regions."""

    name: str
    chosen: Any  # JSON, what was chosen on training regions
    baseline: str  # of BASELINES, from which its gain is counted
    values: Measures
    cheap: bool = True  # False of a true reward or a ceiling, which are shown and never marked


@dataclass(frozen=True)
class LoopResult:
    """Scores of a checkpoint's answers, and of the cheap causes on them, on held-out regions."""

    greedy: Measures
    samples: Measures  # mean of G samples
    best: Measures  # best of G samples by the true reward
    rivals: list[Rival]

    def baseline(self, name: str) -> Measures:
        return dict(greedy=self.greedy, samples=self.samples)[name]


def summarise(results: list[LoopResult]) -> list[dict]:
    """Return a row for each cheap cause, and first for the best of G by the true reward.

    Intervals are over regions, of the mean over the K checkpoints; `checkpoints` holds that over
    checkpoints.
    """
    rows = [
        _row("best of G by the true reward", baseline, [r.best for r in results], results)
        for baseline in BASELINES
    ]
    for rivals in zip(*(result.rivals for result in results), strict=True):
        first = rivals[0]
        values = [rival.values for rival in rivals]
        row = _row(first.name, first.baseline, values, results, first.cheap)
        rows.append(row | dict(chosen=[rival.chosen for rival in rivals]))
    return rows


def _row(
    name: str,
    baseline: str,
    values: list[Measures],
    results: list[LoopResult],
    cheap: bool = False,
) -> dict:
    """Return gains of K checkpoints' values over a baseline, with intervals and fractions."""
    row = dict(name=name, baseline=baseline, measures={})
    for measure in values[0]:
        before, after, best = (
            torch.tensor([of[measure] for of in sources], dtype=torch.float64)  # (K, n)
            for sources in (
                [result.baseline(baseline) for result in results],
                values,
                [result.best for result in results],
            )
        )
        gain, low, high = paired_difference(before.mean(0), after.mean(0))
        gains = (after - before).mean(1).tolist()  # K
        row["measures"][measure] = dict(
            before=before.mean().item(),
            after=after.mean().item(),
            gain=gain,
            interval=[low, high],
            checkpoints=interval(gains),
            **_fraction((after - before).mean(0), (best - before).mean(0)),
        )
    # The first measure is the one that fractions are of.
    main = next(iter(row["measures"].values()))
    if main["fraction"] is None:  # any gain is more than the true reward's
        row["too_much"] = cheap and main["interval"][0] > 0
    else:
        row["too_much"] = cheap and main["fraction"] > TOO_MUCH
    return row


def _fraction(gains: torch.Tensor, best_gains: torch.Tensor) -> dict:
    """Return the ratio of mean gains (n,) with its interval over regions.

    None where the interval of the true reward's own gain is not above 0.
    """
    if bootstrap(best_gains)[0] <= 0:
        return dict(fraction=None, fraction_interval=None)
    pairs = torch.stack([gains, best_gains], 1)  # a ratio of sums
    fraction = (gains.sum() / best_gains.sum()).item()
    return dict(fraction=fraction, fraction_interval=list(bootstrap(pairs)))


def markdown(title: str, rows: list[dict], measures: dict[str, str], num_checkpoints: int) -> str:
    """Format rows of `summarise` as a table; a row above TOO_MUCH is marked.

    Args:
        measures: {measure: its name in the head}, first the one that fractions are of.
    """
    several = num_checkpoints > 1
    first = next(iter(measures))
    head = ["cheap cause", "against", f"{measures[first]} before", "after"]
    head += [f"{text}: gain [regions]" for text in measures.values()]
    head += ["± checkpoints"] * several + ["of the true reward's gain"]
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        values, mark = row["measures"], MARK if row["too_much"] else ""
        main = values[first]
        cells = [f"{mark}{row['name']}{mark}", BASELINES[row["baseline"]]]
        cells += [f"{main['before']:.3f}", f"{main['after']:.3f}"]
        for measure in measures:
            low, high = values[measure]["interval"]
            cells.append(f"{values[measure]['gain']:+.3f} [{low:+.3f}, {high:+.3f}]")
        if several:
            cells.append(f"± {main['checkpoints']['half']:.3f}")
        cells.append(fraction_cell(main, mark))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fraction_cell(values: dict, mark: str) -> str:
    """Format the fraction of the true reward's gain with its interval."""
    if values["fraction"] is None:
        return f"{mark}the true reward gains nothing{mark}"
    low, high = values["fraction_interval"]
    return f"{mark}{values['fraction']:.2f}{mark} [{low:.2f}, {high:.2f}]"


def verdict(title: str, rows: list[dict]) -> str:
    """Return one sentence that names the rows above TOO_MUCH, or says that there is none."""
    names = [row["name"] for row in rows if row["too_much"]]
    if not names:
        return f"{title}: no cheap cause takes more than half of the true reward's gain."
    return f"{title}: more than half of the true reward's gain is taken by {'; '.join(names)}."


def check_new(folder: Path):
    """Raise ValueError if --output_dir holds a table already, or cannot be written."""
    check_writable("--output_dir", folder)
    if any((folder / name).exists() for name in FILES):
        raise ValueError(f"--output_dir {folder}: holds a table, name another folder")


def write(text: str, record: dict, args: argparse.Namespace):
    """Print the table, and write it and {flags, ..record} into --output_dir."""
    print0(text)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    flags = {name: value for name, value in vars(args).items() if name != "output_dir"}
    contents = json.dumps(dict(flags=flags) | record, indent=1, default=str)
    for name, file in zip(FILES, (text, contents + "\n")):
        (args.output_dir / name).write_text(file)
