"""Break evaluations down by concept: metrics with counts, and the informedness of each value.

    python -m tools.evaluate --model_path M --data_dir E --distractors --output before.json
    python -m tools.evaluate --model_path O/checkpoint_step_N --data_dir E --distractors \
        --output after.json
    python -m tools.experiments.breakdown --evaluation after.json --before before.json \
        --data_dir E --attributes A.json

A concept is the category that the data of --data_dir state of a region. --evaluation may also be a
run's evaluation/step_N.json. Informedness is TPR + TNR - 1: how often a value is said where it is
true, minus how often where it is not. It is 0 of a word that is always said, or said by chance;
precision rewards such a word. Values are those of --attributes and the concepts themselves.
Intervals (95 %) are paired over regions; of a concept with few of them they are wide.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from rl_train.config.flags import COUNT
from rl_train.data import EVAL_DATASETS
from rl_train.data.registry import opener_of
from rl_train.evaluation.bootstrap import bootstrap, means, paired_difference, rows_of
from rl_train.rewards.attributes import AttributePhrases, load_attributes, parse_attributes
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable

METRICS = ("cycle_iou", "cycle_on_target", "seg_iou", "seg_on_target", "caption_meteor")
CONCEPT = "concept"


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.breakdown", description=__doc__)
    add = parser.add_argument
    measured = "JSON file: --output of tools.evaluate, or step_N.json of a run"
    add("--evaluation", type=Path, required=True, help=measured)
    add("--before", type=Path, help="the same of an earlier model, on the same regions")
    add("--data_dir", help="folder of these regions, by which they have concepts")
    add("--dataset", choices=list(EVAL_DATASETS), default="gar", help="its format")
    add("--attributes", type=Path, help="JSON file {attribute: {value: [phrases]}}")
    add("--metrics", nargs="+", default=list(METRICS), help="those that were not measured are left")
    add("--min_count", type=COUNT, default=1, help="regions of a concept or value to be shown")
    add("--output", type=Path, help="JSON file of all figures")
    return parser


def read_evaluation(flag: str, file: Path) -> dict:
    """Read an evaluation. Raises ValueError, naming the flag, if the file holds none."""
    try:
        record = json.loads(file.read_text())
        columns = {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in record["values"].items()
        }
        texts = {name: record[name] for name in ("image_ids", "references", "captions")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{flag} {file}: is no evaluation of tools.evaluate or of a run: {error!r}"
        ) from error
    return dict(values=columns, **texts)


def concepts_of(dataset_name: str, data_dir: str, image_ids: list[str]) -> list[str]:
    """Return the category of each region. Raises ValueError if a region is not in the data."""
    dataset = opener_of(dataset_name, [], None, is_eval=True)(data_dir)
    position = {dataset.image_id(i): i for i in range(len(dataset))}
    missing = [name for name in image_ids if name not in position]
    if missing:
        raise ValueError(
            f"--data_dir {data_dir}: has no region {missing[0]}, which --evaluation measured"
        )
    return [dataset[position[name]]["category"] for name in image_ids]


def by_group(groups: list[str], after: dict, before: dict | None, metrics: list[str]) -> list[dict]:
    """Return a row for each group of regions: its count and its metrics, the largest first."""
    rows = []
    for group in sorted(set(groups), key=lambda name: (-groups.count(name), name)):
        index = torch.tensor([i for i, name in enumerate(groups) if name == group])
        values, earlier = (
            each and {name: column[index] for name, column in each["values"].items()}
            for each in (after, before)
        )
        known = means(values)
        row = dict(name=group, count=len(index), metrics={})
        for metric in metrics:
            if metric not in known:
                continue
            row["metrics"][metric] = figures = dict(after=known[metric])
            if earlier and metric in means(earlier):
                change, low, high = paired_difference(
                    rows_of(earlier, metric), rows_of(values, metric)
                )
                figures |= dict(before=known[metric] - change, change=change, interval=[low, high])
        rows.append(row)
    return rows


def informedness(counts: np.ndarray) -> float:
    """Return TPR + TNR - 1 of rows (n, 4): true and said, true, false and said, false.

    NaN if the value is true of all regions, or of none.
    """
    stated, true, stated_falsely, false = counts.sum(0)
    return stated / true - stated_falsely / false if true and false else float("nan")


def value_counts(
    references: list[str], captions: list[str], attribute: str, value: str, phrases: dict
) -> np.ndarray:
    """Return (n, 4) rows of `informedness` of one value, of the regions whose attribute is known.

    Args:
        phrases: {text: {attribute: values}} of `parse_attributes` of all texts.
    """
    rows = []
    for reference, caption in zip(references, captions, strict=True):
        true_values = phrases[reference][attribute]
        if len(true_values) != 1:
            continue
        true, stated = value in true_values, value in phrases[caption][attribute]
        rows.append([true and stated, true, not true and stated, not true])
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def by_value(after: dict, before: dict | None, vocabulary: AttributePhrases) -> list[dict]:
    """Return a row for each value of a vocabulary: counts, TPR, TNR and informedness.

    The change from `before` has an interval over regions, paired.
    """
    texts = {*after["references"], *after["captions"], *(before["captions"] if before else ())}
    phrases = {text: parse_attributes(text, vocabulary) for text in texts}
    rows = []
    for attribute, values in vocabulary.items():
        for value in values:
            counts, earlier = (
                each
                and value_counts(after["references"], each["captions"], attribute, value, phrases)
                for each in (after, before)
            )
            stated, true, stated_falsely, false = counts.sum(0).tolist() if len(counts) else [0] * 4
            row = dict(attribute=attribute, value=value, true=int(true))
            row["said"] = int(stated + stated_falsely)
            if true and false:
                row |= dict(tpr=stated / true, tnr=1 - stated_falsely / false)
                row["informedness"] = informedness(counts)
                row["interval"] = list(bootstrap(counts, statistic=informedness))
            if earlier is not None and true and false:
                row["before"] = informedness(earlier)
                row["change"] = row["informedness"] - row["before"]
                row["change_interval"] = list(
                    bootstrap(
                        np.concatenate([earlier, counts], 1),
                        statistic=lambda pair: (
                            informedness(pair[:, 4:]) - informedness(pair[:, :4])
                        ),
                    )
                )
            rows.append(row)
    return rows


def group_table(title: str, rows: list[dict], min_count: int) -> str:
    """Format rows of `by_group` as markdown; those below min_count are counted."""
    shown = [row for row in rows if row["count"] >= min_count]
    metrics = list(rows[0]["metrics"])
    lines = [f"## {title}", "", f"| concept | regions | {' | '.join(metrics)} |"]
    lines.append("|---" * (2 + len(metrics)) + "|")
    for row in shown:
        cells = [change_cell(row["metrics"][metric]) for metric in metrics]
        lines.append(f"| {row['name']} | {row['count']} | {' | '.join(cells)} |")
    if number := len(rows) - len(shown):
        lines += ["", f"left out: {number} concepts of fewer than {min_count} regions"]
    return "\n".join(lines)


def change_cell(figures: dict) -> str:
    """Format a metric: its value, and its change with the interval."""
    if "change" not in figures:
        return f"{figures['after']:.3f}"
    low, high = figures["interval"]
    return f"{figures['after']:.3f} ({figures['change']:+.3f} [{low:+.3f}, {high:+.3f}])"


def value_table(rows: list[dict], min_count: int) -> str:
    """Format rows of `by_value` as markdown."""
    shown = [row for row in rows if row["true"] >= min_count and "informedness" in row]
    lines = ["## Informedness of each value (TPR + TNR - 1)", ""]
    lines += ["| attribute | value | true | said | TPR | TNR | informedness | change |"]
    lines.append("|---" * 8 + "|")
    for row in shown:
        low, high = row["interval"]
        change = ""
        if "change" in row:
            change = "{:+.3f} [{:+.3f}, {:+.3f}]".format(row["change"], *row["change_interval"])
        lines.append(
            f"| {row['attribute']} | {row['value']} | {row['true']} | {row['said']} "
            f"| {row['tpr']:.2f} | {row['tnr']:.2f} "
            f"| {row['informedness']:.3f} [{low:.3f}, {high:.3f}] | {change} |"
        )
    for attribute in dict.fromkeys(row["attribute"] for row in shown):
        of_attribute = [row for row in shown if row["attribute"] == attribute]
        mean = np.mean([row["informedness"] for row in of_attribute])
        change = ""
        if "change" in of_attribute[0]:
            change = f"{np.mean([row['change'] for row in of_attribute]):+.3f}"
        lines.append(f"| {attribute} | *mean of values* | | | | | {mean:.3f} | {change} |")
    number = len(rows) - len(shown)
    if number:
        lines += [
            "",
            f"left out: {number} values, true of all regions or of fewer than {min_count}",
        ]
    return "\n".join(lines)


def run(args: argparse.Namespace):
    """Read, break down, print and write; ValueError for what is wrong in the flags and files."""
    if args.output:
        check_writable("--output", args.output, is_file=True)
    if not args.data_dir and not args.attributes:
        raise ValueError("--data_dir: give it, or --attributes, to break the evaluation down by")
    after = read_evaluation("--evaluation", args.evaluation)
    before = read_evaluation("--before", args.before) if args.before else None
    regions = [each and (each["image_ids"], each["references"]) for each in (after, before)]
    if before and regions[0] != regions[1]:
        raise ValueError(f"--before {args.before}: was measured on other regions")
    vocabulary = load_attributes(args.attributes) if args.attributes else {}
    record, parts = {}, []
    if args.data_dir:
        concepts = concepts_of(args.dataset, args.data_dir, after["image_ids"])
        rows = record["concepts"] = by_group(concepts, after, before, args.metrics)
        parts.append(group_table("Metrics by concept", rows, args.min_count))
    rows = record["values"] = by_value(after, before, vocabulary)
    if args.data_dir:
        known = {row["value"] for row in rows}  # a word that is told apart already
        words = {concept: [concept] for concept in sorted({*concepts} - {"", *known})}
        rows += by_value(after, before, {CONCEPT: words})
    parts.append(value_table(rows, args.min_count))
    print("\n\n".join(parts))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def main(argv: list[str] | None = None):
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except ValueError as error:  # the user's input: one sentence, no traceback
        raise SystemExit(f"breakdown: {error}") from error


if __name__ == "__main__":
    run_program(main)
