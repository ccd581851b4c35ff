"""docs/extending.md: its class, saved as the page says, trains, and its reward function too."""

import re
import sys
from statistics import mean

import pytest

from tests.runs import ROOT, complaint_of, flags, rollouts, run, unmeasured, weights
from tools.demo.make_demo import HELDOUT, TRAIN, write_split

one_core = pytest.fixture(autouse=True)(unmeasured)
# The demo's captions are all of four words and end alike; sampled this hot they differ in both.
VARIED = dict(temperature=2.0, num_generations=4)

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's two files."""
    folder = tmp_path_factory.mktemp("page")
    (kind, task), (shell, _), (_, reward) = BLOCKS
    assert (kind, shell) == ("python", "bash")
    (folder / "colors.py").write_text(task)
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


@pytest.fixture(scope="module")
def few_scenes(tmp_path_factory):
    """The folder of two training scenes, of one held-out scene."""
    folder = tmp_path_factory.mktemp("scene")
    write_split(folder / "train", seed=0, split=TRAIN, num_scenes=2)
    write_split(folder / "heldout", seed=0, split=HELDOUT, num_scenes=1)
    return folder


def test_the_page_trains_by_its_own_flags(few_scenes, tmp_path):
    """Ten steps on few regions: the reward rises as no update in a wrong direction makes it.

    Without an update (a learning rate of 1e-9) the mean of a step stays between .18 and .28.
    """
    run(few_scenes, tmp_path / "run", **command(), save_steps=5, max_steps=10, latent_std=None)
    lines = rollouts(tmp_path / "run")
    assert {line["task"] for line in lines} == {"answers"}
    for line in lines:
        [color] = set(line["caption"].split()) & sys.modules["colors"].COLORS
        words = [word for word in re.findall(r"\w+", line["completion"].lower()) if len(word) >= 3]
        f1 = 2 * (color in words) / (len(words) + 1)
        assert line["f1"] == line["reward"] == pytest.approx(f1, abs=1e-6)
    rewards = {step: [line["f1"] for line in lines if line["step"] == step] for step in range(10)}
    first, last = (mean([*rewards[a], *rewards[b]]) for a, b in ((0, 1), (8, 9)))
    assert first < 0.25 and last > 0.3
    before, after = (weights(tmp_path / "run", step) for step in (5, 10))
    assert {name.split(".")[0] for name in after} == {"language_model", "mlp1"}
    assert any((before[name] != after[name]).any() for name in after)


def test_its_flags_are_checked(data, tmp_path):
    output = complaint_of(flags(data, tmp_path / "run", **command(), answers_weight=-1))
    assert "--answers_weight" in output and "at least 0" in output


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
