"""Runs of both loops with a judge whose server comes and goes, and with a user's own reward."""

import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_train.rewards.judge_text import MODES, messages
from tests.campaigns import messy_data
from tests.judge_server import overlap
from tests.ranks import forked, free_port
from tests.runs import ENVIRONMENT, ROOT, rollouts, run, start, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)
LOOP2 = ["loop2.meteor=.25", "loop2.judge=.75"]
JUDGE = dict(use_llm_judge="", reward_weights=LOOP2)
TIMEOUT = 90


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messy")
    messy_data.main(["--output_dir", str(folder), "--num_rows", "300"])
    return folder


@contextmanager
def server(port: int):
    """The judge's server in a process of its own, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "tests/judge_server.py", "--port", str(port)], cwd=ROOT, env=ENVIRONMENT
    )
    try:
        yield
    finally:
        process.kill()
        process.wait(TIMEOUT)


def wait_for_server(port: int):
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), TIMEOUT).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def wait_for(process, output, found) -> list[dict]:
    """The rollouts written so far, once `found` holds for one of the last step's."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate(timeout=TIMEOUT)[0]
        lines = rollouts(output) if (output / "rollouts" / "rank0.jsonl").is_file() else []
        if any(found(line) for line in lines if line["step"] == lines[-1]["step"]):
            return lines
        time.sleep(0.05)
    raise AssertionError("nothing came")


def judged(line) -> bool:
    return line["judge"] is not None and bool(line.get("reply", line["completion"]))


@pytest.mark.parametrize("dataset", ["dam"])  # the other tests train on gar
def test_a_judge_that_comes_and_goes(data, messy, tmp_path, dataset):
    """Both loops on a folder with every edge case of its data among the good regions."""
    port = free_port()
    with server(port):
        wait_for_server(port)
        process = start(
            data,
            tmp_path,
            data_dir=messy / dataset,
            eval_data_dir=None,
            eval_samples=4,  # beside a damaged one
            dataset=dataset,
            max_bad_fraction=0.5,
            max_steps=500,
            num_generations=4,
            seed=3,
            **JUDGE,
            llm_judge_base_url=f"http://127.0.0.1:{port}/v1",
        )
        try:
            first = wait_for(process, tmp_path, judged)
        except BaseException:
            process.kill()
            raise
    try:
        assert not any(line["judge"] is None for line in first)
        wait_for(process, tmp_path, lambda line: line["judge"] is None)
        with server(port):
            wait_for(process, tmp_path, judged)
        output = process.communicate(timeout=TIMEOUT)[0]
    finally:
        process.kill()

    assert process.returncode == 2
    sentence = output.strip().splitlines()[-1]
    assert sentence.startswith("rl_train: the LLM judge failed on ")
    assert "0.2 of a window of 200" in sentence and "Traceback" not in output

    lines = rollouts(tmp_path)
    steps = [
        [line for line in lines if line["step"] == step] for step in range(lines[-1]["step"] + 1)
    ]
    lost = [sum(line["judge"] is None for line in step) for step in steps]
    assert lost[0] == 0 and lost[-1] > 0
    assert [a > 0 for a in lost].count(False) >= 2 and "10" in "".join(
        "01"[a > 0] for a in lost
    )  # it went, and came back
    assert sum(lost) > 40 >= sum(lost[:-1])  # .2 of 200
    for line in lines:
        caption = line["reply"] if line["task"] == "loop2" else line["completion"]
        if line["judge"] is None:
            assert (
                line["reward"] is None
                and line["meteor" if line["task"] == "loop2" else "iou"] is None
                and line["advantage"] == 0
            )
            continue
        verdict = (
            float(
                overlap(
                    messages(
                        MODES["score"][0], {"reference": line["caption"], "candidate": caption}
                    )
                )
            )
            / 10
            if caption
            else 0
        )
        assert line["judge"] == pytest.approx(verdict, abs=1e-6)
        words = 0.25 * line["meteor"] + 0.75 * line["judge"]
        assert line["reward"] == pytest.approx(
            words if line["task"] == "loop2" else line["iou"] + words, abs=1e-6
        )
    assert any(line["advantage"] for line in lines if line["task"] == "loop2")

    log = EventAccumulator(str(tmp_path / "tensorboard"))
    log.Reload()
    failed = [event.value for event in log.Scalars("judge/failed_frac")]
    assert [value > 0 for value in failed] == [count > 0 for count in lost]
    assert {"loop1/judge", "loop1/meteor", "loop2/judge", "loop2/meteor"} <= set(
        log.Tags()["scalars"]
    )
    unscored = [
        sum(line["reward"] is None for line in step if line["task"] == "loop2") / 8
        for step in steps
    ]
    assert [event.value for event in log.Scalars("loop2/unscored_frac")] == pytest.approx(unscored)
    for loop in ("loop1", "loop2"):
        for event in log.Scalars(f"{loop}/judge"):
            values = [
                line["judge"]
                for line in steps[event.step - 1]
                if line["task"] == loop and line["judge"] is not None
            ]
            assert event.value == pytest.approx(sum(values) / len(values), abs=1e-5)


def test_a_judge_that_is_down_stops_all_ranks_at_the_start(data, tmp_path):
    port = free_port()
    how = dict(batch_size=1, llm_judge_base_url=f"http://127.0.0.1:{port}/v1", **JUDGE)
    ended = forked(tmp_path, *[lambda: run(data, tmp_path / "run", **how)] * 2)
    first, second = (output for _, output in ended)
    assert f"rl_train: --llm_judge_base_url http://127.0.0.1:{port}/v1: the judge " in first
    assert "rl_train: " not in second and "Traceback" not in first + second
    assert [status for status, _ in ended] == [2, 2]
    assert not (tmp_path / "run" / "config.json").exists()


def test_rewards_of_the_users_own_are_added_and_logged_by_name(data, tmp_path, monkeypatch):
    (tmp_path / "short_rewards.py").write_text(
        "def brevity(completions, prompts, captions, image_ids, masks, targets, **kwargs):\n"
        "    lists = (prompts, captions, image_ids, masks, targets)\n"
        "    assert all(len(values) == len(completions) for values in lists)\n"
        "    for m, t in zip(masks, targets):\n"
        "        assert m.shape == t.shape and m.dtype == t.dtype\n"
        "    if 'replies' in kwargs:\n"
        "        assert len(kwargs['replies']) == len(completions)\n"
        "        assert all(p.startswith('Please segment') for p in prompts)\n"
        "    values = [1 / (1 + len(text)) for text in completions]\n"
        "    return [None if row == 1 else value for row, value in enumerate(values)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    output = run(data, tmp_path / "run", max_steps=1, reward="short_rewards:brevity=0.5")
    lines = rollouts(output)
    assert len(lines) == 8
    for row, line in enumerate(lines):
        main = line["iou"] if line["task"] == "loop1" else line["meteor"]
        assert (line["brevity"] is None) == (row % 4 == 1)
        assert line["reward"] == pytest.approx(main + 0.5 * (line["brevity"] or 0), abs=1e-6)
    assert json.loads((output / "config.json").read_text())["reward"] == [
        "short_rewards:brevity=0.5"
    ]
    log = EventAccumulator(str(output / "tensorboard"))
    log.Reload()
    for loop in ("loop1", "loop2"):
        values = [
            line["brevity"]
            for line in lines
            if line["task"] == loop and line["brevity"] is not None
        ]
        assert log.Scalars(f"{loop}/brevity")[0].value == pytest.approx(sum(values) / 3, abs=1e-6)
