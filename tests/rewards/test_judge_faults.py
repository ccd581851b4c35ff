"""Whole runs with a judge that misbehaves: they say so, in time.

# every fault, with its seconds
JUDGE_FAULTS=all python -m pytest tests/rewards/test_judge_faults.py -s
"""

import functools
import os
import re
import time

import pytest

from rl_train.rewards import LLMJudge
from tests.judge_server import FAULTS, JudgeServer, fields, overlap
from tests.ranks import finish, rank_environments
from tests.runs import complaint_of, flags, on_one_core, rollouts, run, start

one_core = pytest.fixture(autouse=True)(on_one_core)
LOOP2 = ["loop2.meteor=.25", "loop2.judge=.75"]
MANY = os.environ.get("JUDGE_FAULTS") == "all"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A judge of fractions of the seconds that the real one has."""
    quick = functools.partial(LLMJudge, timeout=0.5, max_seconds=2.0, max_retries=1)
    monkeypatch.setattr("rl_train.run.build.LLMJudge", quick)


def judged_flags(data, output, server, **changes) -> list[str]:
    judge = dict(use_llm_judge="", reward_weights=LOOP2, llm_judge_base_url=server.url)
    return flags(data, output, **judge | changes)


def stop(capsys, argv) -> tuple[str, list[str], float]:
    """The sentence that a run ends with, what it said of the judge before, and its seconds."""
    started = time.perf_counter()
    sentence = complaint_of(argv)
    seconds = time.perf_counter() - started
    said = [line for line in capsys.readouterr().out.splitlines() if "judge" in line]
    with capsys.disabled():
        if MANY:
            print(f"\n{seconds:5.1f} s | {said[-1] if said else ''} | {sentence}")
    return sentence, said, seconds


@pytest.mark.parametrize("fault", FAULTS if MANY else ["drips its body"])
def test_a_judge_that_fails_from_the_first_step_on_stops_the_run(data, tmp_path, capsys, fault):
    def behaviour(chat, n):
        # The start's question, however often a busy machine makes the client repeat it.
        at_start = fields(chat)["reference"] == "a red dog"
        return "1" if at_start else FAULTS[fault](chat, n)

    with JudgeServer(behaviour) as server:
        argv = judged_flags(data, tmp_path / "run", server, max_steps=500, num_generations=8)
        sentence, said, seconds = stop(capsys, argv)
        # 4 calls in the 2 steps of 32 captions each, of 2 s at most
        assert 2 <= len(rollouts(tmp_path / "run")) / 32 <= 3 and seconds < 300
        assert sentence.startswith("rl_train: the LLM judge failed on ")
        assert "more than 0.2 of a window of 200: mend the server" in sentence
        (first, *_) = (line for line in said if "failed" in line)
        assert first.startswith("step 1: the LLM judge failed on ") and ": " in first
        assert all(line["judge"] in (None, 0) for line in rollouts(tmp_path / "run"))


@pytest.mark.parametrize("fault", FAULTS if MANY else ["hangs"])
def test_a_judge_that_fails_at_the_start_is_refused(data, tmp_path, capsys, fault):
    with JudgeServer(FAULTS[fault]) as server:
        sentence, _, seconds = stop(capsys, judged_flags(data, tmp_path / "run", server))
        assert f"--llm_judge_base_url {server.url}: the judge " in sentence
        assert "cannot be asked there" in sentence and seconds < 60
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault", FAULTS if MANY else [])
def test_a_judge_that_fails_now_and_then_stops_nothing(data, tmp_path, fault):
    def behaviour(chat, n):
        return FAULTS[fault](chat, n) if n % 8 == 7 else overlap(chat)

    with JudgeServer(behaviour) as server:
        judge = dict(use_llm_judge="", reward_weights=LOOP2, llm_judge_base_url=server.url)
        lines = rollouts(run(data, tmp_path / "run", max_steps=4, num_generations=8, **judge))
        assert len(lines) == 4 * 32 and sum(line["judge"] is None for line in lines) < 40
        assert sum(line["judge"] is not None for line in lines) > 80


@pytest.mark.skipif(not MANY, reason="two processes of many seconds: JUDGE_FAULTS=all")
def test_one_ranks_judge_that_fails_stops_all_ranks(data, tmp_path):
    """Rank 1 reaches its judge by a proxy, which refuses all but the first request."""
    refusing = JudgeServer(lambda chat, n: "1" if n == 0 else (401, "{}"))
    with JudgeServer() as judge, refusing as proxy:
        others = [{}, dict(http_proxy=proxy.url, no_proxy="", NO_PROXY="")]
        processes = [
            start(
                data,
                tmp_path,
                environment | other,
                batch_size=1,
                num_generations=8,
                max_steps=500,
                llm_judge_base_url=judge.url,
                use_llm_judge="",
                reward_weights=LOOP2,
            )
            for environment, other in zip(rank_environments(), others)
        ]
        outputs = finish(processes, 300)
    failed = []
    for process, output in zip(processes, outputs):
        assert process.returncode == 2 and "Traceback" not in output
        found = re.findall(
            r"^rl_train: the LLM judge failed on (\d+) of the last "
            r"(\d+) captions, more than 0.2 ",
            output,
            re.M,
        )
        failed += found
    assert failed[0] == failed[1] and len(failed) == 2
    assert 40 < int(failed[0][0]) <= 0.7 * int(failed[0][1])
    assert re.search(
        r"step 1: the LLM judge failed on \d+ of \d+ captions: Error code: 401", outputs[0]
    )
    lines = rollouts(tmp_path)
    assert any(line["judge"] for line in lines) and any(line["judge"] is None for line in lines)
