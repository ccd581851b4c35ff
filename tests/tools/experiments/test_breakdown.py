"""Evaluations by concept, and the informedness of values, by hand."""

import json

import numpy as np
import pytest
import torch

from rl_train.data import GraspAnyRegionDataset
from tools.experiments import breakdown
from tools.experiments.breakdown import by_group, by_value, informedness

COLORS = {"color": {"red": ["red"], "tan": ["tan"]}}


def evaluation(captions, references, **values) -> dict:
    columns = {name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()}
    ids = [str(i) for i in range(len(captions))]
    return dict(values=columns, image_ids=ids, references=references, captions=captions)


def test_a_word_that_is_always_said_is_not_informed():
    """Its precision is its frequency, its recall 1."""
    true = ["a red dog"] * 6 + ["a tan dog"] * 2
    always = evaluation(["red"] * 8, true)
    rows = {row["value"]: row for row in by_value(always, None, COLORS)}
    assert rows["red"]["tpr"] == 1 and rows["red"]["tnr"] == 0 and rows["red"]["said"] == 8
    assert rows["red"]["informedness"] == rows["tan"]["informedness"] == 0
    right = evaluation(true, true)
    after = {row["value"]: row for row in by_value(right, always, COLORS)}
    assert after["tan"]["informedness"] == after["tan"]["change"] == 1
    assert after["tan"]["true"] == 2 and after["tan"]["change_interval"] == [1, 1]
    swapped = evaluation([text.replace("red", "x").replace("tan", "red") for text in true], true)
    assert by_value(swapped, None, COLORS)[0]["informedness"] == -1


def test_informedness_by_hand():
    counts = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]] + [[0, 0, 0, 1]] * 3, float)
    assert informedness(counts) == pytest.approx(1 / 2 - 1 / 4)
    assert np.isnan(informedness(counts[:2]))


def test_metrics_by_concept_with_counts():
    groups = ["cat", "dog", "cat", "cat"]
    before = evaluation([""] * 4, [""] * 4, seg_iou=[0.0, 0.5, 0.0, 0.3])
    after = evaluation([""] * 4, [""] * 4, seg_iou=[0.3, 0.1, 0.6, 0.6])
    cat, dog = by_group(groups, after, before, ["seg_iou", "not_measured"])
    assert (cat["name"], cat["count"], dog["count"]) == ("cat", 3, 1)
    assert list(cat["metrics"]) == ["seg_iou"]
    assert cat["metrics"]["seg_iou"]["after"] == pytest.approx(0.5)
    assert cat["metrics"]["seg_iou"]["change"] == pytest.approx(0.4)
    assert dog["metrics"]["seg_iou"]["before"] == pytest.approx(0.5)


def written(file, dataset, said, iou) -> str:
    samples = [dataset[i] for i in range(len(dataset))]
    record = dict(
        values=dict(cycle_iou=[iou] * len(samples)),
        image_ids=[sample["image_id"] for sample in samples],
        references=[sample["caption"] for sample in samples],
        captions=[said(sample["caption"]) for sample in samples],
    )
    file.write_text(json.dumps(record))
    return str(file)


def test_as_a_user_runs_it(data, tmp_path, capsys):
    dataset, output = GraspAnyRegionDataset(data / "heldout"), tmp_path / "new" / "b.json"
    before = written(tmp_path / "before.json", dataset, lambda text: "a circle", 0.25)
    after = written(tmp_path / "after.json", dataset, lambda text: text, 0.75)
    argv = ["--evaluation", after, "--before", before, "--data_dir", str(data / "heldout")]
    breakdown.main([*argv, "--output", str(output)])
    printed, found = capsys.readouterr().out, json.loads(output.read_text())
    counts = {row["name"]: row["count"] for row in found["concepts"]}
    assert sum(counts.values()) == len(dataset) and {"circle", "square"} & set(counts)
    assert all(row["metrics"]["cycle_iou"]["change"] == 0.5 for row in found["concepts"])
    assert {row["value"] for row in found["values"]} == set(counts)
    assert all(row["informedness"] == row["change"] == 1 for row in found["values"])
    assert "0.750 (+0.500 [+0.500, +0.500])" in printed and "| concept | " in printed
    attributes = tmp_path / "a.json"
    attributes.write_text(json.dumps({"shape": {name: [name] for name in counts}}))
    breakdown.main([*argv, "--attributes", str(attributes), "--min_count", "2"])
    assert "| shape | " in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["nothing to break by", "no evaluation", "other regions"])
def test_what_is_wrong_is_one_sentence(data, tmp_path, fault):
    dataset = GraspAnyRegionDataset(data / "heldout")
    file = written(tmp_path / "a.json", dataset, str, 0.5)
    argv = ["--evaluation", file, "--data_dir", str(data / "heldout")]
    sentence = "breakdown: --data_dir .*: has no region"
    if fault == "nothing to break by":
        argv, sentence = argv[:2], "breakdown: --data_dir: give it, or --attributes"
    elif fault == "no evaluation":
        (tmp_path / "a.json").write_text("[]")
        sentence = "breakdown: --evaluation .*a.json: is no evaluation"
    else:
        argv[-1] = str(data / "train")
        record = json.loads((tmp_path / "a.json").read_text())
        record["image_ids"][0] = "elsewhere"
        (tmp_path / "a.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=sentence):
        breakdown.main(argv)
