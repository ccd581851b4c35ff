"""A supervised run is one, resumed or shared by two processes; and the copies that it keeps."""

from types import SimpleNamespace

import pytest
import torch

from rl_train.engine import Engine
from rl_train.export.load_policy import load_policy, open_policy
from rl_train.run import build
from rl_train.tasks.sft_tasks import RegionCaptions
from rl_train.utils.io import read_json
from tests.ranks import forked
from tests.runs import curve, distance, on_one_core, weights
from tests.supervised import ALL, built, run

one_core = pytest.fixture(autouse=True)(on_one_core)


def test_a_copy_is_kept_for_whom_asks_it(data, tmp_path):
    """The project's own supervised tasks ask no teacher; a user's class may."""
    made = built(data, tmp_path)
    assert made.state.roles.copies == {}
    with pytest.raises(ValueError, match="the class of a task says asks_teacher"):
        with made.state.roles.use("reference"):
            pass
    copies = {
        asks: build.roles_to_keep(dict(task=kind), samples)
        for asks, samples, kind in (
            ("reinforcement", True, RegionCaptions),
            ("supervised", False, RegionCaptions),
            ("a teacher's", False, SimpleNamespace(asks_teacher=True)),
        )
    }
    assert copies == {
        "reinforcement": ("reference",),
        "supervised": (),
        "a teacher's": ("teacher", "reference"),
    }


def test_a_resumed_run_is_the_one_that_did_not_stop(data, tmp_path, monkeypatch):
    """Bit for bit, with its curves; the merged model says what the checkpoint says."""
    same = dict(max_steps=4, save_steps=2, batch_size=4, eval_samples=8, trainable_modules=ALL)
    whole = run(data, tmp_path / "whole", **same)
    asked = []
    monkeypatch.setattr(Engine, "free_cache", lambda engine: asked.append("evaluation"))
    for step in (2, 4):
        assert (whole / f"checkpoint_step_{step}").is_dir()
    again = run(data, tmp_path / "again", **same)
    for late in ("checkpoint_step_4", "final_model"):
        (again / late).rename(tmp_path / late)
    base = again / "evaluation" / "step_0.json"
    base.unlink()
    asked.clear()
    run(data, again, **same, resume="")
    assert asked == 2 * ["evaluation"]  # of the base and at the end: nothing is kept to sample with
    measured = [read_json(one / "evaluation" / "step_0.json") for one in (whole, again)]
    ious = [measured[run]["means"]["seg_iou"] for run in (0, 1)]
    assert ious[0] == ious[1] != curve(again, "eval/seg_iou")[4]  # of weights that nobody kept
    a, b = weights(whole, 4), weights(again, 4)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not (whole / "checkpoint_step_4" / "adapter").exists()  # nor a LoRA
    assert "LoRA is merged" not in (whole / "final_model" / "README.md").read_text()
    for tag in ("captions/text_loss", "masks/text_loss", "masks/mask_loss", "masks/mask_iou"):
        assert set(curve(whole, tag)) == {1, 2, 3, 4}
    assert set(curve(whole, "eval/seg_iou")) == {0, 4}
    policy = load_policy(whole / "checkpoint_step_4", "policy", None, "cpu", dtype="float32")
    merged = open_policy(whole / "final_model", None, "policy", "cpu", dtype="float32").model
    own = policy.model.state_dict()
    for name, weight in merged.state_dict().items():  # in the base's bfloat16
        if "lora_" not in name:
            name = name.replace(".base_layer", "")
            torch.testing.assert_close(weight, own[name].bfloat16().float())


def test_two_processes_train_as_one(data, tmp_path):
    """All weights, those of the encoders too; of several batches each is encoded for its own."""
    same = dict(max_steps=3, learning_rate=1e-5, eval_samples=2, seed=1, trainable_modules=ALL)
    halves = dict(batch_size=1, gradient_accumulation_steps=2)
    job = lambda: run(data, tmp_path / "two", **halves, **same)  # noqa: E731
    ended = forked(tmp_path, job, job)
    assert [status for status, _ in ended] == [0, 0], ended
    one = run(data, tmp_path / "one", batch_size=4, **same)
    assert distance(weights(tmp_path / "two", 3), weights(one, 3)) < 1e-5
    for tag in ("captions/text_loss", "masks/mask_loss", "masks/mask_iou"):
        of_two, of_one = curve(tmp_path / "two", tag), curve(one, tag)
        assert of_two == pytest.approx(of_one, abs=1e-4)
