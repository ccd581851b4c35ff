"""Data sets as a command line names them: what each flag chooses, and what it is refused for."""

import pytest

from rl_train import cli
from rl_train.data.base import Reader
from rl_train.data.dataset_flags import MixtureEntry, dataset_openers, number_repeats
from rl_train.data.registry import DATASETS
from tests.runs import complaint_of, flags


def test_a_mix_is_parsed(monkeypatch):
    assert MixtureEntry.parse("gar:/data/gar") == MixtureEntry("gar", (), "/data/gar", 1.0)
    assert MixtureEntry.parse("dam/LVIS,PACO:o/n=2") == MixtureEntry(
        "dam", ("LVIS", "PACO"), "o/n", 2
    )
    odd = MixtureEntry.parse("refcoco+/val:a:b=c=.5")
    assert odd == MixtureEntry("refcoco+", ("val",), "a:b=c", 0.5)
    for name in ("refcoco+", "gar"):
        monkeypatch.setitem(DATASETS, name, lambda folder, **options: (folder, options))
    assert odd.opener("i")("x") == ("x", dict(split="val", image_root="i"))
    assert MixtureEntry.parse("gar/A:x").opener("i")("x") == ("x", dict(parts=["A"]))
    assert number_repeats(["gar", "dam", "gar", "gar"]) == ["gar", "dam", "gar.2", "gar.3"]


@pytest.fixture
def complaint(data, tmp_path):
    return lambda **changes: complaint_of(flags(data, tmp_path / "run", **changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(data_mixture="lvis:x"),
            "--data_mixture lvis:x: must be NAME[/SUBSET,..]:FOLDER[=WEIGHT], NAME of gar,",
        ),
        (dict(data_mixture="gar"), "--data_mixture gar: must be"),
        (
            dict(data_mixture="gar:x=y"),
            "--data_mixture gar:x=y: no such folder, nor is it a dataset's name",
        ),
        (
            dict(data_mixture="gar:x=0"),
            "--data_mixture gar:x=0: must be NAME[/SUBSET,..]:FOLDER[=WEIGHT], NAME of gar, ",
        ),
        (dict(data_mixture="gar:x=nan"), "--data_mixture gar:x=nan: no such folder, nor"),
        (
            dict(data_mixture="segzero/a:o/n"),
            "--data_mixture segzero/a: only for gar, dam, refcoco,",
        ),
        (dict(data_mixture="gar:/nowhere=3"), "--data_mixture gar:/nowhere: no such folder, nor"),
        (dict(dataset="segzero", subsets="a"), "--subsets: only for gar, dam, refcoco, refcoco+,"),
        (dict(dataset="refcoco", subsets=["val", "test"]), "--subsets: refcoco is read one split"),
        (dict(subsets="Part9"), "has no part 'Part9'; it has"),
        (dict(image_root="x"), "--image_root: no data set here is one of refcoco,"),
        (dict(eval_data_dir="segzero/a:x"), "--eval_data_dir segzero/a: only for gar, dam,"),
        (dict(eval_data_dir="reasonsge:x"), "--eval_data_dir reasonsge:x: must be [NAME[/SUBSET,"),
        (dict(eval_data_dir="gar:/nowhere"), "--eval_data_dir /nowhere: no such folder"),
        (dict(train_eval_overlap="ignore"), "--train_eval_overlap"),
    ],
)
def test_what_is_refused(complaint, changes, words):
    assert words in complaint(**changes)


def test_a_small_set_of_a_mix_that_is_bad_is_named(complaint, data, monkeypatch):
    spec = f"gar:{data / 'heldout'}"
    monkeypatch.setattr(Reader, "report", lambda self: counted(len(self)))

    def counted(kept):
        skipped = {"no mask": 3} if kept < 50 else {}
        return dict(kept=kept, rows=kept, skipped=skipped, resized_masks=0)

    said = complaint(data_mixture=spec, eval_data_dir=None)
    assert "gar.2: 3 of 19 regions (15.8%) are bad, more than --max_bad_fraction 0.01" in said


def test_one_data_set_is_opened_as_ever(data, tmp_path):
    config = cli.parse(flags(data, tmp_path))
    opened, heldout = dataset_openers(config.data)
    assert type(opened(data / "train")) is DATASETS["gar"]
    assert isinstance(heldout(data / "heldout"), DATASETS["gar"])


@pytest.mark.parametrize("parts", [[], ["Part9"]])
def test_what_is_wrong_with_a_folder_is_said_of_its_own_flag(complaint, tmp_path, parts):
    (tmp_path / "empty").mkdir()
    name, of_parts = f"gar:{tmp_path / 'empty'}", "".join(f"/{part}" for part in parts)
    said = complaint(eval_data_dir=name.replace(":", f"{of_parts}:"))
    assert said.startswith(f"rl_train: --eval_data_dir {tmp_path / 'empty'} holds no data-*.arrow")
    said = complaint(data_mixture=name.replace(":", f"{of_parts}:"))
    assert said.startswith(f"rl_train: --data_mixture {name} holds no data-*.arrow")
