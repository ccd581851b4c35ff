"""The reader of Seg-Zero's training sets, with a folder of masks, on files written here."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from rl_train.data import DATASETS, EVAL_DATASETS, DamagedSample, SegZeroDataset
from tests.data.counts import counts
from tests.data.test_refcoco import BOX, MASK, PHRASES, image_name, ref, write_image
from tests.data.test_refcoco import write as write_refcoco
from tools.gar_writer import encode_image

SIDE = 14
GREY = np.full((SIDE, SIDE), 127, dtype=np.uint8)
GREY[2:9, 3:12] = 128


def write(folder, rows, masks=None):
    """A shard of (id, problem) and the masks {id: grey values}."""
    (folder / "masks").mkdir(parents=True)
    images = [Image.new("RGB", (SIDE, SIDE), (9 * k, 0, 0)) for k in range(len(rows))]
    table = pa.Table.from_pylist(
        [
            dict(id=name, problem=text, solution="", image=dict(bytes=encode_image(i), path=None))
            for (name, text), i in zip(rows, images)
        ]
    )
    with pa.ipc.new_stream(str(folder / "data-00000.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name, grey in (masks or {}).items():
        Image.fromarray(grey).save(folder / "masks" / f"{name}.png")
    return folder


def test_phrases_with_their_masks(tmp_path):
    rows = [("7", "the cup"), ("8", "'a' and 'b'")]
    dataset = SegZeroDataset(write(tmp_path, rows, {"7": GREY, "8": 255 - GREY}))
    assert [dataset[k]["caption"] for k in range(2)] == ["the cup", "'a' and 'b'"]
    assert np.array_equal(dataset[0]["mask"], GREY > 127) and dataset[0]["mask"].sum() == 63
    assert np.array_equal(dataset.mask(1, (SIDE, SIDE)), GREY < 128)
    assert dataset[1]["image"].getpixel((0, 0)) == (9, 0, 0) and dataset.image_id(1) == "8"
    assert len(set(dataset.image_keys)) == 2
    assert pickle.loads(pickle.dumps(dataset))[1]["image_id"] == "8"


def test_unusable_rows_are_counted_by_reason(tmp_path):
    rows = [("1", "a"), ("2", "b"), ("../1", "c"), ("3", " "), ("4", "e"), ("5", "f")]
    masks = {"1": GREY, "3": GREY, "4": GREY[:7], "5": np.zeros_like(GREY)}
    dataset = SegZeroDataset(write(tmp_path, rows, masks))
    assert counts(dataset) == dict(
        kept=3,
        rows=6,
        skipped={"no mask": 2, "blank caption": 1},
        resized_masks=1,
    )
    assert dataset[1]["mask"].shape == (SIDE, SIDE)
    with pytest.raises(DamagedSample, match="5: mask empty"):
        dataset[2]
    (tmp_path / "masks" / "1.png").write_bytes(b"none")
    with pytest.raises(DamagedSample, match="1: bad mask"):
        dataset[0]


def test_without_masks_the_folder_is_named(tmp_path):
    write(tmp_path, [("1", "a")], {"1": GREY}).joinpath("masks").rename(tmp_path / "others")
    with pytest.raises(ValueError, match=r"come without masks.*masks with one {id}.png"):
        SegZeroDataset(tmp_path)
    assert len(SegZeroDataset(tmp_path, tmp_path / "others")) == 1


def test_refcoco_trains_on_train_and_is_held_out_on_val(tmp_path):
    refs = [ref(1, "train"), ref(2, "val", ann_id=1)]
    write_refcoco(tmp_path, [[BOX]], refs, name="refcocog", by="umd")
    write_image(tmp_path / "train2014" / image_name(1))
    for sets, split in ((DATASETS, "train"), (EVAL_DATASETS, "val")):
        dataset = sets["refcocog"](tmp_path)
        assert len(dataset) == len(PHRASES) and np.array_equal(dataset[0]["mask"], MASK)
        assert dataset.image_id(0) == dataset[0]["image_id"]
        assert dataset.image_id(0).startswith(f"refcocog/{split}/")
