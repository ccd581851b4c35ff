"""Gains of a threshold or a scale without training, chosen on other regions."""

import json

import pytest
import torch

from rl_train.evaluation.cycle_metrics import measure
from rl_train.policies.sa2va_queries import row_masks, segment_by_own_answer
from tests.runs import CHECKPOINT, draw_data
from tools.experiments import scalar_baseline
from tools.experiments.scalar_baseline import GRIDS, chosen, ious_of, row_logits


def test_what_changes_nothing_is_the_evaluation_s(model, batch):
    """seg_iou at threshold 0 and scale 1; elsewhere other masks."""
    found = ious_of(model, batch, 16)
    with torch.no_grad():
        seg_iou = measure(model, batch, model.encode(batch), 16)["seg_iou"]
    assert any(seg_iou)
    for scalar, (values, neutral) in GRIDS.items():
        assert found[scalar].shape == (4, len(values))
        assert found[scalar][:, values.index(neutral)].tolist() == pytest.approx(seg_iou, abs=1e-6)
        assert found[scalar].std(1).max() > 0.01


def test_several_masks_of_an_answer_are_one(model, batch, images):
    """Above 0 the logits are `row_masks`: the union, and nothing without [SEG]."""
    with torch.no_grad():
        _, _, prompts = segment_by_own_answer(model, images, range(4), batch.captions, 16)
    prompts, segs = prompts[[0, 1, 2]], [0, 0, 2]
    logits = row_logits(model, images, segs, prompts)
    masks = row_masks(model, images, [0, 1, 2, 3], segs, prompts).masks
    assert all(torch.equal(one > 0, mask) for one, mask in zip(logits, masks))
    assert masks[0].any() and not (logits[1] > -100).any()


def test_chosen_on_training_regions_alone(monkeypatch):
    """Ties go to what is nearest to doing nothing."""
    monkeypatch.setitem(GRIDS, "scale", ([0.5, 1.0, 2.0, 4.0], 1.0))
    train = torch.tensor([[0.0, 0.2, 0.6, 0.4], [0.4, 0.2, 0.0, 0.2]]).double()
    heldout = torch.tensor([[0.9, 0.5, 0.4, 0.1]] * 3).double()
    found = chosen("scale", train, heldout)
    assert found["best"] == 2.0 and found["train_gain"] == pytest.approx(0.1)
    assert found["gain"] == pytest.approx(-0.1)  # what is best there, .5, is not looked for
    assert found["interval"] == pytest.approx([-0.1, -0.1])
    assert (found["before"], found["after"]) == pytest.approx((0.5, 0.4))
    assert found["train_means"] == pytest.approx([0.2, 0.2, 0.3, 0.3])
    assert chosen("scale", torch.ones(2, 4), heldout)["best"] == 1.0


def test_as_a_user_runs_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(GRIDS, "scale", ([0.5, 1.0], 1.0))
    data, file = draw_data(tmp_path), tmp_path / "out" / "scalar.json"
    flags = dict(model_path=CHECKPOINT, data_dir=data / "train", eval_data_dir=data / "heldout")
    flags |= dict(dtype="float32", max_completion_length=16, num_workers=0, output=file)
    flags |= dict(num_samples=3, eval_samples=2)
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    scalar_baseline.main(argv)
    found, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert "chosen on 3 regions, held out 2" in printed
    for scalar, (values, _) in GRIDS.items():
        assert found[scalar]["values"] == values and found[scalar]["best"] in values
        assert len(found[scalar]["train"]) == 3 and len(found[scalar]["heldout"]) == 2
        assert f"| {scalar} | {found[scalar]['best']:g} |" in printed
    with pytest.raises(SystemExit, match="scalar_baseline: --data_dir .* share images"):
        scalar_baseline.main([*argv, "--eval_data_dir", str(data / "train")])
