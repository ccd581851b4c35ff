"""Draw a logged value of a sweep's arms against the step, as a mean over runs with its range.

A point is the mean of SPAN steps; the band goes from the lowest run to the highest.

Letters: K points of a curve.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tools.experiments.sweep_table import complete

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPAN = 20  # steps of a point: single steps have few samples


def logged(output: Path, tag: str) -> np.ndarray:
    """Return (K,) the means of each SPAN steps of a logged value of a run. Raises ValueError."""
    log = EventAccumulator(str(output / "tensorboard"), {"scalars": 0}).Reload()
    if tag not in log.Tags()["scalars"]:
        raise ValueError(f"--plot {tag}: {output} logged no such value")
    values = np.array([event.value for event in log.Scalars(tag)])
    if len(values) < SPAN:
        raise ValueError(f"--plot {tag}: {output} has {len(values)} steps, fewer than {SPAN}")
    whole = len(values) // SPAN * SPAN
    return values[:whole].reshape(-1, SPAN).mean(1)


def draw(folder: Path, tag: str, arms: list[str]) -> "Figure":
    """Return a picture of a value of complete runs in a sweep's folder, a line for each arm.

    Args: arms: those to draw; none: all that have complete runs.

    Raises:
        ValueError: an arm has no complete run, or its runs differ in length or logged no `tag`.
    """
    from matplotlib.figure import Figure  # not a requirement of rl_train

    runs_of = complete(folder)
    for arm in arms:
        if arm not in runs_of:
            raise ValueError(f"--plot: arm {arm} has no complete run in {folder}")
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for arm in arms or runs_of:
        curves = [logged(output, tag) for output in runs_of[arm].values()]
        if len({len(curve) for curve in curves}) > 1:
            raise ValueError(f"--plot {tag}: runs of {arm} differ in length")
        stacked = np.stack(curves)
        steps = SPAN * (np.arange(stacked.shape[1]) + 0.5)
        (line,) = axes.plot(steps, stacked.mean(0), label=f"{arm} (n = {len(curves)})")
        axes.fill_between(
            steps, stacked.min(0), stacked.max(0), color=line.get_color(), alpha=0.15, linewidth=0
        )
    axes.set_xlabel("step")
    axes.set_ylabel(tag)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
