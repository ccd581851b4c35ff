"""From measures of samples to metrics, intervals and paired differences."""

import math

import numpy as np
import torch

from rl_train.tasks.cycle_measures import WITHOUT_INTERVAL, metrics_of, parts_of


def rows_of(values: dict[str, torch.Tensor], metric: str) -> torch.Tensor:
    """What a metric is made of: (n,) values of which the mean, or (n, 2) parts of a ratio."""
    parts = [values[name] for name in parts_of(metric)]
    if metric == "seg_p50":
        return (parts[0] >= 0.5).double()
    return parts[0] if len(parts) == 1 else torch.stack(parts, 1)


def statistic(rows) -> float:
    """The mean of (n,) values; of (n, 2) parts the ratio of their sums, NaN of nothing."""
    if rows.ndim == 1:
        return float(rows.mean())
    total = float(rows[:, 1].sum())
    return float(rows[:, 0].sum()) / total if total else math.nan


def means(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """{metric: its value over all samples}, of the metrics whose measures are there.

    A share of nothing, as of captions that state a colour where none does, is left out.
    """
    found = {metric: statistic(rows_of(values, metric)) for metric in metrics_of(values)}
    return {metric: value for metric, value in found.items() if not math.isnan(value)}


def bootstrap(
    values: torch.Tensor, num_resamples: int = 2000, seed: int = 0, statistic=statistic
) -> tuple[float, float]:
    """(low, high): 95 % bootstrap percentiles of `statistic` over the n rows of `values`.

    Rows count as independent; where many share an image, the interval is too narrow. Of a ratio,
    resamples without anything to divide by do not count.
    """
    rng, values = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    n = len(values)
    drawn = [statistic(values[rng.integers(n, size=n)]) for _ in range(num_resamples)]
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def paired_difference(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float, float]:
    """(after - before, low, high) of a metric's `rows_of`, paired, with the 95 % interval."""

    def difference(pairs):
        return statistic(pairs[..., 1]) - statistic(pairs[..., 0])

    pairs = torch.stack([before, after], dim=-1)
    return (difference(pairs), *bootstrap(pairs, statistic=difference))


def before_after_table(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> str:
    """Metrics before and after, and the paired difference with its 95 % interval, as text."""
    title, ends = f"held out, n = {len(after['cycle_iou'])}", means(after)
    lines = [f"{title:20s} {'before':>8s} {'after':>8s} {'change':>8s}   95 % interval"]
    for metric, start in means(before).items():
        if metric in ends:
            end = ends[metric]
            lines.append(f"{metric:20s} {start:8.4f} {end:8.4f} {end - start:+8.4f}")
            if metric not in WITHOUT_INTERVAL:
                rows = rows_of(before, metric), rows_of(after, metric)
                _, low, high = paired_difference(*rows)
                lines[-1] += f"   [{low:+.4f}, {high:+.4f}]"
    return "\n".join(lines)
