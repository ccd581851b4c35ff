"""ReasonSeg's reader on Parquet files written here."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rl_train.data import DamagedSample, ReasonSegDataset
from rl_train.data.parquet import read_images
from rl_train.data.text import BLANK
from tests.data.counts import counts
from tools.gar_writer import encode_image

W, H = 20, 12
MASK = np.zeros((H, W), dtype=bool)
MASK[3:9, 4:15] = True
RAGGED = [[True, False], [True]]


def row(k=0, text="what is used to drink", mask=MASK, image=None):
    pixels = Image.new("RGB", (W, H), (7 * k, 0, 0))
    mask = mask.tolist() if isinstance(mask, np.ndarray) else mask
    data = encode_image(pixels) if image is None else image
    return dict(image=dict(bytes=data, path=None), text=text, mask=mask, image_id="a", ann_id="b")


def write(folder, rows, name="test-00000-of-00001.parquet", row_group_size=2):
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / name, row_group_size=row_group_size)
    return folder


def test_rows_are_read_from_all_files(tmp_path):
    write(tmp_path / "data", [row(k, f"text {k}") for k in range(3)])
    write(tmp_path / "data", [row(9, "other", ~MASK)], "test-00001-of-00002.parquet")
    dataset = ReasonSegDataset(tmp_path)
    assert len(dataset) == 4 and len(set(dataset.image_keys)) == 4
    assert counts(dataset) == dict(kept=4, rows=4, skipped={}, resized_masks=0)
    for k in (3, 0, 2, 1):
        sample = dataset[k]
        assert sample["caption"] == (f"text {k}" if k < 3 else "other")
        assert sample["image"].getpixel((0, 0)) == (7 * (k if k < 3 else 9), 0, 0)
        assert np.array_equal(sample["mask"], MASK if k < 3 else ~MASK)
        assert np.array_equal(dataset.mask(k, (H, W)), sample["mask"])
    assert dataset[3]["image_id"] == dataset.image_id(3) == "test-00001-of-00002/0"
    assert pickle.loads(pickle.dumps(dataset))[2]["caption"] == "text 2"  # as for a worker


def test_unusable_rows_are_counted_by_reason(tmp_path):
    cut = encode_image(Image.new("RGB", (W, H)))[:20]
    rows = [row(), row(text=" "), row(mask=None), row(mask=[]), row(mask=RAGGED), row(image=cut)]
    rows += [row(mask=np.zeros_like(MASK)), row(mask=np.ones((H // 2, W // 2), dtype=bool))]
    dataset = ReasonSegDataset(write(tmp_path, rows))
    assert counts(dataset) == dict(
        kept=2,
        rows=8,
        skipped={
            BLANK: 1,
            "no mask": 2,
            "bad mask RLE": 1,
            "unreadable image header": 1,
            "empty mask": 1,
        },
        resized_masks=1,
    )
    assert dataset[1]["mask"].shape == (H, W) and dataset.image_id(1).endswith("/7")


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"--data_dir .*absent: no such folder"):
        ReasonSegDataset(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"holds no \*.parquet"):
        ReasonSegDataset(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not so")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        ReasonSegDataset(tmp_path)
    pq.write_table(pa.table({"text": ["a"], "mask": [5]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'image'"):
        ReasonSegDataset(tmp_path)
    with pytest.raises(ValueError, match="holds no usable region"):
        ReasonSegDataset(write(tmp_path / "b", [row(text="")]))


def test_what_breaks_later_is_told(tmp_path):
    whole = encode_image(Image.fromarray(np.arange(H * W, dtype=np.uint8).reshape(H, W)))
    inside = bytearray(whole)
    inside[45:60] = b"\0" * 15  # in the coded pixels
    dataset = ReasonSegDataset(write(tmp_path, [row(image=bytes(inside)), row()]))
    with pytest.raises(DamagedSample, match="test-00000-of-00001/0"):
        dataset[0]
    dataset = ReasonSegDataset(tmp_path)
    (tmp_path / "test-00000-of-00001.parquet").write_bytes(b"gone")
    read_images.cache_clear()
    with pytest.raises(DamagedSample, match="test-00000-of-00001/1"):
        dataset[1]
