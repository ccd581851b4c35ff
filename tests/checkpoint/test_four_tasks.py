"""A run of both loops and both direct tasks over two data sets goes on to the same bits."""

import pytest

from tests.checkpoint.test_save_load import same_bytes, same_state, training_state
from tests.data.test_questions import ROWS, write_questions
from tests.runs import curve, rollouts, run, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)
TASKS = ["mask_caption_mask", "caption_mask_caption", "referring", "captioning"]
NAMES = ("loop1", "loop2", "referring", "captioning")
WEIGHTS = ["loop1.meteor=.5", "loop2.likelihood=.5", "referring.centre=.5", "captioning.cider=1"]


def test_a_run_that_mixes_four_tasks_is_resumed_to_the_same_bits(data, tmp_path):
    """Each has its own noise, weights and curves."""
    own = write_questions(tmp_path / "own", ROWS)
    how = dict(
        tasks=TASKS,
        data_mixture=f"tests.data.test_questions:Questions:{own}",
        reward_weights=WEIGHTS,
        latent_std=1,
        max_completion_length=8,
        referring_weight=0.5,
        captioning_weight=2,
        learning_rate=1e-3,
        save_steps=1,
    )
    whole = run(data, tmp_path / "whole", **how)
    resumed = run(data, tmp_path / "resumed", resume=whole / "checkpoint_step_1", **how)
    assert same_bytes(whole, resumed, 2) == [True, True]
    before, after = training_state(whole, 2), training_state(resumed, 2)
    for part in ("step", "optimizer", "scheduler", "tasks"):
        assert same_state(before[part], after[part]), part
    assert set(before["tasks"]) == {"loop2", "referring"}
    lines = rollouts(whole)
    assert rollouts(resumed) == [line for line in lines if line["step"] == 1]
    steps = {(line["step"], line["task"]) for line in lines}
    assert steps == {(step, name) for step in (0, 1) for name in NAMES}
    sources = {line["image_id"].split(":")[0] for line in lines}
    assert sources == {"gar", "tests.data.test_questions"}
    masks = {name: [line["mask"] for line in lines if line["task"] == name] for name in NAMES}
    assert masks["loop2"] != masks["referring"]  # each has random numbers of its own
    parts = dict(loop1="meteor", loop2="likelihood", referring="centre", captioning="cider")
    weights = dict(zip(NAMES, (1, 1, 0.5, 2)))
    total = {step: 0.0 for step in (1, 2)}
    for name, part in parts.items():
        assert set(curve(whole, f"{name}/{part}")) == {1, 2}
        for step, loss in curve(whole, f"{name}/loss").items():
            total[step] += weights[name] * loss
    assert curve(whole, "total_loss") == pytest.approx(total, abs=1e-6)
