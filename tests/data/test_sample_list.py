"""--sample_list: which samples it names, and what is wrong with a list."""

import json
import re

import pytest
from torch.utils.data import Subset

from rl_train.data.digest import changes, data_facts
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.sample_list import listed_samples, read_sample_list


@pytest.fixture(scope="module")
def dataset(data):
    return GraspAnyRegionDataset(data / "train")


def write(folder, *rows):
    file = folder / "list.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


def test_rows_are_ids_or_objects_in_any_order(dataset, tmp_path):
    """A sample named twice is there once, in the data set's order; so in a Subset."""
    part = Subset(dataset, [5, 3, 8])
    names = [dataset.image_id(i) for i in (8, 5)]
    file = write(
        tmp_path, names[0], "", json.dumps(dict(image_id=names[1], variance=0.1)), names[0]
    )
    listed = listed_samples(part, file)
    assert listed.indices == [0, 2]  # of the part
    assert [listed[k]["image_id"] for k in range(2)] == [names[1], names[0]]
    assert read_sample_list(file) == {names[0]: 1, names[1]: 3}


def test_another_list_is_other_data(dataset, tmp_path):
    """A resume compares these facts. The order of the rows does not count."""
    names = [dataset.image_id(i) for i in range(4)]
    facts = [
        data_facts(listed_samples(dataset, write(tmp_path, *rows)))
        for rows in (names[:3], names[2::-1], names[1:], names[:2])
    ]
    assert not changes(facts[0], facts[1])
    assert "other captions" in changes(facts[0], facts[2]) or changes(facts[0], facts[2])
    assert "rows 3 -> 2" in changes(facts[0], facts[3])


def test_what_is_wrong_is_one_sentence_with_the_row(dataset, tmp_path):
    names = [dataset.image_id(i) for i in range(2)]
    held_out = Subset(dataset, [0])
    for samples, rows, words in (
        (dataset, (names[0], "nothing"), "row 2: no training sample has the image_id nothing"),
        (held_out, names, f"row 2: no training sample has the image_id {re.escape(names[1])}"),
        (dataset, ('{"image_id": ',), "row 1: is no JSON object with an image_id"),
        (dataset, ('{"id": "a"}',), "row 1: is no JSON object with an image_id"),
        (dataset, ("",), "names no sample"),
    ):
        with pytest.raises(ValueError, match=f"^--sample_list .*{words}"):
            listed_samples(samples, write(tmp_path, *rows))
    with pytest.raises(ValueError, match="^--sample_list .*absent: cannot be read"):
        read_sample_list(tmp_path / "absent")
