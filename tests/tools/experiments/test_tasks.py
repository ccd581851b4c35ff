"""The comparison of tasks: its arms, its data and its figures, without a run."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rl_train import cli
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.gcg import GCGDataset
from rl_train.rollout import Batch
from rl_train.sft import SFT
from rl_train.tasks.base import TaskContext
from sa2va_hf.prompts import THINK_FIRST
from tools.experiments.tasks import __main__ as experiment
from tools.experiments.tasks import data, table, thinking
from tools.experiments.tasks.__main__ import Runs, build_parser
from tools.experiments.tasks.arms import COMPARISONS


def runs_of(folder, *words) -> Runs:
    line = ["--work_dir", str(folder), "--output", str(folder / "out.json"), *words]
    return Runs(build_parser().parse_args(line))


def test_every_arm_is_flags_that_its_training_knows(tmp_path, monkeypatch):
    """All arms of a comparison see as many samples a step, and are tuned over the same rates."""
    lines, runs = {}, runs_of(tmp_path, "--steps", "7")
    for comparison in COMPARISONS.values():
        for split in data.SPLITS:
            (runs.data / comparison.data / split).mkdir(parents=True, exist_ok=True)
        Path(runs.model(comparison)).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(
        Runs,
        "command",
        lambda self, name, module, words, done: lines.update({name: (module, words)}),
    )
    for name, comparison in COMPARISONS.items():
        runs.base(comparison)
        for arm in comparison.arms:
            for rate in comparison.rates:
                runs.arm(name, arm, rate, 3, [])
    parsed = {}
    for name, (module, words) in lines.items():
        program = SFT if module == "rl_train.sft" else cli.GRPO
        config = cli.parse(words, program)
        parsed[name] = config.flags
        if not name.startswith("base_"):
            assert config.rollout.batch_size == 8 and config.optim.max_steps == 7
            with_mask_term = "mask_term" in name
            assert bool(config.flags.get("mask_loss_coef", 0)) == with_mask_term
    assert len(parsed) == 4 + sum(len(c.arms) * len(c.rates) for c in COMPARISONS.values())
    listed = [f for f in parsed.values() if f["sample_list"]]
    files = {f["sample_list"].rsplit("/")[-1] for f in listed}
    assert files == {"named.txt", "some.txt", "best.jsonl"}


def test_half_of_the_phrases_name_nothing(tmp_path):
    data.write_several(tmp_path / "several", 0, {"train": 3, "heldout": 1})
    dataset = GraspAnyRegionDataset(tmp_path / "several" / "train")
    samples = [dataset[i] for i in range(len(dataset))]
    none = [not len(sample["objects"]) for sample in samples]
    assert 0.3 < np.mean(none) <= 0.5 and any(len(s["objects"]) > 1 for s in samples)
    assert all(s["mask"].any() != empty for s, empty in zip(samples, none))


def test_the_base_of_several_is_taught_the_phrases_that_name_something(tmp_path, monkeypatch):
    """Taught others too, it answers half of all phrases, whatever they name, with no [SEG]."""
    monkeypatch.setattr(experiment, "SCENES", {"train": 2, "heldout": 1})
    runs = runs_of(tmp_path)
    runs.make_data({"several"})
    dataset = GraspAnyRegionDataset(runs.data / "several" / "train")
    named = runs.lists("several")["named"].read_text().split()
    assert 0 < len(named) < len(dataset)
    for i in range(len(dataset)):
        assert (dataset.image_id(i) in named) == bool(len(dataset[i]["objects"]))


def test_grounded_captions_say_their_objects_from_left_to_right(tmp_path):
    data.write_grounded(tmp_path / "grounded", 0, {"train": 2, "heldout": 1})
    dataset = GCGDataset(tmp_path / "grounded" / "train")
    assert len(dataset) == 2
    sample = dataset[0]
    phrases = sample["columns"]["phrases"]
    assert sample["columns"]["grounded_caption"].count("[SEG]") == 3 == len(phrases)
    assert " and ".join(phrases) + "." == sample["caption"]
    left = [mask.any(0).argmax() for mask in sample["objects"]]
    assert left == sorted(left)


class Words:
    """A policy whose tokens are words."""

    max_masks = 1

    def __init__(self):
        self.prompts = SimpleNamespace(answer=str.split)

    def segment_prompts(self, features, rows, captions, wordings):
        return list(zip(captions, wordings))


def test_half_of_the_taught_answers_think():
    task = thinking.HalfThinking(
        thinking.HalfThinking.Options(one_answer=True), TaskContext(Words(), None, 9)
    )
    batch = Batch(list(range(40)), [], ["A red cup."] * 40, [], [], None)
    rngs = [np.random.default_rng(k) for k in range(40)]
    prompts, answers = task.examples(batch, None, rngs)
    assert prompts[0] == ("A red cup.", THINK_FIRST)
    texts = {" ".join(answer) for answer in answers}
    assert texts == {"<think>a red cup</think> Sure, [SEG].", "Sure, [SEG]."}


def finished(runs, name, arm, rate, seed, before, after, steps=2):
    """Write the evaluations of a run, as `rl_train` leaves them."""
    folder = runs.output(name, arm, rate, seed) / "evaluation"
    folder.mkdir(parents=True)
    for step, captions_iou in ((0, before), (steps, after)):
        columns = dict(caption_meteor=captions_iou, cycle_iou=captions_iou, caption_distinct=before)
        texts = dict(captions=["A ruled blue cross."] * len(before))
        texts |= dict(references=["A striped blue cross."] * len(before))
        (folder / f"step_{step}.json").write_text(json.dumps(texts | dict(values=columns)))


def test_one_half_of_the_regions_chooses_the_rate_and_the_other_is_reported(tmp_path):
    """The mean of two seeds counts; a seed of which a rate is missing is left out."""
    runs, comparison = runs_of(tmp_path), COMPARISONS["captioning"]
    before = [0.1, 0.2, 0.1, 0.2]
    best = {"1e-4": 0.2, "3e-4": 0.6, "1e-3": 0.4}  # of regions 0 and 2
    for seed in (51, 52):
        for rate, first in best.items():
            second = 0.5 + 0.1 * (seed == 52) if rate == "3e-4" else 0.9
            after = [first, second, first, second]
            finished(runs, "captioning", "captioning", rate, seed, before, after)
            if (seed, rate) != (52, "1e-3"):
                finished(runs, "captioning", "loop1", rate, seed, before, after)
    figures = table.of_comparison(comparison, "captioning", runs, [51, 52], 2)
    assert set(figures) == {"before", "captioning", "loop1"}
    assert figures["before"]["caption_meteor"] == pytest.approx(0.2)
    found = figures["captioning"]
    assert found["rate"] == "3e-4" and found["tried"]["3e-4"] == pytest.approx(0.6)
    assert found["caption_meteor"]["mean"] == pytest.approx(0.35)
    assert found["caption_meteor"]["seeds"] == pytest.approx([0.3, 0.4])
    assert figures["loop1"]["caption_meteor"]["seeds"] == pytest.approx([0.3])
    text = table.markdown(dict(captioning=figures))
    assert "| captioning | 3e-4 | +0.350 [+0.350, +0.350] |" in text


def test_useful_groups_are_those_that_differ(tmp_path):
    comparison, output = COMPARISONS["ranking"], tmp_path / "run"
    (output / "rollouts").mkdir(parents=True)
    (output / "config.json").write_text(json.dumps(dict(num_generations=2, batch_size=2)))
    rewards = [0, 1, 0, 0, 1, 1, 0, 1, 0, 1]  # of 5 groups; the third stands in for the second
    lines = [json.dumps(dict(reward=reward)) for reward in rewards]
    (output / "rollouts" / "rank0.jsonl").write_text("\n".join(lines))
    (output / "evaluation").mkdir()
    for step, value in ((0, 0.25), (10, 0.75)):
        file = output / "evaluation" / f"step_{step}.json"
        file.write_text(json.dumps(dict(values=dict(seg_iou=[value]))))
    found = table.signal([output], comparison, 10)
    assert found == dict(useful=3 / 20, rollouts=5, curve={0: 0.25, 10: 0.75})
