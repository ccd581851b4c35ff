"""From measures of samples to metrics, intervals and paired differences."""

import math

import numpy as np
import torch

from rl_train.tasks import cycle_measures, point_measures, refer_measures
from rl_train.tasks.cycle_measures import WITHOUT_INTERVAL

RESAMPLED = 2**20  # rows that a bootstrap holds at once


def metrics_of(values: dict) -> dict[str, str]:
    """{metric: its description} of all that the measures among `values` make."""
    others = point_measures.METRICS | refer_measures.METRICS
    found = {m: text for m, text in others.items() if set(parts_of(m)) <= set(values)}
    return cycle_measures.metrics_of(values) | found


def parts_of(metric: str) -> tuple[str, ...]:
    """The names of the measures behind a metric."""
    others = point_measures.PARTS | refer_measures.PARTS
    return others.get(metric) or cycle_measures.parts_of(metric)


def rows_of(values: dict[str, torch.Tensor], metric: str) -> torch.Tensor:
    """What a metric is made of: (n,) values of which the mean, or (n, 2) parts of a ratio."""
    parts = [values[name] for name in parts_of(metric)]
    if metric == "seg_p50":
        return (parts[0] >= 0.5).double()
    return parts[0] if len(parts) == 1 else torch.stack(parts, 1)


def statistic(rows, samples: int = 0):
    """The mean of (n,) values; of (n, 2) parts the ratio of their sums, NaN of nothing.

    Of each of many resamples, if `samples`, the axis of the n, is 1.
    """
    if rows.ndim == samples + 1:
        return rows.mean(samples)
    return rows[..., 0].sum(samples) / rows[..., 1].sum(samples)


def means(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """{metric: its value over all samples}, of the metrics whose measures are there.

    A share of nothing, as of captions that state a colour where none does, is left out.
    """
    found = {metric: float(statistic(rows_of(values, metric))) for metric in metrics_of(values)}
    return {metric: value for metric, value in found.items() if not math.isnan(value)}


def bootstrap(
    values: torch.Tensor, num_resamples: int = 2000, seed: int = 0, statistic=statistic
) -> tuple[float, float]:
    """(low, high): 95 % bootstrap percentiles of `statistic` over the n rows of `values`.

    Rows count as independent; where many share an image, the interval is too narrow. Of a ratio,
    resamples without anything to divide by do not count.
    """
    rng, values = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    n, drawn = len(values), []
    at_once = 1 + RESAMPLED // n
    for start in range(0, num_resamples, at_once):
        rows = rng.integers(n, size=(min(at_once, num_resamples - start), n))
        with np.errstate(invalid="ignore"):  # a share of nothing is NaN
            drawn.extend(statistic(values[rows], samples=1))
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def paired_difference(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float, float]:
    """(after - before, low, high) of a metric's `rows_of`, paired, with the 95 % interval."""

    def difference(pairs, samples=0):
        return statistic(pairs[..., 1], samples) - statistic(pairs[..., 0], samples)

    pairs = torch.stack([before, after], dim=-1)
    change = float(statistic(after)) - float(statistic(before))
    return (change, *bootstrap(pairs, statistic=difference))


def before_after_table(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> str:
    """Metrics before and after, and the paired difference with its 95 % interval, as text."""
    title, ends = f"held out, n = {len(next(iter(after.values())))}", means(after)
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
