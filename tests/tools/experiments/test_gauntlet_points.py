"""Habits of negative points without training: rules by hand, and the command as a user runs it."""

import json

import pytest

from rl_train.points.parser import PointPrompt
from rl_train.policies.qwen_vl import QwenVLPolicy
from tests.policies.tiny_points import write_qwen, write_sam
from tests.runs import on_one_core
from tools.experiments.gauntlet import points
from tools.experiments.gauntlet.points import RULES, at_offset, at_place, inside_edge

one_core = pytest.fixture(autouse=True)(on_one_core)

PROMPT = PointPrompt(((10.0, 20.0, 50.0, 40.0),), ((30.0, 30.0),), ((50.0, 52.0), (90.0, 90.0)))
IMAGE = (100, 104)


@pytest.mark.parametrize(
    "rule, expected",
    [
        (at_offset(0, 0.2), ((50.0, 30.0),)),
        (at_offset(2, 0.1), ((30.0, 40.0),)),
        (at_offset(4, 0.9), ((0.0, 30.0),)),  # no further than the image
        (at_place(0.1, 0.5), ((10.0, 52.0),)),
        (inside_edge(0.05, 0.5), ((12.0, 30.0),)),
        (RULES["away from the middle of the image"]["dropped there"], ((90.0, 90.0),)),
        (RULES["no negative point"]["hidden"], ()),
    ],
)
def test_rules_by_hand(rule, expected):
    ruled = rule(PROMPT, IMAGE)
    assert ruled.boxes == PROMPT.boxes and ruled.positive == PROMPT.positive
    assert len(ruled.negative) == len(expected)
    for found, point in zip(ruled.negative, expected):
        assert found == pytest.approx(point)


def test_what_a_rule_needs_may_be_missing():
    bare = PointPrompt()
    assert at_offset(0, 0.2)(bare, IMAGE) == inside_edge(0.5, 0.5)(bare, IMAGE) == bare


def test_as_a_user_runs_it(data, tmp_path, monkeypatch, capsys):
    """The tiny model knows no JSON: each answer is two points, as its first tokens say."""

    def text(policy, ids):
        spots = [[1 + token % 53, 1 + token * 7 % 53] for token in (ids * 2)[:2]]
        return f'{{"points": [{spots[0]}], "negative_points": [{spots[1]}]}}'

    monkeypatch.setattr(QwenVLPolicy, "completion_text", text)
    rules = {cause: dict(list(of.items())[:1]) for cause, of in RULES.items()}
    monkeypatch.setattr(points, "RULES", rules)
    order, encode = [], points.PointRegions.__init__

    def opened(self, task, dataset, args):
        order.append(f"open {len(dataset)}")
        encode(self, task, dataset, args)

    choose = points.choose
    monkeypatch.setattr(points.PointRegions, "__init__", opened)
    monkeypatch.setattr(points, "choose", lambda *a: (choose(*a), order.append("chosen"))[0])
    flags = dict(model_path=write_qwen(tmp_path / "qwen"), sam_path=write_sam(tmp_path / "sam"))
    flags |= dict(data_dir=data / "train", eval_data_dir=data / "heldout", num_generations=2)
    flags |= dict(output_dir=tmp_path / "out", answer_style="points", image_size=56)
    flags |= dict(dtype="float32", max_completion_length=4, num_workers=0)
    flags |= dict(num_samples=3, eval_samples=2)
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    points.main(argv)
    assert order == ["open 3", "chosen", "open 2"]
    text, found = capsys.readouterr().out, json.loads((tmp_path / "out/table.json").read_text())
    names = [row["name"] for row in found["rows"]]
    assert names[2:7] == list(RULES) and "best of G by hidden" in names
    assert {"best of G by away", "best of G by confidence"} < set(names)
    assert (tmp_path / "out" / "table.md").read_text() in text
    with pytest.raises(SystemExit, match="points: --output_dir .*: holds a table"):
        points.main(argv)
