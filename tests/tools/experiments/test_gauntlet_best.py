"""tools.experiments.gauntlet.best: what it keeps is worth what it says, and can be read."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.errors import DamagedSample
from rl_train.data.loader import eval_loader
from rl_train.data.split import sample_regions
from rl_train.export.load_policy import open_policy
from rl_train.policies.sa2va_queries import describe, segment_model_captions
from rl_train.rewards import mask_iou
from rl_train.rewards.meteor import meteor
from tests.runs import CHECKPOINT, on_one_core
from tools.experiments.gauntlet import best

one_core = pytest.fixture(autouse=True)(on_one_core)
TOKENS = 16


def argv(data: Path, output: Path, loop: int, *more: str) -> list[str]:
    flags = dict(model_path=CHECKPOINT, data_dir=data / "train", output_dir=output, loop=loop)
    flags |= dict(dtype="float32", max_completion_length=TOKENS, num_workers=0)
    flags |= dict(num_samples=6, num_generations=4, batch_size=3)
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))] + [*more]


def figures_in(printed: str) -> tuple[int, int, float, float]:
    """Return (kept, asked, mean reward, mean of the best) as the command printed them."""
    found = re.search(r": (\d+) of (\d+) regions, mean reward (.+), of the best (.+)", printed)
    return int(found[1]), int(found[2]), float(found[3]), float(found[4])


@torch.no_grad()
def worth_of(folder: Path, loop: int) -> list[float]:
    """Return what the base's own reward is of each region in a folder that was written."""
    dataset = GraspAnyRegionDataset(folder)
    policy = open_policy(CHECKPOINT, None, "policy", "cpu", TOKENS, dtype="float32")
    (batch,) = eval_loader(dataset, policy.preprocessor(TOKENS, 1024), len(dataset), 0)
    features, rows = policy.encode(batch), range(len(batch))
    if loop == 1:
        found = segment_model_captions(policy, features, rows, batch.captions, TOKENS, forced=True)
        return mask_iou(found.masks, batch.masks).tolist()
    captions = describe(policy, features, rows, batch.masks, TOKENS)
    return meteor(batch.captions, captions).tolist()


@pytest.mark.parametrize("loop", [1, 2])
def test_the_best_of_a_region_is_written(loop, data, tmp_path, capsys):
    best.main(argv(data, tmp_path / "best", loop))
    kept, asked, _, highest = figures_in(capsys.readouterr().out)
    values = worth_of(tmp_path / "best", loop)
    assert asked == 6 and len(values) == kept
    assert sum(values) / kept == pytest.approx(highest, abs=1e-3)


def test_a_rival_is_chosen_by_the_reward_of_its_loop(data, tmp_path, capsys):
    weights = "--reward_weights loop1.iou=0 loop1.on_target=1".split()
    best.main(argv(data, tmp_path / "found", 1, *weights))
    *_, highest = figures_in(capsys.readouterr().out)
    assert highest == 1  # found or not: of the regions kept each has an answer that finds it
    wrong = {
        "found": "found=1: the components of loop1 are",
        "judge": "judge: the LLM judge is not",
    }
    for name, words in wrong.items():
        with pytest.raises(SystemExit, match=f"best: --reward_weights loop1.{words}"):
            best.main(argv(data, tmp_path / f"no_{name}", 1, "--reward_weights", f"loop1.{name}=1"))


def test_a_region_whose_answers_are_worth_the_same_is_left_out():
    rewards = torch.tensor([[0.2, 0.5, 0.5], [0.3, 0.3, 0.3], [0.0, 0.0, 0.1]])
    assert best.best_rows(rewards) == [1, None, 8]


def test_a_folder_that_is_there_is_not_written_to(data, tmp_path):
    (tmp_path / "best").mkdir()
    with pytest.raises(SystemExit, match="best: --output_dir .*: is there already, name another"):
        best.main(argv(data, tmp_path / "best", 1))


def test_a_damaged_region_is_left_out_and_said(data, tmp_path, capsys, monkeypatch):
    """Of the others the same is written as without the damage."""
    best.main(argv(data, tmp_path / "whole", 1, "--batch_size", "2"))
    assert "are left out" not in capsys.readouterr().out
    whole = list(GraspAnyRegionDataset(tmp_path / "whole"))
    dataset, read = GraspAnyRegionDataset(data / "train"), GraspAnyRegionDataset.__getitem__
    (first,) = (
        dataset.image_id(i)
        for i in sample_regions(dataset.image_keys, 6)
        if np.array_equal(dataset[i]["mask"], whole[0]["mask"])
    )

    def damaged(dataset, i):
        sample = read(dataset, i)
        if sample["image_id"] == first:
            raise DamagedSample(first, "damaged image")
        return sample

    with monkeypatch.context() as patch:
        patch.setattr(GraspAnyRegionDataset, "__getitem__", damaged)
        best.main(argv(data, tmp_path / "best", 1, "--batch_size", "2"))
    printed = capsys.readouterr().out
    assert f"1 damaged samples are left out; the first: {first}" in printed
    written = list(GraspAnyRegionDataset(tmp_path / "best"))
    assert len(written) == figures_in(printed)[0] == len(whole) - 1 > 0
    for one, other in zip(written, whole[1:]):
        assert np.array_equal(one["mask"], other["mask"]) and one["caption"] == other["caption"]
