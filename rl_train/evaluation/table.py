"""Metrics as text: the main figures in a line, and the table of before and after."""

import torch

from rl_train.evaluation import cycle_metrics, referring_metrics
from rl_train.evaluation.bootstrap import means, metrics_of, paired_difference, rows_of
from rl_train.evaluation.gcg_metrics import METRICS as GCG_METRICS
from rl_train.evaluation.mask_columns import METRICS as MASK_METRICS

# Metrics that an evaluation's line names, of those that it has.
MAIN_METRICS = (
    "cycle_iou",
    "caption_meteor",
    "seg_iou",
    "cycle_meteor",
    "gain_negative",
    "matched_box_iou",
    "parsable",
)
LOOP1_TITLE = "captions of regions, and loop 1 (region -> caption -> mask)"
LOOP2_TITLE = "masks of true captions, and loop 2 (caption -> mask -> caption)"
GCG_TITLE = "grounded captions: a mask for each phrase"
POINTS_TITLE = "masks that SAM2 draws from answered boxes and points"


def main_figures(metrics: dict[str, float]) -> str:
    """Return the main metrics and their values, in words."""
    return ", ".join(f"{name} {metrics[name]:.4f}" for name in MAIN_METRICS if name in metrics)


def before_after_table(
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    samples: str = "evaluation split",
    role: str = "",
) -> str:
    """Format metrics before and after, and the paired differences with their 95 % intervals.

    Rows are explained and stand in groups. Metrics that have one value on every sample before and
    after are named below the table.

    Args:
        samples: what was measured on, for the first line.
        role: whose metrics those after are, for the same line.
    """
    means_before, means_after = means(before), means(after)
    descriptions = metrics_of(after)
    shown, constant, repeated = [], [], []
    for metric in [metric for metric in means_before if metric in means_after]:
        value = constant_value(rows_of(before, metric), rows_of(after, metric))
        if metric.endswith("_precision") and is_accuracy(metric, before, after):
            repeated.append(metric)
        elif value is None:
            shown.append(metric)
        else:
            constant.append(f"{metric} {value:g}")
    width = max(map(len, shown), default=0) + 2
    num_samples = len(next(iter(after.values())))
    header = f"{'':{width}s} {'before':>8s} {'after':>8s} {'change':>8s}   95 % interval"
    of_role = f", {role}" if role else ""
    lines = [f"{samples}, n = {num_samples}: before and after{of_role}", header]
    for title, metrics in grouped(shown, "parsable" in after).items():
        lines.append(title)
        for metric in metrics:
            start, end, interval = means_before[metric], means_after[metric], ""
            if metric not in cycle_metrics.WITHOUT_INTERVAL:
                _, low, high = paired_difference(rows_of(before, metric), rows_of(after, metric))
                interval = f"[{low:+.4f}, {high:+.4f}]"
            numbers = f"{start:8.4f} {end:8.4f} {end - start:+8.4f}   {interval:18s}"
            lines.append(f"  {metric:{width - 2}s} {numbers}   {descriptions[metric]}")
    if constant:
        lines.append(f"left out, the same on every sample before and after: {', '.join(constant)}")
    if repeated:
        lines.append(f"not repeated, equal to the accuracy: {', '.join(repeated)}")
    return "\n".join(lines)


def constant_value(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return the value that a metric has on every sample before and after; None if there is none.

    Of a single sample nothing is constant.

    Args:
        before, after: (n,) or (n, 2), see `rows_of`.
    """
    rows = torch.cat([before, after])
    numerators, denominators = (rows, torch.ones_like(rows)) if rows.ndim == 1 else rows.unbind(1)
    # The only value that all samples can have: that of their sums.
    value = (numerators.sum() / denominators.sum()).item()
    is_constant = torch.equal(numerators, value * denominators)
    return value if is_constant and len(before) > 1 else None


def is_accuracy(
    precision: str, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> bool:
    """Return whether an attribute's precision is its accuracy: each caption states some value."""
    accuracy = precision.replace("_precision", "_accuracy")
    return all(
        torch.equal(rows_of(values, precision), rows_of(values, accuracy))
        for values in (before, after)
    )


def grouped(metrics: list[str], of_points: bool) -> dict[str, list[str]]:
    """Return {title: the metrics under it}, in the order of `metrics` within a title."""
    groups = {LOOP1_TITLE: [], LOOP2_TITLE: [], GCG_TITLE: [], POINTS_TITLE: []}
    for metric in metrics:
        title = LOOP1_TITLE
        if of_points:
            title = POINTS_TITLE
        elif metric in cycle_metrics.LOOP2_METRICS | referring_metrics.METRICS | MASK_METRICS:
            title = LOOP2_TITLE
        elif metric in GCG_METRICS:
            title = GCG_TITLE
        groups[title].append(metric)
    return {title: members for title, members in groups.items() if members}
