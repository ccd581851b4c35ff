"""A judge that misbehaves on the line: requests end in time and in memory, and say why."""

import math
import resource
import time

import pytest

from tests.judge_server import FAULTS, JudgeServer, hang, overlap
from tests.rewards.judges import judge

REASONS = {
    "hangs": "no whole reply within 0.3 s",
    "drips its body": "no whole reply within 0.3 s",
    "drips its headers": "no whole reply within 0.3 s",
    "sends gigabytes": "a reply of more than 1048576 bytes",
    "sends gigabytes, status 500": "Error code: 500",
    "sends gigabytes, status 401": "Error code: 401",
    "sends gigabytes, redirects": (
        "redirected, with a body of more than 65536 bytes or of unknown size"
    ),
    "breaks off in the body": "the connection was lost in the middle of a reply",
    "closes the connection": "Connection error.",
    "status 401": "Error code: 401 - no key",
    "status 429": "Error code: 429",
    "status 500": "Error code: 500",
    "is no HTTP": "Connection error.",
    "sends HTML": "its replies are not what was asked for",
    "says rubbish": "its replies are not what was asked for",
    "says NaN": "its replies are not what was asked for",
}
ANSWERED = ("sends HTML", "says rubbish", "says NaN")


def megabytes() -> float:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_end_in_time_and_say_why(fault):
    with JudgeServer(FAULTS[fault]) as server:
        impatient = judge(server, timeout=0.3, num_retries=0)
        started, memory = time.perf_counter(), megabytes()
        assert impatient.score(["a dog"] * 3, ["a cat", "", "a cow"]).isnan().tolist() == [
            True,
            False,
            True,
        ]
        assert time.perf_counter() - started < 10 and megabytes() - memory < 100
        assert impatient.take_counts() == {"failed": 2, "asked": 2}
        assert impatient.take_reasons() == {REASONS[fault]: 2} and not impatient.reasons
        told = impatient.fault()
        if fault in ANSWERED:  # a server that answers; the window of failures watches what it says
            assert told is None
        else:
            assert told.endswith(f"cannot be asked there: {REASONS[fault]}") and "\n" not in told


def test_retries_share_one_deadline_at_the_start():
    with JudgeServer(hang) as server:
        started = time.perf_counter()
        assert "no whole reply within 1 s" in judge(server, timeout=1.0).fault()
        assert time.perf_counter() - started < 3.5


@pytest.mark.parametrize("mode", ["score", "qa"])
def test_a_call_ends_in_time_and_keeps_what_it_has(mode):
    def behaviour(chat, n):
        if "slow" in chat[1]["content"]:
            time.sleep(30)
        return overlap(chat)

    captions = ["a red dog", "a slow red dog", "a red dog"]
    references = ["a red dog", "a red dog", "a slow red dog"]
    with JudgeServer(behaviour) as server:
        patient = judge(server, mode, timeout=60, max_seconds=1.5)
        started = time.perf_counter()
        scores = patient.score(references, captions)
        assert time.perf_counter() - started < 10
        assert scores.isnan().tolist() == [False, True, True] and scores[0] == 1
        assert patient.take_reasons() == {"a step waits 1.5 s at most": 2}
        assert patient.take_counts() == {"failed": 2, "asked": 3}
        asked = len(server.chats)
        assert patient.score(references[:1], captions[:1]).item() == 1  # was kept
        assert len(server.chats) == asked and not patient.silent


def test_a_silent_judge_is_asked_less_until_it_answers():
    def behaviour(chat, n):
        return (500, "{}") if n < 4 + 1 else "8"

    with JudgeServer(behaviour) as server:
        one = judge(server)
        values = [one.score(["a dog"], ["a cat"]).item() for _ in range(2)]
        assert all(map(math.isnan, values)) and len(server.chats) == 4 + 1 and one.silent
        assert one.score(["a dog"], ["a cat"]).item() == pytest.approx(0.8)
        assert not one.silent
    values = [one.score(["a dog"], [text]).item() for text in ("a cat", "a cow")]
    assert values[0] == pytest.approx(0.8) and math.isnan(values[1]) and one.silent
    with JudgeServer(hang) as server:  # silence costs one timeout a call, however many are asked
        many = judge(server, timeout=0.5, num_workers=2, max_seconds=2)
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            assert many.score(["a dog"] * 9, list("abcdefghi")).isnan().all()
            seconds.append(time.perf_counter() - started)
        assert seconds[0] >= 2 > seconds[1] >= 0.5
