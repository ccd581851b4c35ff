"""Samples with a question, its answer and further columns, and readers of the user's own."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rl_train import cli
from rl_train.data.base import BAD_QUESTION, Reader, Region
from rl_train.data.dataset_flags import dataset_openers
from rl_train.data.digest import changes, data_facts
from rl_train.data.images import map_file
from rl_train.data.loader import eval_loader
from rl_train.data.mixture import MixtureDataset
from tests.data.gar_rows import read, row, turns
from tests.runs import REGIONS, complaint_of, flags

ROWS = [dict(question="How <image>many\ncups?", answer="two [SEG] cups", level=n) for n in (3, 4)]


class Questions(Reader):
    """{data_dir}/questions.json: [{"image", "question", "answer", "level"}]; no regions."""

    def __init__(self, data_dir: str | Path):
        super().__init__()
        for number, entry in enumerate(json.loads(Path(data_dir, "questions.json").read_text())):
            self._add_region(
                Region(
                    partial(map_file, Path(data_dir, "cup.png")),
                    None,
                    entry["answer"],
                    image_id=f"questions/{number}",
                    question=entry["question"],
                    answer=entry["answer"],
                    columns=dict(level=entry["level"]),
                )
            )
        self._finish(data_dir)


def write_questions(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (20, 12), (90, 0, 0)).save(folder / "cup.png")
    (folder / "questions.json").write_text(json.dumps(rows))
    return folder


class Inputs:
    """A model that needs nothing of an image."""

    def check(self, sample):
        pass

    def prepare(self, sample):
        return torch.zeros(1)

    def collate(self, prepared):
        return prepared


def test_the_humans_turn_is_kept(tmp_path):
    """The last one before the answer, without what stands for the image."""
    asked = turns(("human", "Hello."), ("user", "<image>\nWhat is <Prompt0>?"), ("gpt", "A cup."))
    dataset = read(tmp_path, row(conversations=asked), row(conversations=asked[2:]))
    assert (dataset[0]["question"], dataset[0]["answer"]) == ("What is?", "A cup.")
    assert dataset[0]["caption"] == "A cup." and "question" not in dataset[1]


def test_another_question_is_other_data(tmp_path):
    """A resume would not mix them."""
    facts = [
        data_facts(read(tmp_path / name, row(conversations=turns(("human", name), ("gpt", "A.")))))
        for name in ("what", "where", "what ")
    ]
    assert "captions" in changes(facts[0], facts[1]) and facts[0]["masks"] == facts[1]["masks"]
    levels = [write_questions(tmp_path / f"own{n}", [ROWS[0] | dict(level=n)]) for n in (1, 2)]
    assert "captions" in changes(*(data_facts(Questions(folder)) for folder in levels))


def test_a_batch_holds_questions_answers_and_columns(tmp_path):
    """Samples of a set without questions have None, in a mixture."""
    own = Questions(write_questions(tmp_path / "own", ROWS))
    plain = read(tmp_path / "gar", row(conversations=turns(("gpt", "A cup."))))
    mixture = MixtureDataset(dict(own=own, gar=plain), [1.0, 1.0])
    for workers in (0, 1):
        [batch] = eval_loader(mixture, Inputs(), batch_size=3, num_workers=workers)
        assert batch.questions == ["How many cups?"] * 2 + [None]
        assert batch.answers == ["two cups"] * 2 + [None]
        assert batch.columns == dict(level=[3, 4, None])
        assert batch.masks[0].all() and batch.masks[0].shape == (12, 20)
    [batch] = eval_loader(plain, Inputs(), batch_size=1, num_workers=0)
    assert batch.questions is batch.answers is None and batch.columns == {}


def test_a_bad_question_is_counted(tmp_path):
    rows = [ROWS[0], ROWS[0] | dict(question=" <image>"), ROWS[0] | dict(question="a\ud800")]
    dataset = Questions(write_questions(tmp_path / "own", rows))
    report = dataset.report()
    assert (report["rows"], report["skipped"]) == (3, {BAD_QUESTION: 2})
    assert report["first_skipped"] == {BAD_QUESTION: ["questions/1", "questions/2"]}


def test_a_reader_is_named_by_its_module(data, tmp_path):
    folder, name = write_questions(tmp_path / "own", ROWS), f"{__name__}:Questions"
    mixed = flags(data, tmp_path / "run", data_mixture=f"{name}:{folder}=2")
    opened, _ = dataset_openers(cli.parse(mixed).data)
    assert opened(data / "train").image_id(REGIONS) == f"{name}:questions/0"
    changes = dict(dataset=name, data_dir=folder, eval_data_dir=f"{name}:{folder}")
    opened, heldout = dataset_openers(cli.parse(flags(data, tmp_path / "run", **changes)).data)
    for found in (opened(folder), heldout(f"{name}:{folder}")):
        assert type(found) is Questions and len(found) == 2
        assert np.asarray(found[1]["image"])[0, 0].tolist() == [90, 0, 0]


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(dataset="gra"), "--dataset gra: must be one of gar, dam, "),
        (dict(dataset="gra"), "or module:Class of your own reader"),
        (dict(dataset="no_such_module:Reader"), "--dataset no_such_module:Reader: No module named"),
        (dict(dataset="json:dumbs"), "--dataset json:dumbs: module 'json' has no attribute"),
        (dict(dataset="json:__doc__"), "--dataset json:__doc__: must be module:class, such as"),
        (dict(data_mixture="json:dumbs:x"), "--data_mixture json:dumbs: module 'json' has no"),
        (dict(eval_data_dir="json:dumbs:x"), "--eval_data_dir json:dumbs: module 'json' has no"),
        (dict(dataset="json:dumps", subsets="a"), "--subsets: only for gar, dam,"),
    ],
)
def test_what_is_no_reader_is_refused(data, tmp_path, changes, words):
    assert words in complaint_of(flags(data, tmp_path / "run", **changes))
