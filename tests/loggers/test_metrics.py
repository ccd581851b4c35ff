"""The curves of a step by hand: shares of rows, means over ranks, what has no point, the clock."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train.loggers.metrics import (
    PhaseTimer,
    StepMetrics,
    main_metrics,
    reduce_metrics,
)
from rl_train.loss import ScoredRollout
from rl_train.rewards.custom import BadReward
from rl_train.rollout import Batch, RewardOutput, Rollout

CONTEXT = SimpleNamespace(judge=None, user_rewards=())
JUDGED = SimpleNamespace(judge="a judge", user_rewards=())
TASK = SimpleNamespace(name="loop1", action=None, context=JUDGED)
WEIGHTS = {"loop1": 1.0}


def mask(filled) -> torch.Tensor:
    """(10, 10) bool with `filled` pixels set."""
    return torch.arange(100).view(10, 10) < filled


def work_of(texts, reward, rewards=None, masks=(), replies=(), task=TASK) -> ScoredRollout:
    """A rollout of rows of 3 tokens in groups of 2; reward decides, rewards are logged."""
    n = len(texts)
    rollout = Rollout(
        batch=Batch([], [], [], [], [], inputs=None),
        features=None,
        prompts=None,
        texts=list(texts),
        num_generations=2,
        ids=None,
        logp=None,
        valid=torch.ones(n, 3, dtype=torch.bool),
        stopped=torch.ones(n, dtype=torch.bool),
        hidden=None,
    )
    reward = torch.as_tensor(reward)
    rewards = {"iou": reward} if rewards is None else rewards
    outcome = RewardOutput(rewards, list(masks) or [mask(1)] * n, replies=list(replies))
    return ScoredRollout(task, rollout, outcome, reward, torch.zeros(n), None)


def curves_of(*tallies, weights=WEIGHTS):
    return reduce_metrics(list(tallies), weights)


def tally_of(*works) -> StepMetrics:
    tally = StepMetrics()
    for work in works:
        tally.add_rollout(work)
    return tally


def test_shares_of_a_rollout():
    """8 rows: 3 repeat themselves, 1 has a digit, 2 masks are the whole image."""
    texts = ["no no no no", "a a a a", "b b b b b", "at 3", "", "a dog", "a cat", "two"]
    masks = [mask(filled) for filled in (100, 91, 90, 50, 0, 0, 1, 2)]
    work = work_of(texts, torch.linspace(0, 1, 8), masks=masks)
    work.rollout.valid[0, 1:] = False
    work.rollout.stopped[5] = False
    points = curves_of(tally_of(work))
    names = ("repeats", "digits", "whole_mask", "empty", "truncated", "unscored")
    found = [points[f"loop1/{name}_frac"] for name in names]
    assert found == [3 / 8, 1 / 8, 2 / 8, 1 / 8, 1 / 8, 0]
    assert points["loop1/completion_length"] == 22 / 8 and points["loop1/frac_zero_std"] == 0
    # in loop 2 it is the teacher who describes
    work = work_of(texts, torch.zeros(8), replies=["no no no no", *["at 3"] * 7])
    points = curves_of(tally_of(work))
    assert points["loop1/digits_frac"] == 7 / 8 and points["loop1/repeats_frac"] == 1 / 8
    assert points["loop1/frac_zero_std"] == 1


def test_rewards_by_hand():
    """Two ranks, two rows without a reward: 0, 1, 1, 2 have mean 1, variance 2/3."""
    nan = torch.nan
    first = tally_of(work_of(["a"] * 2, [0.0, 1.0]), work_of(["a"] * 2, [nan, 1.0]))
    other = {"iou": torch.tensor([0.5, nan]), "likelihood": torch.tensor([0.1, 0.3])}
    second = tally_of(work_of(["a"] * 2, [2.0, nan], other))
    points = curves_of(first, second)
    assert points["loop1/reward_mean"] == pytest.approx(1)
    assert points["loop1/reward_std"] == pytest.approx((2 / 3) ** 0.5)
    assert points["loop1/unscored_frac"] == pytest.approx(2 / 6)
    assert points["loop1/iou"] == pytest.approx((0 + 1 + 1 + 0.5) / 4)
    assert points["loop1/likelihood"] == pytest.approx(0.2)
    assert points["loop1/frac_zero_std"] == pytest.approx(2 / 3)


def test_rows_are_always_scored_without_a_judge_and_user_rewards():
    task = SimpleNamespace(name="loop1", action=None, context=CONTEXT)
    assert "loop1/unscored_frac" not in curves_of(tally_of(work_of(["a"] * 2, [0, 1], task=task)))
    task.context = SimpleNamespace(judge=None, user_rewards=("one",))
    points = curves_of(tally_of(work_of(["a"] * 2, [0, 1], task=task)))
    assert points["loop1/unscored_frac"] == 0


def test_no_reward_at_all_is_no_reward_of_zero():
    """A step in which the judge was down leaves no point on the reward's curve."""
    missing = torch.full((4,), torch.nan)
    points = curves_of(tally_of(work_of(["a"] * 4, missing, {"meteor": missing})))
    assert points["loop1/unscored_frac"] == 1
    assert not {"loop1/reward_mean", "loop1/reward_std", "loop1/meteor"} & set(points)


def test_a_step_that_learnt_nothing_has_no_curves_of_the_update():
    points = curves_of(tally_of(work_of(["a"] * 2, [1.0, 1.0])))
    assert "total_loss" not in points and "loop1/loss" not in points


def test_an_action_adds_its_curves():
    drawn = SimpleNamespace(metrics=lambda rollout, outcome: dict(mask_spread=(0.6, 2)))
    task = SimpleNamespace(name="loop2", action=drawn, context=CONTEXT)
    tally = tally_of(*[work_of(["a"] * 4, [0.0, 1, 2, 3], task=task) for _ in range(2)])
    assert curves_of(tally, weights={"loop2": 1.0})["loop2/mask_spread"] == pytest.approx(0.3)


def update_of(*micro_batches, iterations=1) -> StepMetrics:
    """A rank's counts of an update of loop 1, each micro-batch (loss, KL, its tokens, gap)."""
    tally = StepMetrics()
    for number in range(iterations):
        for loss, kl, tokens, gap in micro_batches:
            statistics = dict(loss=loss, kl_div=(kl, tokens), sampler_gap=gap)
            statistics = {
                name: tuple(map(torch.tensor, value))
                if isinstance(value, tuple)
                else torch.tensor(value)
                for name, value in statistics.items()
            }
            tally.add_update("loop1", statistics, on_policy=number == 0)
        tally.updates += 1
    tally.flush()
    return tally


def test_an_update_by_hand():
    """Losses add up over micro-batches and are averaged over ranks; KL is a mean over tokens."""
    ranks = update_of((1.0, 2.0, 10, 0.1), (3.0, 4.0, 2, 0.3)), update_of((6.0, 0.0, 8, 0.2))
    points = curves_of(*ranks, weights={"loop1": 0.5})
    assert points["loop1/loss"] == pytest.approx((4 + 6) / 2)
    assert points["loop1/kl_div"] == pytest.approx(6 / 20)
    assert points["loop1/sampler_gap"] == pytest.approx(0.3)
    assert points["total_loss"] == pytest.approx(0.5 * 5)


def test_several_updates_are_averaged_and_the_gap_is_of_the_first():
    tally = update_of((1.0, 2.0, 10, 0.1), iterations=1)
    later = {"loss": torch.tensor(5.0), "sampler_gap": torch.tensor(7.0)}
    tally.add_update("loop1", later, on_policy=False)
    tally.flush()
    tally.updates += 1
    points = curves_of(tally)
    assert points["loop1/loss"] == pytest.approx(3)
    assert points["loop1/sampler_gap"] == pytest.approx(0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_named(value):
    fine = (1.0, -2.0, 10, 0.1)
    assert update_of(fine).not_finite() == []
    for place, name in enumerate(("loop1/loss", "loop1/kl_div")):
        broken = [*fine[:place], value, *fine[place + 1 :]]
        assert update_of(fine, broken).not_finite() == [name]


@pytest.mark.parametrize(
    "name", ["loss", "kl_div", "completion_length", "repeats_frac", "reward_mean", "reward_std"]
)
def test_a_reward_of_a_users_that_is_called_as_a_curve(name):
    rewards = {"iou": torch.zeros(2), name: torch.ones(2)}
    tally = update_of((1.0, 2.0, 10, 0.1))
    tally.add_rollout(work_of(["a"] * 2, [0.0, 1.0], rewards))
    with pytest.raises(BadReward, match=f"--reward: {name} ") as raised:
        curves_of(tally)
    assert "\n" not in str(raised.value)


def test_points_that_are_equal_on_all_ranks_are_those_of_the_first():
    tallies = StepMetrics(), StepMetrics()
    for tally in tallies:
        tally.same_on_ranks["learning_rate"] = 0.25
    assert curves_of(*tallies) == {"learning_rate": 0.25}


def test_the_clock_books_seconds_and_peaks_where_they_arise(monkeypatch):
    """A phase of two laps has their seconds together and the higher peak; no GPU has none.

    On a GPU it waits for its last event alone, when it is asked.
    """
    peaks, times = iter([3 * 2**30, 5 * 2**30, 4 * 2**30]), iter([0.0, 1e3, 3e3, 7e3])
    resets, waited = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = next(times)  # milliseconds

        def synchronize(self):
            waited.append(self.time)

        def elapsed_time(self, end):
            return end.time - self.time

    for name, function in dict(
        Event=Event,
        max_memory_allocated=lambda _: next(peaks),
        reset_peak_memory_stats=resets.append,
    ).items():
        monkeypatch.setattr(torch.cuda, name, function)
    clock = PhaseTimer(torch.device("cuda"))
    for phase in ("rollout", "teacher", "rollout"):
        clock(phase)
    assert not waited
    assert clock.seconds == {"rollout": 5.0, "teacher": 2.0}
    assert waited == [7e3] and clock.peaks == {"rollout": 4.0, "teacher": 5.0}
    assert len(resets) == 4  # no phase sees the peak of the one before
    assert clock.metrics(num_tokens=20) == {
        "perf/rollout_seconds": 5.0,
        "perf/teacher_seconds": 2.0,
        "perf/step_seconds": 7.0,
        "perf/rollout_tokens_per_second": 4.0,
        "perf/peak_memory_gib/rollout": 4.0,
        "perf/peak_memory_gib/teacher": 5.0,
        "perf/peak_memory_gib": 5.0,
    }
    monkeypatch.undo()
    clock = PhaseTimer(torch.device("cpu"))
    clock("rollout")
    assert list(clock.seconds) == ["rollout"] and clock.peaks == {}


# Answers that could not be read


def refusing(*reasons, texts=None) -> StepMetrics:
    """Rows unparsed for "no_json", for "outside" or, "", parsed."""
    work = work_of(texts or [f"text {k}" for k in range(len(reasons))], torch.zeros(len(reasons)))
    names = ("no_json", "outside")
    unparsed = {name: torch.tensor([name == reason for reason in reasons]) for name in names}
    return tally_of(replace(work, outcome=replace(work.outcome, unparsed=unparsed)))


def test_reasons_are_counted_on_all_ranks():
    first, second = refusing("no_json", "", "outside", "no_json"), refusing("", "")
    points = curves_of(first, second)
    assert points["loop1/unparsed_frac"] == 3 / 6
    assert points["loop1/unparsed/no_json"] == 2 / 6 and points["loop1/unparsed/outside"] == 1 / 6
    assert "loop1/digits_frac" not in points  # which JSON of coordinates always has
    assert "loop1/unparsed_frac" not in curves_of(tally_of(work_of(["a"] * 2, [0.0, 1.0])))


def test_the_metrics_to_look_at_first_by_hand():
    values = {
        "loop1/reward_mean": 0.25,
        "loop2/reward_mean": 0.5,
        "loop1/kl_div": 0.125,
        "loop1/sampler_gap": 0.001,
        "loop2/sampler_gap": 0.002,
        "loop1/loss": 7.0,
        "perf/step_seconds": 3.0,
    }
    assert main_metrics(values, ["loop1", "loop2"], samples_answers=True) == {
        "Main/reward_loop1": 0.25,
        "Main/reward_loop2": 0.5,
        "Main/kl_loop1": 0.125,
        "Main/sampler_gap": 0.002,
    }
    supervised = {"captions/loss": 2.0, "perf/step_seconds": 1.0}
    assert main_metrics(supervised, ["captions"], samples_answers=False) == {
        "Main/loss_captions": 2.0,
    }
    assert min([*values, *main_metrics(values, ["loop1"], True)]).startswith("Main/")
