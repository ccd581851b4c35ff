"""Untrained changes of a comparison's base: as the comparison runs them, and their arithmetic."""

import json

import pytest
import torch

from tests.runs import CHECKPOINT, on_one_core
from tools.experiments.scalar_baseline import GRIDS
from tools.experiments.tasks import table, untrained
from tools.experiments.tasks.arms import COMPARISONS

one_core = pytest.fixture(autouse=True)(on_one_core)


def run(data, output, comparison: str) -> dict:
    """Run the module on 4 training regions and 3 held-out ones; return what it writes."""
    flags = dict(comparison=comparison, model_path=CHECKPOINT, output=output / "out.json")
    flags |= dict(data_dir=data / "train", eval_data_dir=data / "heldout", dtype="float32")
    flags |= dict(num_samples=4, eval_samples=3, num_generations=2, num_workers=0)
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    untrained.main([*words, "--max_completion_length", "16"])
    return json.loads((output / "out.json").read_text())


def test_masks_of_phrases(data, tmp_path, monkeypatch):
    for name in GRIDS:
        monkeypatch.setitem(GRIDS, name, ([0.5, 1.0], 1.0))
    found = run(data, tmp_path, "referring")
    rivals = {rival["name"]: rival["values"] for rival in found["rivals"]}
    assert set(found["greedy"]) == {"iou", "found", "pointed"} and len(found["references"]) == 3
    assert {"threshold of the mask", "table of words in the phrase"} < set(rivals)
    ceiling = rivals["best of G by the true reward"]["iou"]
    for name, values in rivals.items():
        assert len(values["iou"]) == len(values["found"]) == 3
        if name.startswith("best of G"):  # of the same samples
            assert all(a <= b for a, b in zip(values["iou"], ceiling))


def test_captions_of_regions(data, tmp_path):
    found = run(data, tmp_path, "captioning")
    rivals = {rival["name"]: rival["values"]["meteor"] for rival in found["rivals"]}
    assert {"table of words", "one caption for all", "best of G by own likelihood"} < set(rivals)
    ceiling = rivals["best of G by the true reward"]
    assert all(a <= b for a, b in zip(rivals["best of G by length"], ceiling))


def test_no_mask_where_a_score_is_low():
    sure = torch.tensor([[5.0, -1.0], [0.5, -1.0]])
    unsure = torch.tensor([[0.5, -1.0], [-1.0, -1.0]])
    none = torch.full((2, 2), -torch.inf)  # an answer without [SEG]
    assert untrained.highest_logit(sure) == 5 and untrained.area(sure) == 0.5
    assert untrained.confidence(unsure) == pytest.approx(torch.tensor(0.5).sigmoid().item())
    assert untrained.confidence(none) == 0 == untrained.area(none)
    variant = untrained.none_below(untrained.highest_logit, 1.0, 0.7)

    class Answered:
        logits = [sure, unsure, none]

    masks = [logits > 0 for logits in variant(Answered)]
    assert masks[0].tolist() == [[True, False], [False, False]]  # above the threshold of .7
    assert not masks[1].any() and not masks[2].any()


def test_each_phrase_once():
    """A phrase that is said twice keeps its first mask, and counts once."""
    left, right = torch.tensor([[1.0, -1.0]]), torch.tensor([[-1.0, 1.0]])
    answers = untrained.GroundedAnswers.__new__(untrained.GroundedAnswers)
    answers.references = ["A red cup and a blue box."]
    answers.texts = ["<p>a red cup</p> [SEG] and <p>a red cup</p> [SEG]"]
    answers.logits = [[left, right]]
    answers.targets = [torch.stack([left > 0])]
    assert answers.matched(lambda logits: logits > 0) == [0.5]
    once = answers.once()
    assert once["matched"] == [1.0] and once["meteor"] == answers.meteor(["a red cup"])


def test_changes_and_differences_are_of_the_reported_half(tmp_path):
    """Regions 1 and 3 are reported; the own arm's figure is a mean over seeds."""
    comparison, ends = COMPARISONS["captioning"], []
    for seed, after in enumerate((0.6, 0.8)):
        columns = dict(caption_meteor=[0.0, after, 0.0, after])
        ends.append(tmp_path / f"{seed}.json")
        ends[-1].write_text(json.dumps(dict(values=columns, references=list("abcd"))))
    rival = dict(name="table", chosen={"red": "orange"}, values=dict(meteor=[0, 0.5, 0, 0.5]))
    record = dict(references=list("abcd"), greedy=dict(meteor=[0, 0.4, 0, 0.4]), rivals=[rival])
    file = tmp_path / "untrained.json"
    file.write_text(json.dumps(record))
    found = table.untrained(file, comparison, ends)["table"]
    assert found["caption_meteor"]["mean"] == pytest.approx(0.1)
    assert found["own_minus"]["caption_meteor"]["mean"] == pytest.approx(0.2)
    text = "\n".join(table.markdown_untrained(dict(table=found)))
    assert "| table | {'red': 'orange'} | +0.100 [+0.100, +0.100] | +0.200 [+0.200," in text
    file.write_text(json.dumps(record | dict(references=list("abce"))))
    with pytest.raises(ValueError, match="of other samples than"):
        table.untrained(file, comparison, ends)
