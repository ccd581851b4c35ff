"""The worst step that is tried before the first, and the sentence when a GPU's memory ends."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_train import cli, memory, train
from rl_train.distributed import Ranks
from rl_train.memory import worst_step
from rl_train.objective import MicroBatchLoss
from rl_train.policies import segment_describe, worst_case
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.worst_case import worst_batch
from rl_train.tasks import mask_caption_mask, sampled_mask
from sa2va_hf import Sa2VAModel
from tests.runs import complaint_of, flags, on_one_core, rollouts, run, weights

one_core = pytest.fixture(autouse=True)(on_one_core)
TINY = dict(max_completion_length=6, max_masks_per_answer=3)


def announcing_as_on_a_gpu(monkeypatch) -> list[dict]:
    """Make the next runs try their worst step, on short captions; a list receives its peaks."""
    announced = []
    monkeypatch.setattr(worst_case, "PIXELS", 64 * 64)
    monkeypatch.setattr(
        memory,
        "worst_batch",
        lambda policy, inputs, size: worst_batch(policy, replace(inputs, context=150), size),
    )

    def announce(parts, train):
        announced.append(worst_step(parts, train))
        return "announced"

    monkeypatch.setattr(memory, "announce", announce)
    return announced


def test_the_worst_step_is_as_bad_as_the_flags_allow(data, tmp_path, monkeypatch):
    """All rows with all tokens and masks, described by questions and answers of the same kind."""
    forward, describe = MicroBatchLoss.forward, segment_describe.describe
    segment_prompts, updated, described, asked = Sa2VAPolicy.segment_prompts, [], [], []

    def updating(module, work, rows, *rest):
        loss, statistics = forward(module, work, rows, *rest)
        updated.append((work, rows, loss.item()))
        return loss, statistics

    def describing(*question):
        described.append(len({mask.numpy().tobytes() for mask in question[3]}))
        return describe(*question)

    def segmenting(*question):
        prompts = segment_prompts(*question)
        asked.append((len(prompts), min(map(len, prompts.ids))))
        return prompts

    monkeypatch.setattr(MicroBatchLoss, "forward", updating)
    monkeypatch.setattr("rl_train.tasks.caption_mask_caption.describe", describing)
    monkeypatch.setattr(Sa2VAPolicy, "segment_prompts", segmenting)
    monkeypatch.setattr(sampled_mask, "ask", lambda *_: [])  # for no noise is calibrated here
    announced = announcing_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(train, "run", lambda *_: None)
    how = dict(num_generations=3, micro_batch_size=4)
    how |= dict(control="fixed", mask_truncated="", skip_zero_variance="")  # which are not tried
    run(data, tmp_path, batch_size=2, **how, **TINY)
    assert [list(peaks) for peaks in announced] == [
        ["encode", "rollout", "reference", "teacher", "update"]
    ]
    assert [(rows.start, rows.stop) for _, rows, _ in updated] == 2 * [(0, 4), (4, 6)]
    assert all(loss != 0 for *_, loss in updated)
    for work, *_ in updated:
        assert work.rollout.valid.shape == (6, 6) and work.rollout.valid.all()
        assert all(grid.all() for grid in work.rollout.features.grids)
    assert updated[-1][0].rollout.action.rows.tolist() == [r for r in range(6) for _ in range(3)]
    assert described == [6]  # no two masks are alike, so that each is asked about
    policy, images = updated[-1][0].task.context.policy, updated[-1][0].rollout.features
    shortest = len(policy.prompts.segment("", images.tiles[0]))
    (of_rows, about_captions), (of_images, question) = asked
    assert (of_rows, of_images) == (6, 2)
    assert shortest + segment_describe.GROWTH * 6 - 2 <= about_captions < question


@pytest.mark.parametrize("max_tiles", [1, 5, 12])
def test_no_sample_that_passes_is_longer(policy, max_tiles):
    model = policy(max_tiles=max_tiles)
    batch = worst_batch(model, model.inputs(6), 2)
    assert [len(tiles) for tiles in batch.inputs.tiles] == 2 * [max_tiles + (max_tiles > 1)]
    sample = dict(caption=batch.captions[0], image_id="")
    model.inputs(6).check(sample)
    with pytest.raises(ValueError):
        model.inputs(6).check(sample | dict(caption=sample["caption"] + " a"))


def test_a_run_is_the_same_after_its_worst_step(data, tmp_path, monkeypatch):
    """To the last bit, from the start and resumed, where policy, teacher and reference differ."""
    how = dict(max_steps=2, save_steps=1, learning_rate=1e-3) | TINY
    plain = run(data, tmp_path / "plain", **how)
    announced = announcing_as_on_a_gpu(monkeypatch)
    tried = run(data, tmp_path / "tried", **how)
    assert_same(plain, tried)
    (tried / "checkpoint_step_2").rename(tmp_path / "unused")
    run(data, tried, **how, resume="")
    assert_same(plain, tried)
    assert len(announced) == 2


def assert_same(one: Path, other: Path):
    """Weights of policy and teacher after step 2, and all rollouts."""
    for file in ("trainables.safetensors", "ema.safetensors"):
        a, b = weights(one, 2, file), weights(other, 2, file)
        assert all(torch.equal(a[name], b[name]) for name in a | b)
    assert rollouts(one) == rollouts(other)


def test_what_does_not_fit_is_said_before_the_first_step(data, tmp_path, monkeypatch):
    """Of two GPUs the one with less, and the other's peak."""
    peaks = dict(encode=5.0, update=30.0)
    config, ranks = cli.parse(flags(data, tmp_path)), Ranks(0, 1, torch.device("cuda", 0))
    parts = SimpleNamespace(ranks=ranks, config=config, state=SimpleNamespace(step=0))
    monkeypatch.setattr(memory, "worst_step", lambda *_: peaks)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * memory.GIB, 80 * memory.GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * memory.GIB)
    monkeypatch.setattr(memory, "gather_objects", lambda mine: [mine, (29.0, 40.0)])
    with pytest.raises(ValueError) as stopped:
        memory.announce(parts, None)
    assert str(stopped.value) == (
        "out of GPU memory in update of the worst step: at most 30.0 GiB announced, a GPU has "
        "24.0; lower --micro_batch_size or --max_masks_per_answer or --max_completion_length"
    )
    peaks["update"] = 23.0
    monkeypatch.setattr(memory, "gather_objects", lambda mine: [mine, (22.0, 40.0)])
    assert memory.announce(parts, None) == "at most 23.0 GiB announced, a GPU has 24.0"


def test_what_is_still_to_come_is_counted(policy):
    """Adam's two states until they are there; a storage that records share once."""
    model = policy()
    optimizer = torch.optim.AdamW(model.trainable.values(), lr=0.0)
    state = SimpleNamespace(policy=model, optimizer=optimizer)
    weights = sum(4 * p.numel() for p in model.trainable.values())
    assert memory.adam_to_come(state) == 2 * weights
    for p in model.trainable.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert memory.adam_to_come(state) == 0
    on_gpu, on_cpu = FakeTensor(torch.zeros(1000)), torch.zeros(1000)
    assert memory.held_bytes([dict(a=on_gpu), (on_gpu, on_cpu, None, "text")]) == 4000


class FakeTensor(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


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
        (Sa2VAModel, "vision_features", 2, "evaluation", SMALLER_BATCH),
        (Sa2VAModel, "vision_features", 3, "encode", SMALLER_BATCH),
        (Sa2VAPolicy, "complete", 6, "rollout", SMALLER_BATCH),
        (mask_caption_mask, "segment", 1, "teacher", SMALLER_BATCH),
        (Sa2VAPolicy, "score", 1, "reference", "lower --micro_batch_size"),
        (MicroBatchLoss, "forward", 1, "update", "lower --micro_batch_size"),
        (train, "update", 1, "update", "lower --micro_batch_size"),
    ],
)
def test_memory_that_ends_is_one_sentence(
    data, tmp_path, monkeypatch, capsys, owner, name, at_call, where, remedy
):
    """Of a run that has begun, with flags that it may be resumed with.

    The first call of the vision encoder, and of `complete`, is the calibration's.
    """
    monkeypatch.setattr("rl_train.parts.CALIBRATION_SAMPLES", 2)  # one batch
    runs_out(monkeypatch, owner, name, at_call)
    assert complaint_of(capsys, flags(data, tmp_path, **TINY)) == (
        f"rl_train: out of GPU memory on rank 0, in step 1, in {where}; {remedy}; "
        f"{tmp_path} holds no checkpoint yet, --resume begins anew"
    )


def test_memory_that_ends_before_a_run_begins(data, tmp_path, monkeypatch, capsys):
    """Any flag may then change; the folder is still free."""
    runs_out(monkeypatch, Sa2VAModel, "load_weights")
    sentence = complaint_of(capsys, flags(data, tmp_path, **TINY))
    assert sentence.startswith(
        "rl_train: out of GPU memory on rank 0, before the first step, in st"
    )
    assert "--shard_base" in sentence and sentence.endswith("the same command begins one")
    with monkeypatch.context() as patch:
        runs_out(patch, Sa2VAModel, "vision_features")
        sentence = complaint_of(capsys, flags(data, tmp_path, **TINY))
    assert f"before the first step, in calibration; {SMALLER_BATCH}; " in sentence
    announcing_as_on_a_gpu(monkeypatch)
    runs_out(monkeypatch, MicroBatchLoss, "forward")
    sentence = complaint_of(capsys, flags(data, tmp_path, **TINY))
    assert "in the worst step that the flags allow, tried before the first, in update" in sentence
    assert "lower --micro_batch_size or --max_masks_per_answer or --max_comp" in sentence
    assert not (tmp_path / "config.json").exists()


def test_what_a_resumed_run_may_not_change_is_not_advised(data, tmp_path, monkeypatch, capsys):
    """After a checkpoint; with what was announced, if it was."""
    runs_out(monkeypatch, train, "update", at_call=2)
    monkeypatch.setattr(memory, "announce", lambda *_: "at most 18.5 GiB announced")
    how = dict(save_steps=1, gradient_checkpointing=None, **TINY)
    sentence = complaint_of(capsys, [*flags(data, tmp_path, **how), "--no-gradient_checkpointing"])
    assert sentence == (
        "rl_train: out of GPU memory on rank 0, in step 2, in update; lower --micro_batch_size, or "
        "switch --gradient_checkpointing on; at most 18.5 GiB announced; the last whole checkpoint "
        f"is {tmp_path / 'checkpoint_step_1'}, --resume goes on from it"
    )


def test_another_fault_keeps_its_traceback(data, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Sa2VAModel, "vision_features", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(data, tmp_path, **TINY)
    assert memory.is_exhaustion(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert memory.is_exhaustion(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when .."))
