"""docs/extending.md: its class, saved as the page says, trains, and its reward function too."""

import re

import pytest

from tests.runs import ROOT, complaint_of, flags, rollouts, run, unmeasured, weights

one_core = pytest.fixture(autouse=True)(unmeasured)
# The demo's captions are all of eight words and end alike; sampled this hot they differ in both.
VARIED = dict(temperature=2.0, num_generations=4)

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's two files."""
    folder = tmp_path_factory.mktemp("page")
    (kind, task), (shell, _), (_, reward) = BLOCKS
    assert (kind, shell) == ("python", "bash")
    (folder / "overlap.py").write_text(task)
    (folder / "my_rewards.py").write_text(reward)
    return folder


@pytest.fixture(autouse=True)
def importable(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)


def command() -> dict[str, str]:
    """The flags of the page's command that trains, but those of folders and of the run's length."""
    [words] = [
        line.split() for line in BLOCKS[1][1].replace("\\\n", "").splitlines() if "--tasks" in line
    ]
    words = [word for word in words[words.index("--tasks") :] if not word.startswith("--no-")]
    page = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2])}
    own = ("model_path", "data_dir", "output_dir", "max_steps", "num_workers")
    return {name: value for name, value in page.items() if name not in own}


def test_the_page_trains_by_its_own_flags(data, tmp_path):
    """Its rewards differ in every step, at the page's temperature and lengths."""
    run(data, tmp_path / "run", **command(), save_steps=1, max_steps=2, latent_std=None)
    lines = rollouts(tmp_path / "run")
    assert {line["task"] for line in lines} == {"overlap"}
    assert {line["step"] for line in lines} == {0, 1}
    for line in lines:
        said, true = (
            {word for word in re.findall(r"\w+", line[text].lower()) if len(word) >= 3}
            for text in ("completion", "caption")
        )
        assert line["reward"] == pytest.approx(len(said & true) / len(said | true), abs=1e-6)
    differing = [
        len({line["reward"] for line in lines[start : start + 8]}) > 1
        for start in range(0, len(lines), 8)
    ]
    assert sum(differing) > len(differing) / 2
    before, after = (weights(tmp_path / "run", step) for step in (1, 2))
    assert {name.split(".")[0] for name in after} == {"language_model", "mlp1"}
    assert any((before[name] != after[name]).any() for name in after)


def test_its_flags_are_checked(data, tmp_path, capsys):
    output = complaint_of(capsys, flags(data, tmp_path / "run", **command(), overlap_weight=-1))
    assert "--overlap_weight" in output and "at least 0" in output


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
