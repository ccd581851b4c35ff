"""Means, 95 % intervals and paired differences of metrics, from the values of samples."""

import math
from collections.abc import Callable

import numpy as np
import torch

from rl_train.evaluation import (
    cycle_metrics,
    gcg_metrics,
    mask_columns,
    point_metrics,
    referring_metrics,
    region_captions,
)

METRIC_MODULES = (
    cycle_metrics,
    point_metrics,
    referring_metrics,
    mask_columns,
    gcg_metrics,
    region_captions,
)
METRICS = {name: text for module in METRIC_MODULES for name, text in module.METRICS.items()}
METRIC_COLUMNS = {
    name: columns for module in METRIC_MODULES for name, columns in module.METRIC_COLUMNS.items()
}


def metrics_of(values: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return {metric: description} of the metrics that are made of the columns `values`."""
    attributes = [name.removesuffix("_known") for name in values if name.endswith("_known")]
    described = METRICS | {
        f"{attribute}_{name}": text.format(attribute)
        for attribute in attributes
        for name, text in cycle_metrics.ATTRIBUTE_METRICS.items()
    }
    return {
        metric: text for metric, text in described.items() if set(columns_of(metric)) <= set(values)
    }


def columns_of(metric: str) -> tuple[str, ...]:
    """Return the columns of a metric: one, or numerator and denominator of a ratio."""
    attribute, _, name = metric.rpartition("_")
    if name in cycle_metrics.ATTRIBUTE_COLUMNS:
        return tuple(f"{attribute}_{column}" for column in cycle_metrics.ATTRIBUTE_COLUMNS[name])
    return METRIC_COLUMNS.get(metric, (metric,))


def rows_of(values: dict[str, torch.Tensor], metric: str) -> torch.Tensor:
    """Return (n,) values whose mean is the metric, or (n, 2) numerators and denominators."""
    columns = [values[name] for name in columns_of(metric)]
    if metric == "seg_p50":
        return (columns[0] >= 0.5).double()
    return columns[0] if len(columns) == 1 else torch.stack(columns, 1)


def statistic(rows: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
    """Return the mean of (n,) values, or the ratio of the sums of (n, 2): NaN if both are 0."""
    if rows.ndim == 1:
        return rows.mean()
    return rows[:, 0].sum() / rows[:, 1].sum()


def means(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return {metric: its value over all samples}. A ratio of 0 to 0 is left out."""
    metrics = {metric: float(statistic(rows_of(values, metric))) for metric in metrics_of(values)}
    return {metric: value for metric, value in metrics.items() if not math.isnan(value)}


def bootstrap(
    values: torch.Tensor,
    num_resamples: int = 2000,
    seed: int = 0,
    statistic: Callable[[np.ndarray], np.ndarray] = statistic,
) -> tuple[float, float]:
    """Return (low, high), the 95 % bootstrap percentiles of `statistic` over the n rows.

    Rows count as independent: if many share an image, the interval is too narrow. Resamples with a
    ratio of 0 to 0 are left out.
    """
    rng, rows = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    if len(rows) == 1:  # each resample is the row itself
        num_resamples = 1
    with np.errstate(invalid="ignore"):  # a ratio of 0 to 0 is NaN
        resampled = [
            # Rows, not numbers: numerator and denominator of a ratio stay together.
            statistic(rows[rng.integers(len(rows), size=len(rows))])
            for _ in range(num_resamples)
        ]
    low, high = np.nanpercentile(resampled, (2.5, 97.5))
    return float(low), float(high)


def paired_difference(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float, float]:
    """Return (after - before, low, high) of a metric's `rows_of`, with the paired 95 % interval."""
    interval = bootstrap(
        # Pairs (before, after) of a sample are drawn together, which narrows the interval.
        torch.stack([before, after], dim=-1),
        statistic=lambda pairs: statistic(pairs[..., 1]) - statistic(pairs[..., 0]),
    )
    return float(statistic(after)) - float(statistic(before)), *interval
