"""The judge behind a server: scores, requests, cache, retries and the window of failures."""

import math
import re
import subprocess
import sys
import time

import pytest
import torch

from rl_train.grpo import group_advantages
from rl_train.rewards import LLMJudge
from rl_train.rewards.judge import FailureWindow, JudgeFailed
from tests.judge_server import MODEL, JudgeServer, fields, overlap
from tests.rewards.judges import judge, nan_equal
from tests.runs import ENVIRONMENT, ROOT

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
        assert not server.chats and asked.take_counts() == {"failed": 0, "asked": 0}


def test_misuse_raises():
    with JudgeServer() as server:
        with pytest.raises(TypeError, match="single str"):
            judge(server).score("a dog", "a dog")
        with pytest.raises(ValueError, match="2 references and 1 hypotheses"):
            judge(server).score(["a", "b"], ["a"])
        with pytest.raises(ValueError, match="--llm_judge_mode 'stars'"):
            judge(server, "stars")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=r"--use_llm_judge .*\[judge\]"):
        LLMJudge("http://127.0.0.1:9/v1", MODEL)


# Requests


def test_equal_pairs_are_asked_once_and_in_parallel():
    def slow(chat, n):
        time.sleep(0.3)
        return overlap(chat)

    with JudgeServer(slow) as server:
        started = time.perf_counter()
        asked = judge(server)
        scores = asked.score(["a dog"] * 20, [f"dog {i % 10}" for i in range(20)])
        assert len(server.chats) == 10 and time.perf_counter() - started < 2.5
        assert scores[:10].tolist() == scores[10:].tolist()
        assert asked.take_counts() == {"failed": 0, "asked": 20} and asked.take_counts() == {
            "failed": 0,
            "asked": 0,
        }


@pytest.mark.parametrize("path", [None, "cache/judge.sqlite"])
def test_cache(tmp_path, path):
    path = path and tmp_path / path
    with JudgeServer() as server:
        first = judge(server, cache_path=path)
        scores = first.score(["a red dog"] * 2, ["a dog", "a cat"])
        assert len(server.chats) == 2
        assert (
            first.score(["a red dog"] * 2, ["a dog", "a cat"]).equal(scores)
            and len(server.chats) == 2
        )
        first.score(["a red dog"], ["the dog"])
        assert len(server.chats) == 3
        if path:
            assert (
                judge(server, cache_path=path).score(["a red dog"], ["a dog"]).equal(scores[:1])
                and len(server.chats) == 3
            )
            judge(server, "mcq", cache_path=path).score(["a red dog"], ["a dog"])
            assert len(server.chats) == 4
            server.model = "other"
            LLMJudge(server.url, "other", "score", cache_path=path).score(["a red dog"], ["a dog"])
            assert len(server.chats) == 5
    if path:  # what is known needs no server
        assert (
            judge(server, cache_path=path, num_retries=0)
            .score(["a red dog"], ["a dog"])
            .equal(scores[:1])
        )


def test_failures_are_not_cached(tmp_path):
    replies = iter(["eight", (500, "{}"), (200, "<html>"), "8", "9"])
    with JudgeServer(lambda chat, n: next(replies)) as server:
        one = judge(server, cache_path=tmp_path / "c", num_retries=0)
        values = [one.score(["a dog"], ["a cat"]).item() for _ in range(5)]
        assert all(map(math.isnan, values[:3])) and values[3:] == [pytest.approx(0.8)] * 2
        assert len(server.chats) == 4 and (one.requests, one.failures) == (5, 3)


def test_processes_share_a_cache(tmp_path):
    script = """if True:
        import sys
        from rl_train.rewards import LLMJudge
        judge = LLMJudge(sys.argv[1], sys.argv[2], "score", cache_path=sys.argv[3])
        for start in range(0, 60, 6):
            captions = [f"dog {i}" for i in range(start, start + 6)]
            assert judge.score(["a dog"] * 6, captions).isnan().sum() == 0
        """
    with JudgeServer() as server:
        arguments = [
            sys.executable,
            "-c",
            script,
            server.url,
            MODEL,
            str(tmp_path / "judge.sqlite"),
        ]
        processes = [
            subprocess.Popen(
                arguments, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        assert [
            (process.communicate(timeout=180)[1], process.returncode) for process in processes
        ] == [("", 0)] * 3
        before = len(server.chats)
        assert 60 <= before <= 180
        judge(server, cache_path=tmp_path / "judge.sqlite").score(
            ["a dog"] * 60, [f"dog {i}" for i in range(60)]
        )
        assert len(server.chats) == before


def test_retries_back_off(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("rl_train.rewards.judge_client.asyncio.sleep", sleep)
    replies = [(500, "{}"), (429, "{}"), (503, "busy"), "8"]
    with JudgeServer(lambda chat, n: replies[n % 4]) as server:
        assert judge(server, backoff=0.5).score(["a dog"], ["a cat"]).item() == pytest.approx(0.8)
        assert waits == [0.5, 1, 2] and len(server.chats) == 4
        waits.clear()
        assert judge(server, backoff=0.5, num_retries=2).score(["a dog"], ["a cow"]).isnan().all()
        assert waits == [0.5, 1] and len(server.chats) == 7


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refusals_are_not_retried(status):
    with JudgeServer(lambda chat, n: (status, "{}")) as server:
        assert judge(server).score(["a dog"], ["a cat"]).isnan().all() and len(server.chats) == 1


def test_timeout_is_a_failure_after_its_retries():
    def hang_once(chat, n):
        if n < 2:
            time.sleep(1.5)
        return "8"

    with JudgeServer(hang_once) as server:
        started = time.perf_counter()
        assert judge(server, timeout=0.3, num_retries=0).score(["a dog"], ["a cat"]).isnan().all()
        assert time.perf_counter() - started < 1.4
        assert judge(server, timeout=0.3).score(["a dog"], ["a cat"]).item() == pytest.approx(0.8)


def test_server_down():
    with JudgeServer() as server:
        judge(server).check()
        assert len(server.chats) == 1
        where = f"--llm_judge_base_url {re.escape(server.url)}: "
        with pytest.raises(
            ValueError, match=f"{where}.*--llm_judge_model nobody .*does not exist"
        ) as unknown:
            LLMJudge(server.url, "nobody").check()
    down = judge(server, num_retries=1)
    with pytest.raises(
        ValueError, match=f"{where}.* {re.escape(MODEL)} .*Connection error"
    ) as raised:
        down.check()
    assert "\n" not in str(raised.value) + str(unknown.value)
    nan_equal(
        down.score(["a dog", "a dog", "a dog"], ["a cat", "", "a cat"]), [math.nan, 0, math.nan]
    )
    assert (down.requests, down.failures) == (2, 2)


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
    with pytest.raises(JudgeFailed, match=r"3 of the last 10 .*--max_judge_failures 0.2"):
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
