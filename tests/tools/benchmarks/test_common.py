"""The end of a benchmark's warm-up, and the counts behind it."""

import gc

import pytest

from tools.benchmarks import __main__, common, scale, workload
from tools.benchmarks.common import (
    Timed,
    drifts,
    ratios,
    stable,
    timings_in_turns,
    warm_up,
)

OPTIONS = Timed(device="cpu", rounds=3, warmup=6, stable=0.1)


@pytest.fixture
def works(monkeypatch):
    """{work: seconds} of each call, by a clock of its own, to be filled by the test."""
    now, seconds = [0.0], {}
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])

    def work_of(name):
        def work():
            now[0] += seconds[name].pop(0)

        return work

    return lambda **given: seconds.update(given) or {name: work_of(name) for name in given}


@pytest.mark.parametrize(
    "times, settled",
    [
        ([9, 1, 1.05, 1.0999], True),  # the last three, within 10 % of the least
        ([9, 1, 1.05, 1.2], False),
        ([1, 1], False),
        ([], False),
    ],
)
def test_stable(times, settled):
    assert stable([dict(a=t, b=2.0) for t in times], 0.1) == settled


def test_rounds_of_the_warm_up_do_not_count(works):
    timing = timings_in_turns(works(a=[9, 4, 4, 4.1, 7, 1, 3]), OPTIONS)["a"]
    assert vars(timing) == dict(warmup_rounds=4, settled=True, seconds=3, of_rounds=[7, 1, 3])


def test_all_works_settle_before_any_counts(works):
    both = works(a=[0.4] * 8, b=[0.4, 0.9, 0.4, 0.4, 0.41, 0.3, 0.2, 0.1])
    timings = timings_in_turns(both, OPTIONS)
    assert timings["b"].warmup_rounds == timings["a"].warmup_rounds == 5
    assert (timings["a"].seconds, timings["b"].seconds) == pytest.approx((0.4, 0.2))


def test_slow_rounds_are_not_warmed_up_for_long(works):
    """Three rounds at least, and no more than reach WARMUP_SECONDS."""
    timing = timings_in_turns(works(a=[20, 19, 12, 1, 2, 3]), OPTIONS)["a"]
    assert (timing.warmup_rounds, timing.settled, timing.seconds) == (3, False, 2)


def test_what_never_settles_says_so(works):
    timing = timings_in_turns(works(a=[1, 2, 1, 2, 1, 2, 5, 6, 7]), OPTIONS)["a"]
    assert (timing.warmup_rounds, timing.settled, timing.seconds) == (6, False, 6)
    assert str(timing) == "NOT SETTLED after 6 rounds of warm-up"


def test_ranks_take_as_many_rounds_as_the_slowest_needs(monkeypatch):
    other = iter([8.0, 7, 5, 5, 5])
    monkeypatch.setattr(common, "gather_objects", lambda mine: [mine, dict(a=next(other))])
    assert warm_up(lambda: dict(a=1.0), OPTIONS) == common.Warmth(5, True)


def test_a_step_is_timed_behind_its_warm_up():
    """All of its phases together."""
    times = iter([6.0, 5, 5, 5, 1, 2, 3])

    class Steps(workload.Work):
        def __init__(self):
            self.options = OPTIONS

        def step(self):
            half = next(times) / 2
            return type("Clock", (), dict(seconds=dict(one=half, two=half)))

    clocks, warmth = Steps().run()
    assert [clock.seconds["one"] for clock in clocks] == [0.5, 1, 1.5]
    assert warmth == common.Warmth(4, True)


def test_share_of_waiting_by_hand():
    """Ranks wait before the update; steps are as long as their slowest rank."""
    steps = [
        (dict(encode=1.0, teacher1=2.0, update=5.0), dict(encode=2.0, teacher1=3.0, update=3.0)),
        (dict(encode=3.0, teacher1=3.0, update=6.0), dict(encode=1.0, teacher1=1.0, update=9.0)),
    ]
    assert scale.waiting(steps) == pytest.approx((1 + 2) / (8 + 12))


def test_what_is_late_in_the_slowest_round():
    """Rank 1 is .5 s late in the teacher's phase; rank 0 waits for it in the update."""
    usual = dict(encode=1.0, teacher1=2.0, update=5.0)
    steps = [(usual, usual)] * 2 + [(usual | dict(update=5.6), usual | dict(teacher1=2.5))]
    expected = dict(round=2, seconds=8.6, rank=1, phase="teacher1", late=0.5)
    assert scale.late_phase(steps) == pytest.approx(expected)


def test_seconds_of_garbage_collection():
    with common.GarbageTimer() as timer:
        gc.collect()
    gc.collect()  # not counted
    counted = timer.seconds
    assert 0 < counted == timer.take() and timer.take() == 0 and timer not in gc.callbacks


def test_processes_are_given_the_options(monkeypatch):
    command = "scale --rounds 4 --stable 0.5 --num_tiles 13 --answer_lengths 9 4 --budget_gib 80 "
    command += "--num_processes 1 --device cpu --flags --batch_size 3"
    seen = []
    monkeypatch.setattr(scale, "measure", lambda options: seen.append(options))
    __main__.main(command.split())
    __main__.main(["scale", *scale.handed_down(seen[0])])
    assert vars(seen[1]) == vars(seen[0]) | dict(num_processes=())
    assert seen[1].answer_lengths == [9.0, 4.0] and seen[1].budget_gib == 80


def test_ratios_are_of_neighbouring_rounds():
    """A host that halves its speed in one round leaves the ratio as it is."""
    assert ratios([4, 8, 2], [2, 4, 4]) == dict(ratio=2, lowest=0.5, highest=2)


def test_drifts_of_the_ceilings():
    first = dict(matmul_tflops=2.0, bandwidth_tb_per_second=4.0)
    last = dict(matmul_tflops=3.0, bandwidth_tb_per_second=2.0)
    assert drifts(first, last) == dict(matmul_drift=1.5, bandwidth_drift=0.5)
