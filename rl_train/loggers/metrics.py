"""Metrics of a step, by TRL's names: counts of each rank, and their means over all ranks."""

import math
import time
from collections import Counter
from collections.abc import Iterable

import torch

from rl_train.data.mixture import MixtureSampler
from rl_train.grpo import group_std
from rl_train.loss import ScoredRollout, Statistic
from rl_train.rewards.custom import BadReward
from rl_train.rewards.hacking_signals import has_digit, is_whole, repeats

# TensorBoard orders groups of curves by their characters' codes and opens the first two: a capital
# letter is before all others.
MAIN = "Main"


class StepMetrics:
    """Counts of one step on one rank. A mean is a total and a count; count 0 logs nothing."""

    def __init__(self):
        self.mean_totals, self.mean_counts, self.maxima = Counter(), Counter(), {}
        self.update_sums = Counter()  # over micro-batches
        self.updates = 0  # optimizer steps
        self.pending = []  # (metric, its statistic) of micro-batches that a GPU may still compute
        self.rewards: dict[str, list[float]] = {}  # {task: reward of every row}
        self.num_tokens, self.damaged = 0, []  # sampled; names of samples that were replaced
        self.judge_reasons = Counter()  # {reason why the judge failed: times}
        self.same_on_ranks: dict[str, float] = {}  # metrics that are equal on all ranks
        self.interrupt: str | None = None  # name of the signal that interrupts this rank

    def add_mean(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor):
        """Add to the total and the count of a mean."""
        self.mean_totals[name] += float(total)
        self.mean_counts[name] += float(count)

    def add_mixture(self, mixture: MixtureSampler | None, indices: list[int]):
        """Count from which data sets of a mixture, if there is one, the samples come."""
        for name, num_samples in mixture.count(indices).items() if mixture else ():
            self.add_mean(f"data/fraction/{name}", num_samples, len(indices))

    def add_rollout(self, scored: ScoredRollout, resamples: bool = False):
        """Count a rollout's tokens, unparsed answers, rewards and signs of reward hacking.

        Args:
            resamples: also log the groups that are replaced (--resample_equal_groups), and of the
                others those that have a signal.
        """
        rollout, outcome = scored.rollout, scored.outcome
        task, rows = scored.task.name, len(scored.reward)
        self.num_tokens += int(rollout.valid.sum())
        self.damaged += rollout.batch.damaged
        self.rewards.setdefault(task, []).extend(scored.reward.tolist())
        zero_std = group_std(scored.reward, rollout.num_generations) == 0  # (B,)
        self.add_mean(f"{task}/frac_zero_std", zero_std.sum(), len(zero_std))
        if resamples:
            num_replaced = len(scored.replaced)
            num_kept = len(zero_std) - num_replaced
            self.add_mean(f"{task}/frac_replaced", num_replaced, len(zero_std))
            num_useful = sum(scored.groups_that_differ)
            self.add_mean(f"{task}/frac_useful", num_useful, num_kept)
        row_totals = dict(
            completion_length=rollout.valid.sum(),
            truncated_frac=(~rollout.stopped).sum(),
            empty_frac=sum(not text for text in rollout.texts),
            whole_mask_frac=sum(map(is_whole, outcome.masks)),
        )
        context = scored.task.context
        if context.judge or context.user_rewards:  # others give every row a reward
            row_totals["unscored_frac"] = scored.reward.isnan().sum()
        if outcome.unparsed:
            row_totals["unparsed_frac"] = torch.stack(list(outcome.unparsed.values())).any(0).sum()
            row_totals |= {f"unparsed/{reason}": r.sum() for reason, r in outcome.unparsed.items()}
            row_totals |= {f"repaired/{repair}": r.sum() for repair, r in outcome.repaired.items()}
        else:  # answers of a fixed format always have digits and repeat their keys
            captions = outcome.replies or rollout.texts
            row_totals["repeats_frac"] = sum(map(repeats, captions))
            row_totals["digits_frac"] = sum(map(has_digit, captions))
        for name, total in row_totals.items():
            self.add_mean(f"{task}/{name}", total, rows)
        if scored.task.action:
            for name, (total, count) in scored.task.action.metrics(rollout, outcome).items():
                self.add_mean(f"{task}/{name}", total, count)
        for name, values in outcome.rewards.items():
            self.add_mean(f"{task}/reward/{name}", values.nansum(), (~values.isnan()).sum())

    def add_update(self, task: str, statistics: dict[str, Statistic], on_policy: bool):
        """Count a micro-batch's statistics; those called sampler_.. in the first update only.

        `flush` fetches them from the GPU.
        """
        self.pending += [
            (f"{task}/{name}", value)
            for name, value in statistics.items()
            if on_policy or not name.startswith("sampler_")
        ]

    def flush(self):
        """Add the pending statistics to the sums, with one transfer from the GPU."""
        pairs = [value if isinstance(value, tuple) else (value, 1) for _, value in self.pending]
        fetched = to_floats([number for pair in pairs for number in pair])
        for (name, value), total, count in zip(self.pending, fetched[::2], fetched[1::2]):
            if isinstance(value, tuple):
                self.add_mean(name, total, count)
            elif name.endswith("/sampler_gap"):
                self.maxima[name] = max(total, self.maxima.get(name, 0.0))  # or NaN
            else:
                self.update_sums[name] += total
        self.pending = []

    def not_finite(self) -> list[str]:
        """Return the names of the metrics that are NaN or infinite."""
        self.flush()
        values = {**self.mean_totals, **self.update_sums, **self.maxima}
        return [name for name, value in values.items() if not math.isfinite(value)]


def to_floats(values: list[torch.Tensor | float]) -> list[float]:
    """Convert tensors () and numbers to floats, with one transfer from the GPU."""
    # Reading each tensor would wait for the GPU each time.
    on_gpu = [isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values]
    tensors = [value.double() for value, gpu in zip(values, on_gpu) if gpu]
    fetched = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(fetched) if gpu else float(value) for value, gpu in zip(values, on_gpu)]


def reduce_metrics(ranks: list[StepMetrics], weights: dict[str, float]) -> dict[str, float]:
    """Return {metric: value} of a step, from all ranks' counts and the tasks' loss weights."""
    totals, counts, sums, metrics = Counter(), Counter(), Counter(), dict(ranks[0].same_on_ranks)
    for rank in ranks:
        totals.update(rank.mean_totals)
        counts.update(rank.mean_counts)
        sums.update(rank.update_sums)
        for name, value in rank.maxima.items():
            metrics[name] = max(metrics.get(name, value), value)
    updates = sum(rank.updates for rank in ranks)
    # Micro-batches of a rank add up to its part; a step's loss is the mean over ranks.
    metrics |= {name: total / updates for name, total in sums.items()}
    metrics |= {name: totals[name] / counts[name] for name in totals if counts[name]}
    for task in ranks[0].rewards:
        rewards = torch.tensor([reward for rank in ranks for reward in rank.rewards[task]])
        scored = rewards[~rewards.isnan()].double()
        if len(scored):  # else no reward was obtained, which is not a reward of 0
            metrics[f"{task}/reward_mean"] = scored.mean().item()
            metrics[f"{task}/reward_std"] = scored.std().item() if len(scored) > 1 else 0.0
    # A component is logged as TASK/NAME; apart until now, so that no other metric is overwritten.
    for name in [name for name in metrics if "/reward/" in name]:
        plain = name.replace("/reward/", "/")
        if plain in metrics:
            component = plain.split("/")[-1]
            raise BadReward(f"--reward: {component} is a metric already, rename the function")
        metrics[plain] = metrics.pop(name)
    if updates:
        learnt = [task for task in weights if f"{task}/loss" in metrics]  # others had no rows
        metrics["total_loss"] = sum(weights[task] * metrics[f"{task}/loss"] for task in learnt)
    return metrics


def main_metrics(
    values: dict[str, float], tasks: Iterable[str], samples_answers: bool
) -> dict[str, float]:
    """Return the metrics of a step to look at first, again under MAIN.

    Args:
        values: all metrics of the step.
        samples_answers: False in supervised training, whose tasks have no rewards.
    """
    shown = dict(reward="reward_mean", kl="kl_div") if samples_answers else dict(loss="loss")
    sources = {f"{word}_{task}": f"{task}/{shown[word]}" for word in shown for task in tasks}
    metrics = {f"{MAIN}/{name}": values[tag] for name, tag in sources.items() if tag in values}
    gaps = [values[tag] for task in tasks if (tag := f"{task}/sampler_gap") in values]
    return metrics | ({f"{MAIN}/sampler_gap": max(gaps)} if gaps else {})


class PhaseTimer:
    """Seconds and peak GPU memory of each phase of a step.

    On a GPU the end of a phase is a CUDA event, so that the host launches the next phase without
    waiting; reading `seconds` waits.
    """

    def __init__(self, device: torch.device):
        self.gpu = device if device.type == "cuda" else None
        self.peaks = {}  # {phase: GiB at most}
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.gpu)
        self.ends = [(None, self.now())]  # (phase, time of its end), after the start of the step

    def now(self) -> float | torch.cuda.Event:
        """Return the time in seconds; on a GPU an event, from which the time is read later."""
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, phase: str):
        """Add the time since the last call to a phase."""
        if self.gpu:
            peak = torch.cuda.max_memory_allocated(self.gpu) / 2**30
            self.peaks[phase] = max(peak, self.peaks.get(phase, 0))
            torch.cuda.reset_peak_memory_stats(self.gpu)
        self.ends.append((phase, self.now()))

    @property
    def seconds(self) -> Counter:
        """Return {phase: seconds}."""
        seconds = Counter()
        if self.gpu:
            # The last event: all others are before it.
            self.ends[-1][1].synchronize()
        for (_, start), (phase, end) in zip(self.ends, self.ends[1:]):
            seconds[phase] += start.elapsed_time(end) / 1e3 if self.gpu else end - start
        return seconds

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return {metric: value} of a step that sampled `num_tokens` on all ranks."""
        seconds = self.seconds
        metrics = {f"perf/{phase}_seconds": value for phase, value in seconds.items()}
        metrics["perf/step_seconds"] = sum(seconds.values())
        if num_tokens:
            metrics["perf/rollout_tokens_per_second"] = num_tokens / seconds["rollout"]
        if self.peaks:
            metrics |= {f"perf/peak_memory_gib/{p}": peak for p, peak in self.peaks.items()}
            metrics["perf/peak_memory_gib"] = max(self.peaks.values())
        return metrics
