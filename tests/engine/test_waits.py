"""The host waits for a GPU at few places of a step, and never in a forward or backward.

A wait in the update costs what Python needs to launch the rest of it, while no kernel runs.
"""

from collections import defaultdict

import pytest
import torch

from rl_train.loggers.metrics import PhaseTimer
from sa2va_hf.to_device import to_device
from tests.pretend import Gpu, There
from tools.benchmarks import workload

FLAGS = "--batch_size 2 --num_generations 2 --max_completion_length 4 --lora_r 4 "
FLAGS += "--micro_batch_size 3 --dtype float32 --reward_weights loop2.meteor=.5 loop2.likelihood=.5"
OPTIONS = workload.Options(
    device="cpu", sizes="tiny", prompt_length=200, answer_tokens=4, flags=FLAGS.split()
)
# Of a rollout its tokens, and of masks how sure they are; regions of drawn masks; rewards; of an
# update what is not finite, its statistics and norms.
ROLLOUT = {"decode:run", "decode:completions"}
ALLOWED = dict(
    encode=set(),
    rollout1=ROLLOUT,
    reference1=set(),
    ask1=set(),
    teacher1={"sa2va_queries:confidence", "base:with_measurements"},
    rollout2=ROLLOUT | {"sa2va_queries:confidence"},
    reference2=set(),
    ask2={"processing_sa2va:region_grid", "sa2va_queries:region_grids"},  # answered in rollout1
    teacher2={"base:with_measurements"},
    update={"loss:faults", "metrics:to_floats", "train:clip_gradients"},
)


def build(monkeypatch, gpu):
    """The work of OPTIONS in float32, by the path of a GPU, on the pretended one if there is."""
    made = workload.random_sa2va_policy

    def policy(*options):
        policy = made(*options)
        policy.model.float()
        policy.base_dtype = torch.float32
        if gpu:
            gpu.take(policy.model)
        policy.engine.fast_on = ("cpu", "meta")
        return policy

    with monkeypatch.context() as patch:
        patch.setattr(workload, "random_sa2va_policy", policy)
        return workload.build(OPTIONS)


def calibrate(made):
    """Give the action noise with a shape, as a run does before its first step."""
    action, size = made.state.tasks[1].action, made.policy.model.config.prompt_size
    action.load_state_dict(dict(sigma=action.sigma, factor=torch.eye(size)))


class Counting(PhaseTimer):
    """A clock that notes how many waits there were before the end of each phase."""

    def __init__(self, gpu):
        super().__init__(torch.device("cpu"))
        self.waits, self.counts = gpu.waits, []

    def __call__(self, phase):
        super().__call__(phase)
        self.counts.append((phase, len(self.waits)))


@pytest.fixture(scope="module")
def gpu_step():
    """({phase: waits} of a step on a pretended GPU, its weights, those of the same on a CPU)."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = Gpu()
        mine, plain = build(patch, gpu), build(patch, None)
    mine.masks = [There(mask, gpu) for mask in mine.masks]
    clock, policy = Counting(gpu), mine.policy
    calibrate(plain)
    with gpu:
        calibrate(mine)
        policy.stop.to(policy.device)
        policy.engine.fused(policy.engine.language_model.lm_head.weight)  # what its first use makes
        gpu.waits.clear()
        mine.step(clock)
    plain.step()
    begins, waits = [0, *(count for _, count in clock.counts)], defaultdict(list)
    for (phase, end), begin in zip(clock.counts, begins):
        waits[phase] += gpu.waits[begin:end]
    weights = {name: p.here for name, p in mine.policy.trainable.items()}
    return waits, weights, dict(plain.policy.trainable)


@pytest.mark.parametrize("phase", ALLOWED)
def test_waits(gpu_step, phase):
    waits = gpu_step[0][phase]
    assert {place for _, place in waits} == ALLOWED[phase], waits


def test_the_numbers_of_the_cpu(gpu_step):
    _, found, expected = gpu_step
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.detach(), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("columns", [1920, 960], ids=["whole", "a part"])
def test_sends_without_a_wait(columns):
    mask = (torch.rand(1080, 1920) > 0.5)[:, :columns]
    to_device(mask, "cuda")  # memory is pinned once
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # cycles
    busy = torch.cuda.Event()
    busy.record()
    there = to_device(mask, "cuda")
    assert not busy.query() and torch.equal(there.cpu(), mask)


def test_two_devices_are_noticed():
    gpu = Gpu()
    with gpu:
        there = There(torch.ones(3), gpu)
        assert (there * 2).here.tolist() == [2, 2, 2] and not gpu.waits
        there + torch.ones(3).to("meta", non_blocking=True)
        assert not gpu.waits
        there[there > 0], there.sum().item(), there.cpu(), torch.ones(3).to("meta")
        assert [operation for operation, _ in gpu.waits][0] == "index" and len(gpu.waits) == 4
        with pytest.raises(AssertionError, match="two devices"):
            there + torch.ones(3)
