"""The table of data sets: what each reader is opened with."""

from functools import partial

import pytest

from rl_train.data.registry import DATASETS, EVAL_DATASETS, opener_of


@pytest.mark.parametrize(
    "name, given, expected",
    [
        ("gar", dict(subsets=["a"]), dict(parts=["a"])),
        ("dam", dict(subsets=["a", "b"]), dict(splits=["a", "b"])),
        ("refcoco", {}, dict(name="refcoco", split="train")),
        ("refcoco", dict(is_eval=True), dict(name="refcoco", split="val")),
        ("refcoco+", dict(subsets=["testA"]), dict(name="refcoco+", split="testA")),
        ("refcocog", dict(image_root="i"), dict(name="refcocog", split="train", image_root="i")),
        ("reasonseg", dict(is_eval=True), dict(default_split="val")),
        ("coco", dict(subsets=["a"], image_root="i"), dict(split="a", image_root="i")),
    ],
)
def test_what_a_data_set_is_opened_with(monkeypatch, name, given, expected):
    sets = EVAL_DATASETS if given.get("is_eval") else DATASETS
    monkeypatch.setitem(sets, name, partial(lambda folder, **options: options, **fixed(sets[name])))
    assert opener_of(name, **given)("x") == expected


def fixed(opener) -> dict:
    """Options that DATASETS itself gives a reader."""
    return opener.keywords if isinstance(opener, partial) else {}
