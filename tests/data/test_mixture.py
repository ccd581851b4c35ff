"""Several data sets as one: whose samples a step has, whatever the number of processes."""

import itertools

import numpy as np
import pytest
from torch.utils.data import Subset

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.distractors import DistractorMasks
from rl_train.data.loader import StepSampler
from rl_train.data.mixture import MixtureDataset, MixtureSampler, mixture_schedule
from tests.runs import curve, rollouts, run, unmeasured
from tools.demo.make_demo import write_split
from tools.demo.scenes import HELDOUT


class Numbers:
    """A data set of numbers, each on an image of its own."""

    def __init__(self, first, count):
        self.image_keys = np.arange(first, first + count)
        self.coco_ids = -self.image_keys
        self.content_keys = np.stack([self.image_keys, self.coco_ids], 1)
        self.has_masks, self.has_objects, self.names_nothing = True, False, False

    def __len__(self):
        return len(self.image_keys)

    def __getitem__(self, i):
        return dict(image_id=self.image_id(i), caption="")

    def image_id(self, i):
        return f"{self.image_keys[i]}"

    def mask(self, i, size):
        return np.eye(*size, k=i, dtype=bool)

    def report(self):
        return dict(kept=len(self), rows=9, skipped=dict(bad=2), resized_masks=1)


def mix(*sizes, weights):
    starts = np.cumsum([0, *sizes[:-1]])
    sets = {f"s{k}": Numbers(s, n) for k, (s, n) in enumerate(zip(starts, sizes))}
    return MixtureDataset(sets, weights)


def first(sampler, count):
    return list(itertools.islice(sampler, count))


def test_a_sample_is_found_behind_the_others():
    whole = mix(3, 1, 2, weights=[1, 1, 1])
    ids = ["s0:0", "s0:1", "s0:2", "s1:3", "s2:4", "s2:5"]
    assert [whole.image_id(i) for i in range(len(whole))] == ids
    assert [whole[i]["image_id"] for i in range(6)] == ids
    assert whole.image_keys.tolist() == [0, 1, 2, 3, 4, 5] and whole.coco_ids[5] == -5
    assert whole.sources.tolist() == [0, 0, 0, 1, 2, 2]
    assert whole.mask(5, (3, 3)).tolist() == np.eye(3, k=1, dtype=bool).tolist()
    report = whole.report()
    assert (report["kept"], report["rows"], report["resized_masks"]) == (6, 27, 3)
    assert report["skipped"] == dict(bad=6) and report["of_each"]["s1"]["kept"] == 1
    assert DistractorMasks(whole)(5, whole.mask(5, (3, 3))).shape == (0, 3, 3)  # of its own image


@pytest.mark.parametrize("weights", [[1], [1, 1], [2, 1], [0.5, 0.3, 0.2], [1, 7, 0.1, 3]])
def test_every_beginning_has_the_shares(weights):
    shares = np.array(weights) / sum(weights)
    order, none = mixture_schedule(shares, 0, 1000)
    counts = np.stack([np.cumsum(order == k) for k in range(len(weights))], 1)
    due = np.arange(1, 1001)[:, None] * shares
    assert np.abs(counts - due).max() < len(weights) / 2 + 0.5
    assert not none.any()
    for start in (*range(20), 500, 977):
        later, before = mixture_schedule(shares, start, 23)
        assert np.array_equal(later, order[start : start + 23])
        assert before.tolist() == [(order[:start] == k).sum() for k in range(len(weights))]
    if weights == [2, 1]:
        assert order[:6].tolist() == [0, 1, 0, 0, 1, 0]  # due .25 .75 1.25 ..; .5 1.5: by hand


def test_passes_over_each_data_set_are_permutations():
    """20 steps of 6 prompts, 4 : 2, of 10 and 8 samples: eight passes over one, five the other."""
    shares = MixtureSampler(mix(10, 8, weights=[2, 1]), seed=3)
    steps = [shares.step(step, 6) for step in range(20)]
    assert all(shares.count(step.tolist()) == dict(s0=4, s1=2) for step in steps)
    of = [np.concatenate([s[s < 10] for s in steps]), np.concatenate([s[s >= 10] for s in steps])]
    assert sorted(of[0].tolist()) == sorted([*range(10)] * 8)
    assert sorted(of[1].tolist()) == sorted([*range(10, 18)] * 5)
    one, two = (set(map(int, np.concatenate(steps[k : k + 4]))) for k in (0, 4))
    assert {i for i in one if i >= 10} == {i for i in two if i >= 10} == set(range(10, 18))
    assert any(step.tolist() != sorted(step) for step in steps)
    other = MixtureSampler(mix(10, 8, weights=[2, 1]), seed=4)
    assert [s.tolist() for s in steps[:3]] != [other.step(s, 6).tolist() for s in range(3)]


def test_a_step_depends_neither_on_ranks_nor_on_where_a_run_begins():
    def sampler(batch_size, accumulation, **how):
        shares = MixtureSampler(
            mix(11, 5, weights=[1, 1.5]), seed=0
        )  # of its own, as after a restart
        return StepSampler(16, batch_size, accumulation, 0, mixture=shares, **how)

    alone = first(sampler(4, 2), 20)  # 10 steps
    two = [first(sampler(2, 2, rank=rank, world_size=2), 20) for rank in range(2)]
    for step in range(10):
        whole = sum(alone[2 * step : 2 * step + 2], [])
        shared = sum((two[rank][2 * step + a] for a in range(2) for rank in range(2)), [])
        assert whole == shared
    assert first(sampler(4, 2, start=7), 6) == alone[14:]


def test_of_a_subset_the_rest_is_shared_out_and_what_has_no_rest_is_named():
    whole = mix(4, 4, weights=[1, 3])
    kept = Subset(Subset(whole, [7, 0, 1, 5]), [3, 0, 1])  # samples 5, 7, 0
    shares = MixtureSampler(kept, seed=0)
    drawn = np.concatenate([shares.step(step, 4) for step in range(3)])
    assert shares.count(drawn.tolist()) == dict(s0=3, s1=9) and set(drawn) == {0, 1, 2}
    lines = shares.describe(4, 3).split("\n")
    assert lines[0] == (
        "s0: 1 region, 25.0% of all prompts: 1.0 of a step's 4, 3.00 passes in 3 steps"
    )
    assert lines[1].startswith("s1: 2 regions, 75.0%") and "4.50 passes" in lines[1]
    with pytest.raises(ValueError, match="--data_mixture: no region of s0 is left to train on"):
        MixtureSampler(Subset(whole, [5, 6]), seed=0)


def test_a_run_on_two_folders(data, tmp_path, monkeypatch, capsys):
    """Each sample says whose it is, the curves the shares; and it resumes to the same bits."""
    write_split(tmp_path / "more", seed=5, split=HELDOUT, num_scenes=3)
    spec = f"gar:{tmp_path / 'more'}=3"
    how = dict(data_mixture=spec, max_steps=2, batch_size=4, loop2_weight=0, save_steps=1)
    for _ in unmeasured(monkeypatch):
        whole = run(data, tmp_path / "whole", **how)
        said = capsys.readouterr().out
        more = len(GraspAnyRegionDataset(tmp_path / "more"))
        assert f"gar.2: {more} regions, 75.0% of all prompts: 3.0 of a step's 4" in said
        assert f"training data, gar.2: {more} regions of {more} rows" in said
        for name, share in (("gar", 0.25), ("gar.2", 0.75)):
            assert curve(whole, f"data/fraction/{name}") == {1: share, 2: share}
        resumed = run(data, tmp_path / "r", resume=whole / "checkpoint_step_1", **how)
    ids = [[line["image_id"] for line in rollouts(output)] for output in (whole, resumed)]
    assert ids[0][len(ids[0]) // 2 :] == ids[1]
    names = [one.split(":")[0] for one in ids[0]]
    assert names.count("gar.2") == 3 * names.count("gar") > 0
    files = [f / "checkpoint_step_2" / "trainables.safetensors" for f in (whole, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_data_with_and_without_masks_are_not_mixed():
    first, second = Numbers(0, 3), Numbers(3, 3)
    second.has_masks = False
    with pytest.raises(ValueError, match="--data_mixture: b has boxes and points without masks"):
        MixtureDataset(dict(a=first, b=second), [1.0, 1.0])
    first.has_masks = False
    assert not MixtureDataset(dict(a=first, b=second), [1.0, 1.0]).has_masks
