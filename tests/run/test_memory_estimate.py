"""The memory that a run holds, and the sentence when a GPU's memory ends."""

import pytest
import torch

from rl_train import train
from rl_train.loss import MicroBatchLoss
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.run.error_report import is_out_of_memory
from rl_train.run.memory_estimate import standing_memory
from rl_train.tasks import mask_caption_mask
from sa2va_hf.internvl import InternVLModel
from tests.runs import complaint_of, flags, on_one_core, run

one_core = pytest.fixture(autouse=True)(on_one_core)
TINY = dict(max_completion_length=6)


def test_what_stands_is_counted(policy):
    model = policy()
    weights = sum(4 * p.numel() for p in model.trainable.values())
    standing = standing_memory(model)
    assert standing["optimizer"] == 2 * weights and standing["gradients"] == weights


# When there is none left


def runs_out(monkeypatch, owner, name: str, at_call: int = 1):
    """Make a function run out of memory at its n-th call."""
    real, calls = getattr(owner, name), []

    def exhausted(*args, **kwargs):
        calls.append(name)
        if len(calls) == at_call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, exhausted)


SMALLER_BATCH = "lower --batch_size (and raise --gradient_accumulation_steps)"


@pytest.mark.parametrize(
    "owner, name, at_call, where, remedy",
    [
        (InternVLModel, "vision_features", 2, "evaluation", SMALLER_BATCH),
        (InternVLModel, "vision_features", 3, "encode", SMALLER_BATCH),
        (Sa2VAPolicy, "complete", 6, "rollout", SMALLER_BATCH),
        (mask_caption_mask, "segment_model_captions", 1, "teacher", SMALLER_BATCH),
        (Sa2VAPolicy, "score", 1, "reference", "lower --micro_batch_size"),
        (MicroBatchLoss, "forward", 1, "update", "lower --micro_batch_size"),
        (train, "clip_gradients", 1, "update", "lower --micro_batch_size"),
    ],
)
def test_memory_that_ends_is_one_sentence(
    data, tmp_path, monkeypatch, owner, name, at_call, where, remedy
):
    """The run has begun; the sentence names flags that it may be resumed with.

    The first call of the vision encoder, and of `complete`, is the calibration's.
    """
    monkeypatch.setattr("rl_train.run.start.CALIBRATION_SAMPLES", 2)  # one batch
    runs_out(monkeypatch, owner, name, at_call)
    assert complaint_of(flags(data, tmp_path, **TINY)) == (
        f"rl_train: out of GPU memory on rank 0, in step 1, in {where}; {remedy}; "
        f"{tmp_path} holds no checkpoint yet, --resume auto begins anew"
    )


def test_memory_that_ends_before_a_run_begins(data, tmp_path, monkeypatch):
    """Any flag may then change; the folder is still free."""
    for name in ("load_weights", "vision_features"):  # the model itself; the calibration's batch
        with monkeypatch.context() as patch:
            runs_out(patch, InternVLModel, name)
            sentence = complaint_of(flags(data, tmp_path, **TINY))
        assert sentence.startswith(
            f"rl_train: out of GPU memory on rank 0, before the first step; {SMALLER_BATCH}; "
        )
        assert sentence.endswith("--resume auto begins anew")
    assert not (tmp_path / "config.json").exists()


def test_what_a_resumed_run_may_not_change_is_not_advised(data, tmp_path, monkeypatch):
    """A checkpoint has been written."""
    runs_out(monkeypatch, train, "clip_gradients", at_call=2)
    sentence = complaint_of(flags(data, tmp_path, save_steps=1, **TINY))
    assert sentence == (
        "rl_train: out of GPU memory on rank 0, in step 2, in update; lower --micro_batch_size; "
        f"the last whole checkpoint is {tmp_path / 'checkpoint_step_1'}, --resume goes on from it"
    )


def test_another_fault_keeps_its_traceback(data, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(InternVLModel, "vision_features", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(data, tmp_path, **TINY)
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when .."))
