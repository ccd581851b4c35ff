"""docs/examples: what docs/extending.md shows for users to write themselves, run."""

import pytest
import torch

from rl_train.rewards import meteor
from tests.runs import ROOT, curve, parts_of, rollouts, run, unmeasured, weights

one_core = pytest.fixture(autouse=True)(unmeasured)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")


def test_a_third_loop_of_questions_about_a_region(data, tmp_path):
    """Two steps: the teacher answers what the policy was asked, and what both say counts."""
    how = dict(temperature=1.5, num_generations=4, save_steps=1, learning_rate=1e-3)
    run(data, tmp_path, tasks="region_questions:RegionQuestions", max_steps=2, **how)
    lines = rollouts(tmp_path)
    assert {line["task"] for line in lines} == {"questions"} and len(lines) == 16
    for line in lines:
        reply, said = line["reply"], line["completion"]
        assert line["reward"] == pytest.approx(meteor([reply], [said]).item(), abs=1e-6)
        words = said.lower().split()
        true = [word in line["caption"].lower().split() for word in words]
        assert line["truth"] == pytest.approx(sum(true) / max(len(words), 1), abs=1e-6)
    groups = [lines[i : i + 4] for i in range(0, 16, 4)]
    assert all(len({line["reply"] for line in group}) == 1 for group in groups)  # one a question
    assert any(line["advantage"] for line in lines)
    before, after = (weights(tmp_path, step) for step in (1, 2))
    assert any((before[name] != after[name]).any() for name in after)


def test_a_curriculum_and_loss_weights(data, tmp_path, monkeypatch):
    """Large regions first; each loop's loss by how far the rewards of its groups differ."""
    built = parts_of(monkeypatch)
    tasks = ["loss_weights:Loop1", "loss_weights:Loop2"]
    how = dict(sampler="curriculum:large_first", loop2_weight=2, num_generations=3)
    run(data, tmp_path, tasks=tasks, max_steps=1, **how)
    sampler, train_set = built[0].sampler, built[0].data.train_set
    shares = [train_set[index]["mask"].mean() for index in sampler.indices(0).tolist()]
    quarter = -(-len(shares) // 4)
    assert sorted(shares)[-quarter:] == sorted(shares[:quarter]) and shares != sorted(shares)[::-1]
    assert sorted(sampler.indices(0)) == sorted(sampler.indices(1)) == list(range(len(shares)))
    later = [train_set[index]["mask"].mean() for index in sampler.indices(1)[:quarter].tolist()]
    assert min(later) < sorted(shares)[quarter]  # from the second epoch on small ones come too

    total = 0
    for name, given in (("loop1", 1.0), ("loop2", 2.0)):
        lines = [line for line in rollouts(tmp_path) if line["task"] == name]
        std = torch.tensor([line["reward"] for line in lines]).view(2, 3).std(1).mean().item()
        weight = curve(tmp_path, f"{name}/loss_weight")[1]
        assert weight == pytest.approx(given * std / (std + 0.05), abs=1e-5) and weight > 0
        total += weight * curve(tmp_path, f"{name}/loss")[1]
    assert curve(tmp_path, "total_loss")[1] == pytest.approx(total, abs=1e-6)
