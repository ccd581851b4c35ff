"""`--low_memory`: AdamW's state in 8 bits, and roles in CPU memory."""

import sys

import pytest
import torch

from rl_train import roles
from rl_train.checkpoint.save_load import WEIGHT_FILES
from rl_train.config.grpo_config import OptimConfig
from rl_train.roles import offloaded_copy
from rl_train.run.build import build_optimizer
from rl_train.run.memory_estimate import standing_memory
from tests.runs import complaint_of, flags, run, unmeasured, weights

one_core = pytest.fixture(autouse=True)(unmeasured)
TINY = dict(max_completion_length=6)


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="it is not installed (extra: quantize)")


def test_a_run_with_offloaded_roles_is_the_run_without(data, tmp_path, monkeypatch):
    copied = []

    def counted(weight):
        copied.append(weight)
        return offloaded_copy(weight)

    monkeypatch.setattr(roles, "offloaded_copy", counted)
    how = dict(max_steps=2, save_steps=2, **TINY)
    outputs = [run(data, tmp_path / "kept", **how)]
    assert not copied
    outputs.append(run(data, tmp_path / "offloaded", low_memory="offload_roles", **how))
    for file in WEIGHT_FILES.values():
        kept, offloaded = (weights(output, 2, file) for output in outputs)
        assert all(torch.equal(kept[name], offloaded[name]) for name in kept)
    assert len(copied) == 2 * len(kept)


def test_what_stands_is_counted(policy):
    model = policy()
    whole = standing_memory(model)
    low = standing_memory(model, low_memory=["adamw_8bit", "offload_roles"])
    assert "teacher and reference" in low  # on a CPU they stay where they are
    assert whole["optimizer"] == 4 * low["optimizer"] and whole["gradients"] == low["gradients"]


def test_state_in_8_bits(policy, bitsandbytes):
    """Large weights have it, and steps differ little from those in 32 bits."""
    changes = []
    for low_memory in ([], ["adamw_8bit"]):
        torch.manual_seed(0)
        model = policy()
        before = {name: weight.detach().clone() for name, weight in model.trainable.items()}
        optimizer = build_optimizer(OptimConfig(learning_rate=1e-3, low_memory=low_memory), model)
        for _ in range(3):
            for weight in model.trainable.values():
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        changes.append({name: w.detach() - before[name] for name, w in model.trainable.items()})
    for parameter, state in optimizer.state.items():
        in_8_bits = {name for name, x in state.items() if getattr(x, "dtype", 0) == torch.uint8}
        assert in_8_bits == ({"state1", "state2"} if parameter.numel() >= 4096 else set())
    wanted, seen = (torch.cat([x.flatten() for x in each.values()]) for each in changes)
    assert 0 < (seen - wanted).norm() < 0.1 * wanted.norm()


def test_a_run_in_8_bits_resumes_as_if_it_had_not_stopped(data, tmp_path, bitsandbytes):
    how = dict(max_steps=2, save_steps=1, low_memory="adamw_8bit", **TINY)
    whole, stopped = (run(data, tmp_path / name, **how) for name in ("whole", "stopped"))
    (stopped / "checkpoint_step_2").rename(tmp_path / "late")
    run(data, stopped, resume="", **how)
    for file in WEIGHT_FILES.values():
        expected, seen = (weights(output, 2, file) for output in (whole, stopped))
        assert all(torch.equal(expected[name], seen[name]) for name in expected)
    how |= dict(max_steps=3, resume="", low_memory="offload_roles")
    sentence = complaint_of(flags(data, stopped, **how))
    assert "--low_memory adamw_8bit: must be as it was in the run so far" in sentence
    run(data, stopped, **how | dict(low_memory=["offload_roles", "adamw_8bit"]))


def test_without_the_library_the_extra_is_named(monkeypatch, data, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    sentence = complaint_of(flags(data, tmp_path / "run", low_memory="adamw_8bit"))
    assert "--low_memory adamw_8bit needs" in sentence and not (tmp_path / "run").exists()
