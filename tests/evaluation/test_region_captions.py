"""Captions of RefCOCOg's regions as Sa2VA's evaluation measures them, recomputed from the files."""

import json
from types import SimpleNamespace

import pytest

from rl_train.data import RefCOCODataset
from rl_train.evaluation import region_captions
from rl_train.rewards.cider import cider
from rl_train.rewards.meteor import meteor
from sa2va_hf import Sa2VAModel
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT, on_one_core
from tools import evaluate
from tools.demo import refcoco_writer
from tools.evaluate_flags import build_parser

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn") / "new"
    argv = f"--output_dir {folder} --name refcocog --num_train 2 --num_heldout 2"
    refcoco_writer.main(argv.split())
    return folder


def evaluated(root, tmp_path, *more):
    words = f"--model_path {CHECKPOINT} --data_dir {root} --dataset refcocog --dtype float32"
    words += f" --num_workers 0 --protocol sa2va_captions --output {tmp_path / 'out.json'}"
    evaluate.main([*words.split(), *map(str, more)])
    return json.loads((tmp_path / "out.json").read_text())


def test_the_figures_are_those_of_a_computation_by_hand(root, tmp_path):
    """`predict_forward` gives them, region by region, as the original does it."""
    model, tokenizer = Sa2VAModel.from_pretrained(CHECKPOINT), load_tokenizer(CHECKPOINT)
    model.config.raw["max_dynamic_patch"] = 2
    dataset = RefCOCODataset(root, "refcocog", "val")
    phrases, samples = {}, {}
    for sample in dataset:
        region = sample["image_id"].split("/")[2]  # refcocog/val/ref_id/sent_id
        phrases.setdefault(region, []).append(sample["caption"])
        samples.setdefault(region, sample)
    captions = []
    for sample in samples.values():
        said = model.predict_forward(
            image=sample["image"],
            text=f"<image>{region_captions.QUESTION}",
            mask_prompts=[sample["mask"][None]],
            tokenizer=tokenizer,
        )
        captions.append(region_captions.clean(said["prediction"]))
    found = evaluated(root, tmp_path, "--max_tiles", 2)
    assert found["captions"] == captions and len(set(captions)) > 1
    assert found["num_samples"] == len(phrases) < len(dataset)
    references = list(phrases.values())
    expected = cider(references, captions)
    assert found["values"]["region_cider"] == pytest.approx(expected.tolist())
    nearest = [
        max(meteor(true, [caption] * len(true)).tolist())
        for true, caption in zip(references, captions)
    ]
    assert found["values"]["region_meteor"] == pytest.approx(nearest)
    assert set(found["means"]) == {"region_cider", "region_meteor"}


def test_answers_are_cleaned_as_the_original_cleans_them():
    said = (
        "The region marked by region1 shows:  this man's [SEG] <p>dish</p>\nhe is 'red'<|im_end|>"
    )
    # "is" goes inside of words too.
    assert region_captions.clean(said) == "th man's dhhe 'red"
    assert region_captions.clean("Region1: a dog.") == "a dog."


def test_what_the_protocol_refuses(root, tmp_path):
    with pytest.raises(SystemExit, match="--legacy_cleaner: not with --protocol sa2va_captions"):
        evaluated(root, tmp_path, "--legacy_cleaner")
    policy = SimpleNamespace(family="sa2va", region_prompt="outline")
    words = "--model_path m --data_dir d --dataset refcocog --protocol sa2va_captions".split()
    args = build_parser("").parse_args(words)
    with pytest.raises(ValueError, match="knows a region by its outline, and the original's"):
        evaluate.measure_of_protocol(policy, args)
