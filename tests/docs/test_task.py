"""docs/adding_a_task.md: its class, saved as the page says, trains, and its reward function too."""

import re

import pytest

from tests.runs import ROOT, complaint_of, flags, rollouts, run, unmeasured, weights

one_core = pytest.fixture(autouse=True)(unmeasured)
# The demo's captions are all of eight words and end alike; sampled this hot they differ in both.
VARIED = dict(temperature=2.0, num_generations=4)

BLOCKS = re.findall(
    r"```(\w+)\n(.*?)```", (ROOT / "docs" / "adding_a_task.md").read_text(), re.DOTALL
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's two files."""
    folder = tmp_path_factory.mktemp("page")
    (kind, task), (shell, _), (_, reward) = BLOCKS
    assert (kind, shell) == ("python", "bash")
    (folder / "brief.py").write_text(task)
    (folder / "my_rewards.py").write_text(reward)
    return folder


@pytest.fixture(autouse=True)
def importable(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)


def command() -> dict[str, str]:
    """The flags of the page's command that are not of the run's folders."""
    words = BLOCKS[1][1].split()
    return {
        name.removeprefix("--"): value
        for name, value in zip(words, words[1:])
        if name in ("--tasks", "--brief_words")
    }


def test_the_page_trains_two_steps(data, tmp_path):
    run(data, tmp_path / "run", **command(), **VARIED, save_steps=1, max_steps=2)
    lines = rollouts(tmp_path / "run")
    assert {line["task"] for line in lines} == {"brief"} and {line["step"] for line in lines} == {
        0,
        1,
    }
    for line in lines:
        words = len(line["completion"].split())
        assert line["reward"] == pytest.approx(min(1, 8 / words) if words else 0, abs=1e-6)
    assert any(line["reward"] < 1 for line in lines if line["step"] == 1)
    before, after = (weights(tmp_path / "run", step) for step in (1, 2))
    assert {name.split(".")[0] for name in after} == {"language_model", "mlp1"}
    assert any((before[name] != after[name]).any() for name in after)


def test_its_flags_are_checked(data, tmp_path, capsys):
    output = complaint_of(capsys, flags(data, tmp_path / "run", **command(), brief_weight=-1))
    assert "--brief_weight" in output and "at least 0" in output


def test_the_reward_functions_are_added_and_logged(data, tmp_path):
    """An answer of 12 tokens at most is often cut, which costs 1."""
    rewards = ["my_rewards:num_words=0.2", "my_rewards:ended"]
    how = dict(reward=rewards, tasks="mask_caption_mask", max_steps=1, max_completion_length=12)
    run(data, tmp_path / "run", **how, **VARIED)
    for line in rollouts(tmp_path / "run"):
        words = min(len(line["completion"].split()) / 20, 1.0)
        assert line["num_words"] == pytest.approx(words, abs=1e-6)
        assert line["reward"] == pytest.approx(line["iou"] + 0.2 * words + line["ended"], abs=1e-5)
    assert {line["ended"] for line in rollouts(tmp_path / "run")} == {-1, 0}
