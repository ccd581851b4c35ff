"""--resample_equal_groups: which samples stand in, on any number of ranks and after a resume."""

import shutil
import sys
import zlib
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.loader import StepSampler
from rl_train.run.resample import Resampler
from tests.ranks import forked
from tests.runs import complaint_of, curve, distance, flags, rollouts, run, unmeasured, weights

one_core = pytest.fixture(autouse=True)(unmeasured)
G = 3
RUN = dict(
    loop2_weight=0, num_generations=G, max_steps=2, save_steps=1, reward_weights="loop1.iou=0"
)
RUN |= dict(reward="often_equal:often_equal", resample_equal_groups=2, seed=0)
RUN["max_completion_length"] = 3  # the reward does not read the answers


def is_equal(image_id: str) -> bool:
    """Return whether all rewards of a sample are equal; those of two samples of three are."""
    return zlib.crc32(image_id.encode()) % 3 > 0


def often_equal(completions, image_ids):
    """0.5, or 0, 0.1, 0.2 in a group."""
    return [0.5 if is_equal(name) else row % G / 10 for row, name in enumerate(image_ids)]


@pytest.fixture(autouse=True)
def reward(monkeypatch):
    module = ModuleType("often_equal")
    module.often_equal = often_equal
    monkeypatch.setitem(sys.modules, "often_equal", module)


def groups(output) -> list[tuple[int, str]]:
    """(step, image_id) of each rolled-out group, in order."""
    return [(line["step"], line["image_id"]) for line in rollouts(output)[::G]]


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """A run of one rank, of two steps of four prompts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = ModuleType("often_equal")
        module.often_equal = often_equal
        monkeypatch.setitem(sys.modules, "often_equal", module)
        for _ in unmeasured(monkeypatch):
            return run(data, tmp_path_factory.mktemp("one") / "run", batch_size=4, **RUN)


# Which samples


def sampler(length=40, rank=0, world_size=1, **options):
    batch = 4 // world_size
    return StepSampler(length, batch, 2, 5, rank=rank, world_size=world_size, **options)


def test_further_samples_are_others_and_follow_from_the_step_alone():
    for step in (0, 3, 7):
        further = sampler().further_indices(step, 3)
        assert further.shape == (3, 8)
        both = np.concatenate([further.ravel(), sampler().step_indices(step)])
        assert len(set(both.tolist())) == 32  # all different
        for rank in range(2):
            assert (sampler(rank=rank, world_size=2).further_indices(step, 3) == further).all()
    assert (further != sampler().further_indices(6, 3)).any()
    # Of 10 samples 8 are in the step: the other two stand in several times.
    assert set(sampler(10).further_indices(0, 2).ravel().tolist()) == set(range(10)) - set(
        sampler(10).step_indices(0).tolist()
    )
    assert (sampler(8).further_indices(0, 2) == -1).all()  # there is no other


def test_further_samples_are_of_the_users_order_and_of_the_same_data_set():
    order = lambda epoch, generator: np.arange(40) % 20  # noqa: E731
    assert sampler(order=order).further_indices(0, 4).max() < 20
    sources = np.repeat([0, 1], [30, 10])
    members = [np.arange(30), np.arange(30, 40)]
    step = lambda number, size: np.array([0, 31, 1, 32, 2, 3, 4, 33])  # noqa: E731
    mixture = SimpleNamespace(sources=sources, members=members, step=step)
    further = sampler(mixture=mixture).further_indices(0, 2)
    assert (sources[further] == sources[step(0, 8)]).all()
    assert not np.isin(further, step(0, 8)).any()


def test_positions_are_those_of_the_step():
    """Sample 1 is in position 7 of the second batch of rank 1 of 2; then its stand-in is."""
    taken, two_ranks = [], sampler(rank=1, world_size=2)

    class Recording:
        def __getitem__(self, indices):
            taken.append(indices)
            return indices

    loader = SimpleNamespace(dataset=Recording())
    policy = SimpleNamespace(encode=lambda batch: None)
    state = SimpleNamespace(policy=policy, step=0, tasks=["loop1"])
    step = SimpleNamespace(num_batches=1, rollouts=[])
    differ = iter([[True, False], [False], [True]])
    for _ in Resampler(two_ranks, loader, state, 3).rounds(step, [0, 0], None):
        step.rollouts.append(SimpleNamespace(groups_that_differ=next(differ), replaced=set()))
    further = two_ranks.further_indices(0, 3)
    assert taken == [[further[0, 7]], [further[1, 7]]]
    assert [scored.replaced for scored in step.rollouts] == [{1}, {0}, set()]


# Runs


def test_equal_groups_are_replaced_until_they_differ(one):
    """Each round has as many groups as were equal in the last one; 2 rounds at most."""
    names = {step: [name for s, name in groups(one) if s == step] for step in (0, 1)}
    for step, of_step in names.items():
        counts, rest = [4], of_step
        while len(counts) <= 3 and rest:
            current, rest = rest[: counts[-1]], rest[counts[-1] :]
            counts.append(sum(map(is_equal, current)))
        assert not rest and len(counts) >= 3  # nothing was rolled out beyond
        assert len(set(of_step)) == len(of_step)
        kept = sum(1 for name in of_step if not is_equal(name))
        assert curve(one, "loop1/frac_useful")[step + 1] == pytest.approx(kept / 4)
        frac = curve(one, "loop1/frac_replaced")[step + 1]
        assert frac == pytest.approx((len(of_step) - 4) / len(of_step))
        assert kept > sum(not is_equal(name) for name in of_step[:4])  # it was worth it
    assert distance(weights(one, 2), weights(one, 1)) > 1e-6


def test_two_ranks_are_as_one(data, one, tmp_path):
    ended = forked(tmp_path, *[lambda: run(data, tmp_path / "two", batch_size=2, **RUN)] * 2)
    assert [status for status, _ in ended] == [0, 0], ended

    def lines(output):
        keys = ("step", "image_id", "completion", "reward", "advantage")
        return sorted(tuple(line[key] for key in keys) for line in rollouts(output))

    assert lines(tmp_path / "two") == lines(one)
    assert distance(weights(tmp_path / "two", 2), weights(one, 2)) < 1e-5


def test_a_resumed_run_takes_the_same_samples_bit_for_bit(data, one, tmp_path):
    output = shutil.copytree(one, tmp_path / "run")
    shutil.rmtree(output / "checkpoint_step_2")
    run(data, output, resume="", batch_size=4, **RUN)
    assert groups(output) == groups(one)
    expected, found = weights(one, 2), weights(output, 2)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_the_flag_nothing_is_replaced(data, one, tmp_path):
    how = RUN | dict(resample_equal_groups=0, max_steps=1)
    plain = run(data, tmp_path / "run", batch_size=4, **how)
    first_step = [group for group in groups(one) if group[0] == 0]
    assert groups(plain) == first_step[:4] != first_step


def test_not_with_rewards_by_another_sample_of_the_batch(data, tmp_path):
    """A round may be of one sample."""
    argv = flags(data, tmp_path, resample_equal_groups=1, ablation_reward="other")
    assert "--resample_equal_groups 1: not with --ablation_reward other" in complaint_of(argv)


def test_not_where_a_step_takes_all_samples(data, tmp_path):
    samples, few = GraspAnyRegionDataset(data / "train"), tmp_path / "few.txt"
    few.write_text("\n".join(samples.image_id(i) for i in range(4)))
    argv = flags(data, tmp_path / "run", batch_size=4, sample_list=few, resample_equal_groups=1)
    sentence = complaint_of(argv)
    assert "--resample_equal_groups 1: a step takes all 4 samples" in sentence
