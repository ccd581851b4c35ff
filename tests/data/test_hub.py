"""Names of hub data sets become folders; the hub is a fake here, `datasets` is the real one."""

import sys

import datasets
import huggingface_hub
import numpy as np
import pytest
from PIL import Image

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.hub import resolve
from tools.gar_writer import encode_mask, write_gar

MASK = np.eye(20, dtype=bool)
ROW = {
    "image": Image.new("RGB", (20, 20), "red"),
    "mask": MASK,
    "caption": "A line.",
    "category": "line",
}


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # must not be asked
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert str(resolve("owner/name")) == "owner/name"
    assert resolve(tmp_path) == tmp_path


def test_a_repository_of_shards_is_taken_as_it_is(tmp_path, monkeypatch):
    asked = []

    def fetch(name, repo_type, allow_patterns):
        asked.append((name, repo_type))
        write_gar([ROW], tmp_path / "snapshot")
        assert "*.arrow" in allow_patterns and not any(
            "pickle" in pattern for pattern in allow_patterns
        )
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    dataset = GraspAnyRegionDataset("some-owner/Some.Name_1")
    assert asked == [("some-owner/Some.Name_1", "dataset")] and dataset[0]["caption"] == "A line."


def rows_for_datasets():
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "mask_rle": {
                "counts": datasets.Value("string"),
                "size": datasets.List(datasets.Value("int64")),
            },
            "conversations": datasets.List(
                {"from": datasets.Value("string"), "value": datasets.Value("string")}
            ),
            "catagory": datasets.List(datasets.Value("string")),
        }
    )
    row = {
        "image": ROW["image"],
        "mask_rle": encode_mask(MASK),
        "catagory": ["line"],
        "conversations": [
            {"from": "human", "value": "<image>"},
            {"from": "gpt", "value": "A line."},
        ],
    }
    return datasets.Dataset.from_list([row, row], features=features)


def check(dataset, num):
    assert len(dataset) == num and dataset.report()["skipped"] == {}
    for i in range(num):
        sample = dataset[i]
        assert np.array_equal(sample["image"], ROW["image"]) and np.array_equal(
            sample["mask"], MASK
        )
        assert (sample["caption"], sample["category"]) == ("A line.", "line")


def test_save_to_disk(tmp_path):
    rows = rows_for_datasets()
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    check(GraspAnyRegionDataset(tmp_path / "one"), 2)
    check(GraspAnyRegionDataset(tmp_path / "two"), 4)
    check(GraspAnyRegionDataset(tmp_path / "two", parts=["train"]), 2)


def test_any_other_repository_is_loaded_by_datasets(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    rows_for_datasets().to_parquet(tmp_path / "rows.parquet")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path / "empty")
    )
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, split: load(
            "parquet",
            data_files=str(tmp_path / "rows.parquet"),
            split=split,
            cache_dir=str(tmp_path / "cache"),
        ),
    )
    check(GraspAnyRegionDataset("owner/name"), 2)


@pytest.mark.parametrize("name", ["missing", "a/b/c", "/no/such/folder", "../x", "owner/na me"])
def test_neither_folder_nor_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"--data_dir .* neither a folder nor the name of a hub data set \(owner/name\)",
    ):
        GraspAnyRegionDataset(name)


@pytest.mark.parametrize(
    "error",
    [
        OSError("no route"),
        ConnectionError("refused"),
        huggingface_hub.errors.LocalEntryNotFoundError("not cached"),
    ],
)
def test_no_network(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ValueError,
        match="--data_dir owner/name is not a folder here and could not be fetched from the hub; "
        "download it",
    ):
        GraspAnyRegionDataset("owner/name")


@pytest.mark.parametrize("library", ["datasets", "huggingface_hub"])
def test_missing_library(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ValueError,
        match=r"--data_dir owner/name is not a folder, and .* pip install -e '\.\[hub\]'",
    ):
        GraspAnyRegionDataset("owner/name")


def test_only_the_training_split_of_a_data_set_is_read(tmp_path, monkeypatch):
    """`datasets` keeps all splits in one cache folder."""
    rows = rows_for_datasets()
    for split, num in (("train", 3), ("test", 2)):
        datasets.concatenate_datasets([rows, rows]).select(range(num)).to_parquet(
            tmp_path / "repository" / "data" / f"{split}-00000.parquet"
        )
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path / "empty")
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, split: load(
            str(tmp_path / "repository"), split=split, cache_dir=tmp_path / "cache"
        ),
    )
    for _ in range(2):
        check(GraspAnyRegionDataset("owner/name"), 3)
