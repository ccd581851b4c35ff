"""A judge that misbehaves on the line: requests end in time and say why."""

import time

import pytest

from tests.judge_server import FAULTS, JudgeServer, hang, overlap
from tests.rewards.judges import judge

REASONS = {
    "hangs": "Request timed out.",
    "drips its body": "a step waits 1 s at most",
    "drips its headers": "a step waits 1 s at most",
    "breaks off in the body": "Connection error.",
    "closes the connection": "Connection error.",
    "status 401": "Error code: 401 - no key",
    "status 429": "Error code: 429",
    "status 500": "Error code: 500",
    "is no HTTP": "Connection error.",
    "sends HTML": "its replies are no chat completions",
    "says rubbish": "its replies are not what was asked for",
    "says NaN": "its replies are not what was asked for",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_end_in_time_and_say_why(fault):
    with JudgeServer(FAULTS[fault]) as server:
        impatient = judge(server, timeout=0.3, max_seconds=1.0)
        started = time.perf_counter()
        assert impatient.score(["a dog"] * 3, ["a cat", "", "a cow"]).isnan().tolist() == [
            True,
            False,
            True,
        ]
        assert time.perf_counter() - started < 10
        assert impatient.take_failures() == (2, {REASONS[fault]: 2})
        assert impatient.take_failures() == (0, {})
        message = impatient.fault()
        assert message.endswith(f"cannot be asked there: {REASONS[fault]}") and "\n" not in message


def test_retries_share_one_deadline_at_the_start():
    with JudgeServer(hang) as server:
        started = time.perf_counter()
        patient = judge(server, timeout=1.0, max_seconds=1.0, max_retries=60)
        assert "cannot be asked there" in patient.fault()
        assert time.perf_counter() - started < 30


@pytest.mark.parametrize("mode", ["score", "qa"])
def test_a_call_ends_in_time_with_what_it_has(mode):
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
        assert patient.take_failures() == (3, {"a step waits 1.5 s at most": 2})
