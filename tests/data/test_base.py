"""A new reader is one file and one line of DATASETS."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_train import data
from rl_train.config.grpo_config import DataConfig
from rl_train.data.base import Reader, Region
from rl_train.data.dataset_flags import dataset_openers
from rl_train.data.errors import BadData, DamagedSample
from rl_train.data.images import check_read, map_file
from rl_train.data.rle import encode_mask
from rl_train.data.split import split_dataset
from tools import inspect_data

MASK = np.zeros((12, 20), dtype=bool)
MASK[3:9, 4:15] = True


class Folder(Reader):
    """The PNG files of a folder, each with one region and its name as the caption."""

    def __init__(self, data_dir: str | Path):
        super().__init__()
        for path in sorted(Path(data_dir).glob("*.png")):
            region = Region(partial(map_file, path), encode_mask(MASK), path.stem, "", path.name)
            self._num_rows += 1
            self._add(region, check_read(region.read), region.caption, region.rle)
        self._finish(data_dir)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for sets in (data.DATASETS, data.EVAL_DATASETS):  # the second is made from the first
        monkeypatch.setitem(sets, "folder", Folder)
    for k in range(20):
        Image.new("RGB", (20, 12), (9 * k, 0, 0)).save(tmp_path / f"{k:02d}.png")
    return tmp_path


def test_it_is_split_by_its_name(folder):
    config = DataConfig(dataset="folder", data_dir=str(folder), data_mixture=[f"folder:{folder}=2"])
    opened, heldout = dataset_openers(config)
    training, held, _ = split_dataset(opened, str(folder), None, 2, 0.0)
    assert (len(training), len(held), len(heldout(folder))) == (36, 2, 20)  # each file twice
    sample = training[0]
    assert sample["image_id"].startswith("folder") and np.array_equal(sample["mask"], MASK)
    with pytest.raises(ValueError, match="--subsets: only for gar, dam, .* not folder"):
        dataset_openers(replace(config, subsets=["a"]))


def test_it_is_inspected_by_its_name(folder):
    inspect_data.main(["--data_dir", str(folder), "--dataset", "folder", "--num_workers", "0"])
    (folder / "00.png").write_bytes(b"none")
    with pytest.raises(SystemExit, match=r"1 of 20 regions \(5.0%\) are bad"):
        inspect_data.main(["--data_dir", str(folder), "--dataset", "folder", "--num_workers", "0"])
    for path in folder.glob("*.png"):
        path.unlink()
    with pytest.raises(ValueError, match=f"--data_dir {folder} holds no usable region"):
        Folder(folder)


@pytest.mark.parametrize("fault", [BadData("gone"), OSError("cut")])
def test_a_bad_file_is_no_damaged_sample(folder, monkeypatch, fault):
    def read():
        raise fault

    dataset = Folder(folder)
    monkeypatch.setattr(dataset, "_region", lambda i: Region(read, None, "a"))
    with pytest.raises(BadData if isinstance(fault, BadData) else DamagedSample):
        dataset[0]
