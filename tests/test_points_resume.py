"""Points through the real entry point: resumed, the worst step, and flags that do not go."""

import pytest
import torch

from rl_train import cli, parts
from rl_train.distributed import Ranks
from rl_train.memory import worst_step
from rl_train.policies.qwen_points import QwenPointsPolicy
from rl_train.train import train
from tests.policies.tiny_points import write_qwen, write_sam
from tests.runs import complaint_of, curve, events, flags, on_one_core, rollouts, run, weights

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """Flags of a run about points, whose model knows no JSON."""
    folder = tmp_path_factory.mktemp("points")
    return dict(
        model_path=write_qwen(folder / "qwen"),
        sam_path=write_sam(folder / "sam"),
        tasks="point_segmentation",
        answer_style="points",
        sam_passes=2,
        image_side=56,
        max_completion_length=4,
        learning_rate=1e-3,
        mask_sigma=None,
    )


def test_a_run_that_was_cut_ends_as_the_whole_one(data, tmp_path, points, monkeypatch):
    """To the last bit, and without a teacher, which is neither kept nor logged."""

    def text(policy, ids):  # a point and a negative one, as the first tokens say
        spots = [[1 + token % 53, 1 + token * 7 % 53] for token in (ids * 2)[:2]]
        return f'{{"points": [{spots[0]}], "negative_points": [{spots[1]}]}}'

    monkeypatch.setattr(QwenPointsPolicy, "completion_text", text)
    how = points | dict(save_steps=1, max_steps=2)
    folder = run(data, tmp_path / "run", **how)
    lines, last = rollouts(folder), weights(folder, 2)
    assert any(line["iou"] != line["iou_without"] for line in lines)
    assert max(curve(folder, "points/sampler_gap").values()) < 1e-4
    assert "teacher/drift" not in events(folder).Tags()["scalars"]
    cut = folder / "checkpoint_step_2"
    assert (cut / "adapter").is_dir() and not (cut / "ema.safetensors").exists()
    cut.rename(tmp_path / "gone")
    run(data, folder, **how, resume="")
    assert {name: t.tolist() for name, t in weights(folder, 2).items()} == {
        name: t.tolist() for name, t in last.items()
    }
    assert rollouts(folder) == lines


def test_the_worst_step_is_tried_and_moves_nothing(data, tmp_path, points):
    config = cli.parse(flags(data, tmp_path, **points))
    built = parts.build(config, Ranks(0, 1, torch.device("cpu")))
    before = {name: p.detach().clone() for name, p in built.state.policy.trainable.items()}
    assert "update" in worst_step(built, train)
    assert all(torch.equal(p, before[name]) for name, p in built.state.policy.trainable.items())


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(sam_path=None), "--sam_path"),
        (dict(sam_path="nowhere"), "--sam_path nowhere: no such folder"),
        (dict(tasks="mask_caption_mask"), "--tasks mask_caption_mask: asks a model of the family"),
    ],
)
def test_a_sentence_for_each_wrong_flag(data, tmp_path, points, capsys, changes, words):
    assert words in complaint_of(capsys, flags(data, tmp_path / "run", **points | changes))
