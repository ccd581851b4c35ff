"""Held-out measures of box and points, by a run and by tools.evaluate, and what a run shows.

By a Qwen2.5-VL and a SAM2 of random weights, which say nothing that can be read: they are given
texts in its place.
"""

import json

import pytest

from rl_train.points.parser import NO_JSON
from rl_train.policies.qwen_vl import QwenVLPolicy
from tests.policies.tiny_points import write_qwen, write_sam
from tests.runs import events, on_one_core, rollouts, run
from tools import evaluate

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture
def answering(monkeypatch):
    """Each text follows from its tokens; a third of them cannot be read."""

    def text(policy, ids):
        x, negative = 10 + sum(ids) % 40, [[55, 1 + ids[0] % 50]]
        stated = dict(points=[[x, 28]], negative_points=negative)
        return json.dumps(stated) if sum(ids) % 3 else "so"

    monkeypatch.setattr(QwenVLPolicy, "completion_text", text)


def test_a_run_and_the_tool_measure_the_same(data, tmp_path, answering, capsys):
    models = dict(model_path=write_qwen(tmp_path / "q"), sam_path=write_sam(tmp_path / "s"))
    how = dict(tasks="point_segmentation", answer_style="points", latent_std=None, image_size=56)
    how |= dict(max_completion_length=4, max_prompt_length=64, negative_weight=0.3, sam_passes=2)
    steps = dict(eval_steps=1, save_steps=1, num_generations=4, eval_samples=6, batch_size=3)
    output = run(data, tmp_path / "run", **models, **how, **steps)

    lines = rollouts(output)
    for line in lines:
        read = line["completion"] != "so"
        assert line.get("unparsed") == (None if read else NO_JSON)
        counts = line["iou"] + 0.1 * line["format"] + 0.3 * line["negatives"]
        assert line["reward"] == pytest.approx(counts, abs=1e-6)
        assert (line["reward"] > 0) == read and line["num_negative"] == read
    assert {line.get("unparsed") for line in lines} == {None, NO_JSON}
    tags = events(output).Tags()
    assert "points/rollout_0" in tags["images"]
    curves = {"points/unparsed_frac", f"points/unparsed/{NO_JSON}", "points/gain", "eval/parsable"}
    assert curves | {"eval/gain_negative", "eval/seg_iou_swapped"} <= set(tags["scalars"])

    of_run = json.loads((output / "evaluation" / "step_2.json").read_text())
    assert of_run["num_samples"] == 6 and "teacher" not in of_run
    asked = ["--data_dir", str(data / "heldout"), "--num_samples", "6", "--dtype", "float32"]
    asked += ["--max_completion_length", "4", "--max_prompt_length", "64", "--num_workers", "0"]
    asked += ["--batch_size", "6", "--output", str(tmp_path / "found.json")]
    checkpoint = output / "checkpoint_step_2"
    evaluate.main(["--model_path", str(checkpoint), *asked])  # flags of points are the run's
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["values"] == of_run["values"] and found["captions"] == of_run["captions"]
    assert found["flags"]["answer_style"] == "points" and found["flags"]["sam_passes"] == 2
    assert "gain_negative" in found["intervals"] and "parsable" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--legacy_cleaner: of Sa2VA"):
        evaluate.main(["--model_path", str(checkpoint), *asked, "--legacy_cleaner"])
    evaluate.main(["--model_path", str(checkpoint), *asked, "--best_of", "2"])
    sampled = json.loads((tmp_path / "found.json").read_text())
    assert {name: sampled["values"][name] for name in found["values"]} == found["values"]
    means = sampled["means"]
    assert means["best_of_G_seg_iou"] >= max(means["by_logp_seg_iou"], means["sampled_seg_iou"])
