"""The card of a chain: supervised training, its export, reinforcement learning, its export."""

import json
import shutil

import pytest
from huggingface_hub import ModelCard

from rl_train.export.model_card import TRAININGS, hub_datasets
from rl_train.policies.qwen_vl import example_question
from sa2va_hf import Sa2VAModel
from tests import supervised
from tests.runs import CHECKPOINT, run, unmeasured
from tools import export


@pytest.fixture(scope="module")
def chain(data, tmp_path_factory):
    """(the base, the export of supervised training, that of reinforcement learning on it)"""
    root, monkeypatch = tmp_path_factory.mktemp("chain"), pytest.MonkeyPatch()
    base = root / "models--owner--Tiny-Sa2VA" / "snapshots" / "f00"
    shutil.copytree(CHECKPOINT, base)
    (base / "README.md").write_text("---\nlicense: mit\n---\n# The original's card\n")
    for _ in unmeasured(monkeypatch):
        how = dict(max_steps=1, save_steps=1, merge_at_end=None)
        supervised.run(data, root / "sft", model_path=base, **how)
        run(data, root / "rl", model_path=root / "sft" / "final_model", **how)
        export.main(words(root / "rl" / "checkpoint_step_1", root / "final"))
    monkeypatch.undo()
    return base, root / "sft" / "final_model", root / "final"


def words(checkpoint, output):
    return ["--checkpoint", str(checkpoint), "--output", str(output), "--role", "policy"]


def test_fields_are_those_of_the_first_base(chain):
    for folder in chain[1:]:
        fields = ModelCard.load(folder / "README.md").data
        assert (fields.base_model, fields.license) == ("owner/Tiny-Sa2VA", "mit")
        assert fields.base_model_relation == "finetune" and fields.datasets is None
        assert fields.library_name == "rl-sa2va"  # AutoModel needs the original's own code
        assert fields.pipeline_tag == "image-text-to-text"
    trainings = ModelCard.load(chain[2] / "README.md").data.to_dict()[TRAININGS]
    assert [t["method"] for t in trainings] == ["supervised training", "reinforcement learning"]
    assert [t["base"] for t in trainings] == ["owner/Tiny-Sa2VA", "final_model of sft"]
    assert [t["data"] for t in trainings] == [["gar:train"]] * 2


def test_text_says_data_metrics_and_loading(chain):
    text = ModelCard.load(chain[2] / "README.md").text
    assert "# owner/Tiny-Sa2VA, trained further" in text and "/tmp" not in text
    assert "merged into final_model of sft. The licence is that of owner/Tiny-Sa2VA." in text
    assert "1. supervised training (region_captions, referring_segmentation), from owner/Ti" in text
    assert "2. reinforcement learning (mask_caption_mask" in text and "`gar:train`" in text
    assert "seg_iou" in text and "95 % interval" in text
    assert "Sa2VAModel.from_pretrained(FOLDER" in text and "trust_remote_code=True" in text
    assert text.count("Please segment the dog in this image.") == 2 and "2402.03300" in text
    warm = ModelCard.load(chain[1] / "README.md").text
    assert "2402.03300" not in warm and "2. " not in warm.partition("## Metrics")[0]


def test_every_card_before_is_kept(chain):
    base, warm, final = chain
    original = (base / "README.md").read_text()
    assert (warm / "README_of_the_base.md").read_text() == original
    assert (final / "README_of_the_base.md").read_text() == original
    earlier = (final / "README_of_training_1.md").read_text()
    assert earlier == (warm / "README.md").read_text()


def test_the_chain_loads_as_its_card_says(chain):
    model = Sa2VAModel.from_pretrained(chain[2], dtype="bfloat16")
    model.require_tokenizer()
    assert (chain[2] / "config.json").read_bytes() == (chain[0] / "config.json").read_bytes()


def test_names_of_data_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "folder").mkdir(parents=True)
    sources = ["gar:owner/set", "dam/LVIS:owner/other=.5", "gar:local/folder", "gar:/home/me/x"]
    assert hub_datasets(sources, ["a/b"]) == ["a/b", "owner/set", "owner/other"]
    assert hub_datasets(["gar:/home/me/x"], []) is None


def test_the_question_of_points_is_that_of_the_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    flags = dict(negative_points="off", coordinates="pixels", max_points=8)
    assert example_question(flags | dict(answer_style="points"), tmp_path) == (
        'Please find "the dog" with points.'
    )
    written = json.loads(json.dumps(flags | dict(answer_style="segzero")))
    segzero = example_question(written, tmp_path)
    assert segzero.startswith("Please find 'the dog' with bbox and points.")
    assert "normalized" not in segzero
    default = dict(flags, answer_style="segzero", coordinates=None)  # Qwen3-VL's
    assert "normalized to [0, 1000]" in example_question(default, tmp_path)
