"""tools.rank_samples: its lines are a run's own rewards, it goes on, and its list is trained on."""

import json
import re

import pytest
import torch

from rl_train import cli
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.sample_list import listed_samples
from tests.ranks import forked
from tests.runs import flags, on_one_core, rollouts, run_unmeasured
from tools import rank_samples

one_core = pytest.fixture(autouse=True)(on_one_core)
NOT_HERE = ("output_dir", "eval_steps", "micro_batch_size", "max_steps", "learning_rate")
NOT_HERE += ("merge_at_end",)  # flags of a run that a ranking does not have
NUM_SAMPLES, G = 5, 3
SHORT = dict(num_generations=G, seed=3, max_completion_length=6)


@pytest.fixture(scope="module")
def few(data, tmp_path_factory):
    """A list of a few training samples."""
    file = tmp_path_factory.mktemp("few") / "few.txt"
    samples = GraspAnyRegionDataset(data / "train")
    file.write_text("\n".join(samples.image_id(i) for i in range(3, 3 + NUM_SAMPLES)))
    return file


def ranking(data, few, output, **changes):
    """Rank the few samples by both loops."""
    changes = dict(sample_list=few) | SHORT | changes
    absent = dict.fromkeys(NOT_HERE)
    rank_samples.main(["--output", str(output), *flags(data, None, **absent | changes)])
    return output


@pytest.fixture(scope="module")
def ranked(data, few, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for _ in on_one_core(monkeypatch):
            return ranking(data, few, tmp_path_factory.mktemp("ranks") / "ranks.jsonl")


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_is_what_a_run_s_first_step_earns(data, few, ranked, tmp_path):
    lines = lines_of(ranked)
    assert len(lines) == 2 * NUM_SAMPLES and all(line["num_scored"] == G for line in lines)
    assert {line["variance"] > 0 for line in lines} == {True, False}
    same = dict(sample_list=few, batch_size=4, max_steps=1)
    rows = rollouts(run_unmeasured(data, tmp_path / "run", **SHORT | same))
    of_line = {(line["image_id"], line["task"]): line for line in lines}
    for start in range(0, len(rows), G):
        group = rows[start : start + G]
        line = of_line[group[0]["image_id"], group[0]["task"]]
        rewards = torch.tensor([row["reward"] for row in group], dtype=torch.float64)
        assert line["mean"] == pytest.approx(rewards.mean().item(), abs=1e-4)
        assert line["variance"] == pytest.approx(rewards.var().item(), abs=1e-4)


def test_a_killed_ranking_goes_on(data, few, ranked, tmp_path):
    """A torn line, and a sample of which one task is missing, are rolled out again."""
    whole, settings = ranked.read_bytes(), rank_samples.settings_file(ranked).read_text()
    output = tmp_path / "ranks.jsonl"
    rank_samples.settings_file(output).write_text(settings)
    rows = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(rows[:5]) + rows[5][:9])
    assert ranking(data, few, output).read_bytes() == whole
    assert ranking(data, few, output).read_bytes() == whole  # nothing is left to do


def test_two_ranks_write_the_same(data, few, ranked, tmp_path):
    output = tmp_path / "ranks.jsonl"
    ended = forked(tmp_path, *[lambda: ranking(data, few, output)] * 2)
    assert [status for status, _ in ended] == [0, 0], ended
    assert output.read_bytes() == ranked.read_bytes()


def test_what_is_wrong_is_one_sentence_and_nothing_is_written_over(data, few, ranked, tmp_path):
    before, best = ranked.read_bytes(), tmp_path / "best"
    best.write_text("mine")
    other = tmp_path / "other.jsonl"
    other.write_text("mine")
    for output, changes, words in (
        (ranked, dict(seed=4), f"--output {ranked}: was begun with other --seed; give the same"),
        (other, {}, f"--output {other}: exists, and no other.jsonl.settings.json beside it"),
        (ranked, dict(best=best), f"--best {best}: exists already, name another file"),
        (ranked, dict(checkpoint=tmp_path), f"--checkpoint {tmp_path}: it has no training_state"),
    ):
        with pytest.raises(SystemExit) as ended:
            ranking(data, few, output, **changes)
        assert str(ended.value.code).startswith(f"rank_samples: {words}")
    assert ranked.read_bytes() == before
    assert (best.read_text(), other.read_text()) == ("mine", "mine")


def test_the_best_are_those_that_vary(data, ranked, tmp_path):
    best = tmp_path / "best.jsonl"
    rank_samples.write_best(lines_of(ranked), best, 0.5)
    variances = {}
    for line in lines_of(ranked):
        variances.setdefault(line["image_id"], []).append(line["variance"])
    expected = sorted(variances, key=lambda name: -sum(variances[name]))[: NUM_SAMPLES // 2]
    assert [row["image_id"] for row in lines_of(best)] == expected
    samples = listed_samples(GraspAnyRegionDataset(data / "train"), best)
    assert {samples[k]["image_id"] for k in range(len(samples))} == set(expected)


def test_groups_without_variance_are_counted_for_each_task():
    groups = [("a", "loop1", 0.0), ("a", "loop2", 0.1), ("b", "loop1", None), ("b", "loop2", 0.2)]
    lines = [dict(image_id=i, task=task, variance=v) for i, task, v in groups]
    assert rank_samples.equal_groups(lines, ["a", "b"]) == "loop1 2 of 2, loop2 0 of 2"
    assert rank_samples.equal_groups(lines, ["a"]) == "loop1 1 of 1, loop2 0 of 1"


def test_unscored_rewards_have_no_mean():
    rewards = torch.tensor([0.5, torch.nan, 1.0])
    line = rank_samples.line_of("a", "loop1", rewards)
    assert line == dict(image_id="a", task="loop1", mean=0.75, variance=0.125, num_scored=2)
    line = rank_samples.line_of("a", "loop1", rewards * torch.nan)
    assert (line["mean"], line["variance"], line["num_scored"]) == (None, None, 0)


def test_it_takes_the_flags_of_a_run(data, few, ranked, tmp_path, capsys):
    """Those of training alone are left out of its --config, and named on a command line."""
    config = cli.parse(flags(data, tmp_path / "run", sample_list=few, **SHORT))
    (tmp_path / "config.json").write_text(json.dumps(config.flags, default=str))
    taken = ["--config", str(tmp_path / "config.json"), "--output", str(tmp_path / "o.jsonl")]
    rank_samples.main(taken)
    assert (tmp_path / "o.jsonl").read_bytes() == ranked.read_bytes()
    said = capsys.readouterr()
    assert f"5 of 5 samples to ask, {G} answers each for every task" in said.out
    assert "5 of 5, 0 minutes left" in said.out + said.err
    assert re.search(
        r"config.json: \d+ flags are its.*; \d+ of training alone are left out", said.out
    )
    with pytest.raises(SystemExit, match="--max_steps: is of training alone, leave it out"):
        rank_samples.main([*taken, "--max_steps", "4"])
    (tmp_path / "config.json").write_text(json.dumps({"learning_rat": 1}))
    with pytest.raises(SystemExit, match="^rank_samples: .*--learning_rat: no such flag"):
        rank_samples.main(taken)
