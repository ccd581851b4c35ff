"""The judge behind a server: scores, requests, retries and the window of failures."""

import json
import math
import re
import subprocess
import sys
import threading

import pytest
import torch

from rl_train.grpo import group_advantages
from rl_train.rewards import LLMJudge
from rl_train.rewards.judge import FailureWindow, JudgeFailed
from tests.judge_server import MODEL, JudgeServer, fields, overlap
from tests.rewards.judges import judge, nan_equal
from tests.runs import ROOT

# Scores


def test_scores_of_the_modes():
    with JudgeServer() as server:
        scores = judge(server).score(
            ["a red dog", "a red dog", "a cat"], ["a red dog", "a dog", "blue sky"]
        )
        assert scores.dtype == torch.float32
        nan_equal(scores, [1, 0.67, 0])
        assert server.last["temperature"] == 0 and server.last["model"] == MODEL
        nan_equal(
            judge(server, "mcq").score(
                ["a red dog", "a red dog", "a cat"], ["a red dog", "a dog", "blue sky"]
            ),
            [1, 0.75, 0],
        )
        assert judge(server).score([], []).shape == (0,)


@pytest.mark.parametrize("mode", ["score", "mcq", "qa"])
def test_blank_captions_are_zero_and_cost_nothing(mode):
    with JudgeServer() as server:
        asked = judge(server, mode)
        assert asked.score(["a dog"] * 3, ["", " ", "\n\t"]).tolist() == [0, 0, 0]
        assert not server.chats and asked.take_failures() == (0, {})


def test_misuse_raises():
    with JudgeServer() as server:
        with pytest.raises(TypeError, match="single str"):
            judge(server).score("a dog", "a dog")
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            judge(server).score(["a", "b"], ["a"])
        with pytest.raises(ValueError, match="--llm_judge_mode 'stars'"):
            judge(server, "stars")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=r"--use_llm_judge, .*\[judge\]"):
        LLMJudge("http://127.0.0.1:9/v1", MODEL)


# Requests


def test_equal_pairs_are_asked_once_and_in_parallel():
    two = threading.Barrier(2, timeout=20)  # broken if one is asked after the other

    def wait_for_another(chat, n):
        two.wait()
        return overlap(chat)

    with JudgeServer(wait_for_another) as server:
        asked = judge(server, timeout=60)
        scores = asked.score(["a dog"] * 20, [f"dog {i % 10}" for i in range(20)])
        assert len(server.chats) == 10
        assert scores[:10].tolist() == scores[10:].tolist()
        assert asked.take_failures() == (20, {}) and asked.take_failures() == (0, {})


def test_failures_are_counted_by_pair():
    replies = iter(["eight", (500, "{}"), (200, "<html>"), "8"])
    with JudgeServer(lambda chat, n: next(replies)) as server:
        one = judge(server)
        values = [one.score(["a dog"] * 2, ["a cat"] * 2).tolist() for _ in range(4)]
        assert all(map(math.isnan, sum(values[:3], []))) and values[3] == pytest.approx([0.8] * 2)
        num_asked, failures = one.take_failures()
        assert len(server.chats) == 4 and num_asked == 8
        assert failures == {
            "its replies are not what was asked for": 2,
            "its replies are no chat completions": 2,
            "Error code: 500": 2,
        }


@pytest.mark.parametrize(
    "body",
    ["", "<html>", "{}", '{"choices": []}', "[]", "null", "[" * 100_000]
    + [json.dumps({"choices": [{"message": {"content": None}}]})],
)
def test_bodies_without_a_reply_are_failures(body):
    with JudgeServer(lambda chat, n: (200, body)) as server:
        broken = judge(server)
        assert broken.score(["a dog"], ["a cat"]).isnan().all()
        (reason,) = broken.take_failures()[1]
        assert reason.startswith("its replies are ")


def test_a_busy_server_is_asked_again(monkeypatch):
    replies = [(500, "{}"), (429, "{}"), "8"]
    with JudgeServer(lambda chat, n: replies[n % 3]) as server:
        patient = judge(server, max_retries=2)
        monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
        assert patient.score(["a dog"], ["a cat"]).item() == pytest.approx(0.8)
        assert len(server.chats) == 3
        assert judge(server, max_retries=1).score(["a dog"], ["a cow"]).isnan().all()
        assert len(server.chats) == 5


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refusals_are_not_retried(status):
    with JudgeServer(lambda chat, n: (status, "{}")) as server:
        patient = judge(server, max_retries=3)
        assert patient.score(["a dog"], ["a cat"]).isnan().all() and len(server.chats) == 1


def test_timeout_is_a_failure():
    given_up = threading.Event()

    def hang_at_first(chat, n):
        if n < 1:
            given_up.wait(60)
        return "8"

    with JudgeServer(hang_at_first) as server:
        assert judge(server, timeout=0.3).score(["a dog"], ["a cat"]).isnan().all()
        given_up.set()
        assert judge(server, timeout=30).score(["a dog"], ["a cat"]).item() == pytest.approx(0.8)


def test_server_down():
    with JudgeServer() as server:
        assert judge(server).fault() is None
        assert len(server.chats) == 1
        where = f"--llm_judge_base_url {re.escape(server.url)}: "
        unknown = LLMJudge(server.url, "nobody").fault()
        assert re.match(f"{where}.*--llm_judge_model nobody .*does not exist", unknown)
    down = judge(server, max_retries=1)
    assert re.match(f"{where}.* {re.escape(MODEL)} .*Connection error", down.fault())
    assert "\n" not in down.fault() + unknown
    nan_equal(
        down.score(["a dog", "a dog", "a dog"], ["a cat", "", "a cat"]), [math.nan, 0, math.nan]
    )
    assert down.take_failures() == (2, {"Connection error.": 2})


@pytest.mark.parametrize("mode", ["score", "mcq"])
def test_one_failure_of_four_leaves_its_row_out_only(mode):
    captions = ["a red dog", "a dog", "a red cat", "sky"]
    with JudgeServer(
        lambda chat, n: (500, "{}") if fields(chat)["candidate"] == "a dog" else overlap(chat)
    ) as server:
        scores = judge(server, mode).score(["a red dog"] * 4, captions)
    assert scores.isnan().tolist() == [False, True, False, False]
    advantages = group_advantages(scores, 4)
    rest = group_advantages(scores[[0, 2, 3]], 3)
    assert advantages[1] == 0 and advantages[[0, 2, 3]].tolist() == pytest.approx(rest.tolist())
    assert rest.std() > 0.9


# The window


def test_window_stops_above_its_limit():
    window = FailureWindow(0.2, 10)
    for failed, asked in [
        (2, 2),
        (0, 4),
        (0, 4),
        (2, 2),
        (0, 8),
    ]:  # the first two failures have left when the last two come
        window.add(failed, asked)
    with pytest.raises(JudgeFailed, match=r"3 of the last 10 .*0.2 of a window of 10: .*--resume"):
        window.add(3, 2 + 8)


def test_window_counts_a_short_history_as_scored():
    window = FailureWindow(0.2, 200)
    window.add(40, 40)
    window.add(0, 0)
    with pytest.raises(JudgeFailed, match="41 of the last 41"):
        window.add(1, 1)
    FailureWindow(1.0).add(10_000, 10_000)
    with pytest.raises(JudgeFailed):
        FailureWindow(0.0).add(1, 1)


def test_import_is_cheap():
    check = (
        "import sys, rl_train.rewards; rl_train.rewards.LLMJudge; print('openai' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "False"
