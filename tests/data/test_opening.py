"""Data sets as a command line names them: what each flag chooses, and what it is refused for."""

import pytest

from rl_train import cli
from rl_train.config import DataConfig
from rl_train.data import DATASETS, BadData
from rl_train.data.opening import Ingredient, reader, readers, unique
from rl_train.data.samples import Counts
from rl_train.endings import read_from
from tests.runs import complaint_of, flags


@pytest.mark.parametrize(
    "name, given, expected",
    [
        ("gar", dict(parts=["a"]), dict(parts=["a"])),
        ("dam", dict(parts=["a", "b"]), dict(splits=["a", "b"])),
        ("gar", dict(split="test"), dict(split="test")),
        ("refcoco", {}, dict(name="refcoco", split="train")),
        ("refcoco", dict(heldout=True), dict(name="refcoco", split="val")),
        ("refcoco+", dict(split="testA"), dict(name="refcoco+", split="testA")),
        ("refcocog", dict(image_root="i"), dict(name="refcocog", split="train", image_root="i")),
        ("reasonseg", dict(heldout=True), {}),
    ],
)
def test_what_a_data_set_is_opened_with(name, given, expected):
    assert reader(name, **given).keywords == expected


def test_a_mix_is_parsed():
    assert Ingredient.parse("gar:/data/gar") == Ingredient("gar", (), "/data/gar", 1.0)
    assert Ingredient.parse("dam/LVIS,PACO:o/n=2") == Ingredient("dam", ("LVIS", "PACO"), "o/n", 2)
    odd = Ingredient.parse("refcoco+/val:a:b=c=.5")
    assert odd == Ingredient("refcoco+", ("val",), "a:b=c", 0.5)
    assert odd.reader("i").keywords == dict(name="refcoco+", split="val", image_root="i")
    assert Ingredient.parse("gar/A:x").reader("i").keywords == dict(parts=["A"])
    assert unique(["gar", "dam", "gar", "gar"]) == ["gar", "dam", "gar.2", "gar.3"]


@pytest.fixture
def complaint(data, tmp_path, capsys):
    return lambda **changes: complaint_of(capsys, flags(data, tmp_path / "run", **changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(mix="coco:x"), "--mix coco:x: must be NAME:FOLDER[=WEIGHT], NAME of gar,"),
        (dict(mix="gar"), "--mix gar: must be"),
        (dict(mix="gar:x=y"), "--mix gar:x=y: the weight 'y' is no number above 0"),
        (dict(mix="gar:x=0"), "the weight '0' is no number above 0"),
        (dict(mix="gar:x=nan"), "the weight 'nan'"),
        (dict(mix="segzero/a:o/n"), "--mix segzero/.. parts a: of gar and dam, not segzero"),
        (dict(mix="refcoco/a,b:o/n"), "--mix refcoco/a,b: one split of it at a time"),
        (dict(mix="gar:/nowhere=3"), "--mix gar:/nowhere: no such folder"),
        (dict(dataset="segzero", parts="a"), "--parts a: of gar and dam, not segzero"),
        (dict(dataset="dam", split="a"), "--split a: dam has none"),
        (dict(split="val"), "--split val: --data_dir"),
        (dict(parts="Part9"), "has no part 'Part9'; it has"),
        (dict(image_root="x"), "--image_root x: no data set here is of refcoco,"),
        (dict(eval_dataset="reasonseg", eval_split="a"), "--eval_split a: reasonseg has none"),
        (dict(eval_dataset="reasonseg", eval_parts="a"), "--eval_parts a: of gar and dam, not"),
        (dict(eval_data_dir=None, eval_split="val"), "--eval_split val: needs --eval_data_dir"),
        (dict(eval_data_dir=None, eval_parts="a"), "--eval_parts ['a']: needs --eval_data_dir"),
        (dict(shared_images="ignore"), "--shared_images"),
    ],
)
def test_what_is_refused(complaint, changes, words):
    assert words in complaint(**changes)


def test_a_small_set_of_a_mix_that_is_bad_is_named(complaint, data, tmp_path, monkeypatch):
    spec = f"gar:{data / 'heldout'}"
    monkeypatch.setattr(Counts, "report", lambda self, kept: counted(kept))

    def counted(kept):
        skipped = {"no mask": 3} if kept < 50 else {}
        return dict(kept=kept, rows=kept, skipped=skipped, resized_masks=0)

    said = complaint(mix=spec, eval_data_dir=None)
    assert "gar.2: 3 of 27 regions (11.1%) are bad, more than --max_bad_fraction 0.01" in said


def test_one_data_set_is_opened_as_ever(data, tmp_path):
    config = cli.parse(flags(data, tmp_path))
    opened, heldout = readers(config.data)
    assert (opened.func, opened.keywords) == (DATASETS["gar"], {})
    assert isinstance(heldout(data / "heldout"), DATASETS["gar"])


@pytest.mark.parametrize("parts", [[], ["Part9"]])
def test_what_is_wrong_with_a_folder_is_said_of_its_own_flag(complaint, tmp_path, parts):
    (tmp_path / "empty").mkdir()
    name, of_parts = f"gar:{tmp_path / 'empty'}", "".join(f"/{part}" for part in parts)
    said = complaint(eval_data_dir=tmp_path / "empty", eval_parts=parts or None)
    assert said.startswith(f"rl_train: --eval_data_dir {tmp_path / 'empty'} holds no data-*.arrow")
    said = complaint(mix=name.replace(":", f"{of_parts}:"))
    assert said.startswith(f"rl_train: --mix {name} holds no data-*.arrow")
    assert complaint(eval_split="val").startswith("rl_train: --eval_split val: --eval_data_dir ")


def test_bad_data_is_said_of_the_folder_that_was_read():
    def evaluate():
        raise BadData("a shard is not whole any more")

    data = DataConfig(data_dir="a", eval_data_dir="b", mix=["gar:c", "dam:d=2"])
    with pytest.raises(BadData) as held_out:
        evaluate()
    with pytest.raises(BadData) as trained_on:
        raise BadData("a shard is not whole any more")
    assert read_from(held_out.value, data) == "--eval_data_dir b"
    assert read_from(held_out.value, DataConfig(data_dir="a")) == "--data_dir a"
    assert read_from(trained_on.value, data) == "--data_dir a and --mix gar:c and --mix dam:d=2"
