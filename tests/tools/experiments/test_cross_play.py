"""Cross-play as a user runs it, of the demo model with itself and with one that cannot be heard."""

import json

import pytest
import torch
from torch.utils.data import Subset

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.split import sample_regions
from rl_train.distributed.process_group import RankInfo
from rl_train.evaluation.evaluate import EvalSpec, evaluate
from rl_train.rollout import Batch
from tests.runs import CHECKPOINT, on_one_core
from tools.experiments import cross_play

one_core = pytest.fixture(autouse=True)(on_one_core)


def flags(data, speakers, listeners, *more) -> list[str]:
    numbers = "--num_samples 3 --batch_size 2 --max_completion_length 16 --num_workers 0"
    return [
        *("--speakers", *map(str, speakers), "--listeners", *map(str, listeners)),
        *(
            "--data_dir",
            str(data / "heldout"),
            "--dtype",
            "float32",
            *numbers.split(),
            *map(str, more),
        ),
    ]


def test_the_policy_hears_itself_as_in_an_evaluation(data, model, tmp_path, monkeypatch, capsys):
    """Whatever is opened is the demo model here: all speak alike, and no change is seen."""
    opened = []

    def open_policy(path, checkpoint, role, device, tokens, flag, **how):
        opened.append((flag, str(path), role))
        return model

    monkeypatch.setattr(cross_play, "open_policy", open_policy)
    monkeypatch.setattr(cross_play, "find_base", lambda *_: None)
    file = tmp_path / "new" / "cross.json"
    asked = ("--distractors", "--output", file)
    cross_play.main(flags(data, ["base", "run/checkpoint_step_2:teacher"], ["base"], *asked))
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    assert opened == [
        ("--speakers", "base", "policy"),
        ("--speakers", "run/checkpoint_step_2", "teacher"),
        ("--listeners", "base", "policy"),
    ]
    dataset = GraspAnyRegionDataset(data / "heldout")
    regions = Subset(dataset, sample_regions(dataset.image_keys, 3))
    heldout = EvalSpec(regions, 2, 16, 0, distractors=True)
    alone = RankInfo(0, 1, torch.device("cpu"))
    expected = evaluate(model, heldout, alone)["policy"]
    assert [pair["speaker"] for pair in found["pairs"]] == ["base", "run/checkpoint_step_2:teacher"]
    for pair in found["pairs"]:
        assert set(pair["means"]) == {"cycle_iou", "cycle_on_target"} and pair["listener"] == "base"
        for name, values in pair["values"].items():
            assert values == expected.values[name].tolist()
            assert pair["means"][name] == pytest.approx(sum(values) / 3)
            assert pair["changes"][name] == [0, 0, 0]
        assert found["captions"][pair["speaker"]] == expected.captions
    assert (found["references"], found["image_ids"]) == (expected.references, expected.image_ids)
    assert f"  {found['pairs'][0]['means']['cycle_iou']:.4f} [" in printed
    assert "+0.0000 [+0.0000, +0.0000]  run/checkpoint_step_2:teacher -> base" in printed


def test_a_pair_and_the_table_by_hand():
    """The second speaker finds one region more of two; its change is paired."""
    first, second = (
        dict(cycle_iou=torch.tensor(values, dtype=torch.float64)) for values in ([0, 1.0], [1.0, 1])
    )
    pairs = [
        cross_play.pair_record("A", "L", first, first),
        cross_play.pair_record("B", "L", second, first),
    ]
    assert [pair["means"]["cycle_iou"] for pair in pairs] == [0.5, 1]
    assert [pair["intervals"]["cycle_iou"] for pair in pairs] == [(0, 1), (1, 1)]
    assert pairs[1]["changes"]["cycle_iou"] == (0.5, 0, 1)
    lines = cross_play.table(pairs, 2).split("\n")
    assert lines[0] == "cycle_iou, n = 2; change: to speaker A"
    assert lines[1].split() == ["0.5000", "[0.0000,", "1.0000]", "A", "->", "L"]
    assert lines[2].split()[3:6] == ["+0.5000", "[+0.0000,", "+1.0000]"]


def test_a_listener_is_given_every_speakers_captions_of_the_same_regions(monkeypatch):
    heard = []
    batches = [
        (None, Batch([4, 2], [None] * 2, [], [], [], None), None),
        (None, Batch([7], [None], [], [], [], None), None),
    ]
    monkeypatch.setattr(cross_play, "batches_of", lambda *_: iter(batches))
    monkeypatch.setattr(
        cross_play,
        "measure_captions",
        lambda p, b, f, captions, n: (
            heard.append(captions) or dict(cycle_iou=[len(text) for text in captions])
        ),
    )
    spoken = {
        "A": cross_play.Spoken(["a", "bb", "ccc"], [4, 2, 7], [], []),
        "B": cross_play.Spoken(["", "", "dd"], [4, 2, 7], [], []),
    }
    args = cross_play.build_parser().parse_args(["--speakers=A", "--listeners=L", "--data_dir=D"])
    found = cross_play.listen("L", spoken, None, args, None)
    assert heard == [["a", "bb"], ["", ""], ["ccc"], ["dd"]]
    assert {name: one["cycle_iou"].tolist() for name, one in found.items()} == dict(
        A=[1, 2, 3], B=[0, 0, 2]
    )
    spoken["B"].index[2] = 5
    with pytest.raises(ValueError, match="--listeners L read other regions than --speakers B"):
        cross_play.listen("L", spoken, None, args, None)


def test_bad_input(data, tmp_path):
    def refused(*words, speakers=(CHECKPOINT,), listeners=(CHECKPOINT,)):
        with pytest.raises(SystemExit) as stopped:
            cross_play.main(flags(data, speakers, listeners))
        message = str(stopped.value)
        assert message.startswith("cross_play: ") and all(word in message for word in words), (
            message
        )

    refused("--speakers", "there twice", speakers=(CHECKPOINT, CHECKPOINT))
    refused("--role teacher", "--speakers", "no checkpoint", speakers=(f"{CHECKPOINT}:teacher",))
    refused("config.json", speakers=(tmp_path,))
    (tmp_path / "training_state.pt").touch()
    (tmp_path / "config.json").write_text(json.dumps(dict(model_path="/gone")))
    refused("--speakers /gone", "no such folder", speakers=(tmp_path,))
