"""The curves of a step, by TRL's names: what each rank counts, and what all of them make."""

import math
import time
from collections import Counter

import torch

from rl_train.data.mix import Shares
from rl_train.grpo import group_std
from rl_train.objective import Work
from rl_train.rewards.custom import BadReward
from rl_train.rewards.guards import has_digit, is_whole, repeats

MIN_READ = 0.05  # share of the first step's answers: with fewer, no group has rewards that differ
SHOWN = 300  # characters of an answer, in a sentence


class Unreadable(ValueError):
    """A checkpoint does not answer in the form that a task wants."""


class Tally:
    """One rank's counts of a step. A mean is a total and a count; without count it is no point."""

    def __init__(self):
        self.totals, self.counts, self.maxima = Counter(), Counter(), {}
        self.sums, self.updates = Counter(), 0  # over micro-batches; what they are divided by
        self.pending = []  # (curve, its statistic) of micro-batches that a GPU may still compute
        self.rewards: dict[str, list[float]] = {}  # {task: of every row}
        self.num_tokens, self.damaged = 0, []  # sampled; names of samples that were replaced
        self.unread: dict[str, str] = {}  # {task: the first answer that could not be read}
        self.judge_reasons = Counter()  # {why the judge failed: times}
        self.points: dict[str, float] = {}  # numbers that are equal on all ranks
        self.stop: str | None = None  # the signal that asked this rank to stop

    def mean(self, name: str, total, count):
        self.totals[name] += float(total)
        self.counts[name] += float(count)

    def add_shares(self, shares: Shares | None, index: list[int]):
        """Count of which data sets of a mix, if there is one, the samples are."""
        for name, number in shares.count(index).items() if shares else ():
            self.mean(f"data/share/{name}", number, len(index))

    def add_rollout(self, work: Work):
        """Count what a rollout and its rewards show."""
        rollout, outcome, task, rows = work.rollout, work.outcome, work.task.name, len(work.reward)
        self.num_tokens += int(rollout.valid.sum())
        self.damaged += rollout.batch.damaged
        self.rewards.setdefault(task, []).extend(work.reward.tolist())
        std = group_std(work.reward, rollout.num_generations)
        captions = outcome.replies or rollout.texts  # what describes
        for name, total, count in (
            ("frac_zero_std", (std == 0).sum(), len(std)),
            ("completion_length", rollout.valid.sum(), rows),
            ("truncated_frac", (~rollout.stopped).sum(), rows),
            ("empty_frac", sum(not text for text in rollout.texts), rows),
            ("unscored_frac", work.reward.isnan().sum(), rows),
            ("whole_mask_frac", sum(map(is_whole, outcome.masks)), rows),
        ):
            self.mean(f"{task}/{name}", total, count)
        if not outcome.refused:
            self.mean(f"{task}/repeats_frac", sum(map(repeats, captions)), rows)
            self.mean(f"{task}/digits_frac", sum(map(has_digit, captions)), rows)
        else:  # what has a form has digits, and says its keys again
            unread = torch.stack(list(outcome.refused.values())).any(0)  # (N,)
            self.mean(f"{task}/refused_frac", unread.sum(), rows)
            for reason, mine in outcome.refused.items():
                self.mean(f"{task}/refused/{reason}", mine.sum(), rows)
            if unread.any():
                self.unread.setdefault(task, rollout.texts[unread.int().argmax()])
        if work.task.action:
            for name, (total, count) in work.task.action.curves(rollout, outcome).items():
                self.mean(f"{task}/{name}", total, count)
        for name, values in outcome.rewards.items():
            self.mean(f"{task}/reward/{name}", values.nansum(), (~values.isnan()).sum())

    def add_update(self, task: str, statistics: dict, on_policy: bool):
        """Count a micro-batch's statistics; sampler_.. only under the weights that sampled.

        They are numbers at `settle`.
        """
        self.pending += [
            (f"{task}/{name}", value)
            for name, value in statistics.items()
            if on_policy or not name.startswith("sampler_")
        ]

    def settle(self):
        """Book what `add_update` was given, all fetched at once."""
        pairs = [value if isinstance(value, tuple) else (value, 1) for _, value in self.pending]
        fetched = numbers([number for pair in pairs for number in pair])
        for (curve, value), *pair in zip(self.pending, fetched[::2], fetched[1::2]):
            if isinstance(value, tuple):
                self.mean(curve, *pair)
            elif curve.endswith("/sampler_gap"):
                self.maxima[curve] = max(pair[0], self.maxima.get(curve, 0.0))  # or NaN
            else:
                self.sums[curve] += pair[0]
        self.pending = []

    def not_finite(self) -> list[str]:
        self.settle()
        values = {**self.totals, **self.sums, **self.maxima}
        return [name for name, value in values.items() if not math.isfinite(value)]


def numbers(values: list) -> list[float]:
    """Tensors () and numbers as numbers, for which a GPU is asked once."""
    of_gpu = [v.double() for v in values if isinstance(v, torch.Tensor) and v.device.type != "cpu"]
    fetched = iter(torch.stack(of_gpu).tolist() if of_gpu else ())
    asked = (isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values)
    return [next(fetched) if on_gpu else float(v) for v, on_gpu in zip(values, asked)]


def curves(tallies: list[Tally], weights: dict[str, float]) -> dict[str, float]:
    """{curve: number} of a step, from the tallies of all ranks and the tasks' loss weights."""
    totals, counts, sums, points = Counter(), Counter(), Counter(), dict(tallies[0].points)
    for tally in tallies:
        totals.update(tally.totals)
        counts.update(tally.counts)
        sums.update(tally.sums)
        for name, value in tally.maxima.items():
            points[name] = max(points.get(name, value), value)
    updates = sum(tally.updates for tally in tallies)
    points |= {name: total / updates for name, total in sums.items()}
    points |= {name: totals[name] / counts[name] for name in totals if counts[name]}
    for name in [name for name in points if "/reward/" in name]:
        task, _, component = name.split("/")
        if f"{task}/{component}" in points or component in ("reward_mean", "reward_std"):
            raise BadReward(f"--reward: {component} is a curve of the project, rename the function")
        points[f"{task}/{component}"] = points.pop(name)
    for task in tallies[0].rewards:
        rewards = [value for tally in tallies for value in tally.rewards[task]]
        scored = torch.tensor([value for value in rewards if not math.isnan(value)]).double()
        if len(scored):  # else no reward was obtained, which is not a reward of 0
            std = scored.std().item() if len(scored) > 1 else 0.0
            points |= {f"{task}/reward_mean": scored.mean().item(), f"{task}/reward_std": std}
    if updates:
        learnt = [task for task in weights if f"{task}/loss" in points]  # others had no row in it
        points["total_loss"] = sum(weights[task] * points[f"{task}/loss"] for task in learnt)
    return points


def check_first_answers(tallies: list[Tally], points: dict[str, float]):
    """Raise Unreadable if of a run's first answers fewer than MIN_READ could be read.

    Args:
        tallies: of all ranks; points: their `curves`.
    """
    for tally in tallies:
        for task, text in tally.unread.items():
            share = 1 - points[f"{task}/refused_frac"]
            if share < MIN_READ:
                refused = f"{task}/refused/"
                reasons = {n.removeprefix(refused): points[n] for n in points if refused in n}
                most = max(reasons, key=reasons.get)
                raise Unreadable(
                    f"{task}: {share:.0%} of the first step's answers could be read (others: most "
                    f"often {most}). The checkpoint must answer as the task's flags say, within "
                    f"--max_completion_length. It said: {text[:SHOWN]!r}"
                )


class Clock:
    """Seconds and peak GPU memory of each phase of a step.

    On a GPU a phase ends when all is done that was launched in it. Nobody waits for that before
    `seconds` are asked for: meanwhile the host launches the next phase.
    """

    def __init__(self, device: torch.device):
        self.gpu = device if device.type == "cuda" else None
        self.peaks = {}  # {phase: GiB at most}
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.gpu)
        self.ends = [(None, self.now())]  # (phase, when it ended), from the beginning on

    def now(self):
        """The time; on a GPU an event at which it will be read."""
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, phase: str):
        """Book what has passed since the last call."""
        if self.gpu:
            peak = torch.cuda.max_memory_allocated(self.gpu) / 2**30
            self.peaks[phase] = max(peak, self.peaks.get(phase, 0))
            torch.cuda.reset_peak_memory_stats(self.gpu)
        self.ends.append((phase, self.now()))

    @property
    def seconds(self) -> Counter:
        """{phase: seconds}."""
        seconds = Counter()
        if self.gpu:
            self.ends[-1][1].synchronize()
        for (_, start), (phase, end) in zip(self.ends, self.ends[1:]):
            seconds[phase] += start.elapsed_time(end) / 1e3 if self.gpu else end - start
        return seconds

    def curves(self, num_tokens: float) -> dict[str, float]:
        """{curve: number} of a step that sampled num_tokens on all ranks."""
        seconds = self.seconds
        points = {f"perf/{phase}_seconds": passed for phase, passed in seconds.items()}
        points["perf/step_seconds"] = sum(seconds.values())
        if num_tokens:
            points["perf/rollout_tokens_per_second"] = num_tokens / seconds["rollout"]
        if self.peaks:
            points |= {f"perf/peak_memory_gib/{phase}": p for phase, p in self.peaks.items()}
            points["perf/peak_memory_gib"] = max(self.peaks.values())
        return points
