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
        """Count a micro-batch's statistics; sampler_.. only under the weights that sampled."""
        for name, value in statistics.items():
            if name.startswith("sampler_") and not on_policy:
                continue
            curve = f"{task}/{name}"
            if isinstance(value, tuple):
                self.mean(curve, *value)
            elif name == "sampler_gap":
                self.maxima[curve] = max(value.item(), self.maxima.get(curve, 0.0))  # or NaN
            else:
                self.sums[curve] += value.item()

    def not_finite(self) -> list[str]:
        values = {**self.totals, **self.sums, **self.maxima}
        return [name for name, value in values.items() if not math.isfinite(value)]


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
    """Seconds and peak GPU memory of each phase of a step, for whose end it waits."""

    def __init__(self, device: torch.device):
        self.gpu = device if device.type == "cuda" else None
        self.seconds, self.peaks = Counter(), {}  # {phase: seconds}, {phase: GiB at most}
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.gpu)
        self.last = time.perf_counter()

    def __call__(self, phase: str):
        """Book what has passed since the last call."""
        if self.gpu:
            torch.cuda.synchronize(self.gpu)
            peak = torch.cuda.max_memory_allocated(self.gpu) / 2**30
            self.peaks[phase] = max(peak, self.peaks.get(phase, 0))
            torch.cuda.reset_peak_memory_stats(self.gpu)
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    def curves(self, num_tokens: float) -> dict[str, float]:
        """{curve: number} of a step that sampled num_tokens on all ranks."""
        points = {f"perf/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        points["perf/step_seconds"] = sum(self.seconds.values())
        if num_tokens:
            points["perf/rollout_tokens_per_second"] = num_tokens / self.seconds["rollout"]
        if self.peaks:
            points |= {f"perf/peak_memory_gib/{phase}": p for phase, p in self.peaks.items()}
            points["perf/peak_memory_gib"] = max(self.peaks.values())
        return points
