"""The reader of Seg-Zero's training sets, with a folder of masks, on files written here."""

import io
import pickle

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from rl_train.data import DATASETS, EVAL_DATASETS, DamagedSample, SegZeroDataset
from tests.data.counts import counts
from tests.data.parquet_rows import (
    SIZE,
    row,
    segzero_solution,
    visionreasoner_solution,
    write_parquet,
)
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


def test_without_masks_and_solutions_both_are_named(tmp_path):
    write(tmp_path, [("1", "a")], {"1": GREY}).joinpath("masks").rename(tmp_path / "others")
    with pytest.raises(
        ValueError, match=r"no usable region.*masks of one {id}.png.*need the column 'solution'"
    ):
        SegZeroDataset(tmp_path)
    assert len(SegZeroDataset(tmp_path, tmp_path / "others")) == 1


@pytest.mark.parametrize("one_file", [False, True])
def test_the_published_sets_are_read_without_masks(tmp_path, one_file):
    rows = [row(k, visionreasoner_solution(k) if k == 2 else None) for k in range(5)]
    folder = write_parquet(tmp_path, rows)
    dataset = SegZeroDataset(
        folder / "data" / "train-00000-of-00001.parquet" if one_file else folder
    )
    assert not dataset.has_masks and len(dataset) == 5 and len(set(dataset.image_keys)) == 5
    assert counts(dataset) == dict(kept=5, rows=5, skipped={}, resized_masks=0)
    for k in (4, 0, 2):
        sample = dataset[k]
        stored = Image.open(io.BytesIO(rows[k]["image"]["bytes"]))
        assert sample["caption"] == rows[k]["problem"] and sample["image_id"] == f"img_{k}"
        assert sample["solution"] == rows[k]["solution"]
        assert sample["image"].size == SIZE[::-1]  # it has its own shape again
        assert np.array_equal(sample["stored_image"], stored)
        assert sample["mask"].shape == SIZE and not sample["mask"].any()
    assert not dataset.mask(1, (4, 5)).any()
    assert pickle.loads(pickle.dumps(dataset))[3]["caption"] == "the Cup number 3."


def test_masks_of_the_published_sets_are_used_where_they_lie(tmp_path):
    folder = write_parquet(tmp_path, [row(k) for k in range(3)])
    (folder / "masks").mkdir()
    mask = np.zeros((840, 840), dtype=np.uint8)
    mask[:420, :] = 255
    for k in (0, 2):
        Image.fromarray(mask).save(folder / "masks" / f"img_{k}.png")
    dataset = SegZeroDataset(folder)
    assert dataset.has_masks and dataset.report()["skipped"] == {"no mask": 1}
    sample = dataset[1]
    assert sample["image_id"] == "img_2" and sample["solution"] == segzero_solution(2)
    assert sample["mask"].shape == SIZE and sample["mask"][:30].all()
    assert not sample["mask"][30:].any()


def test_rows_without_boxes_or_size_are_counted(tmp_path):
    rows = [row(0), row(1, "a cup"), row(2, "[]"), row(3, size=(0, 9)), row(4, problem=" ")]
    rows += [row(5, size=(60, None)), row(6, size=(70_000, 9)), row(7, "[[")]
    dataset = SegZeroDataset(write_parquet(tmp_path, rows))
    assert counts(dataset) == dict(
        kept=1,
        rows=8,
        skipped={
            "no solution of boxes and points": 3,
            "bad img_height or img_width": 3,
            "blank caption": 1,
        },
        resized_masks=0,
    )


def test_a_set_without_sizes_keeps_its_stored_shape(tmp_path):
    rows = [row(k) for k in range(2)]
    for values in rows:
        del values["img_height"], values["img_width"]
    sample = SegZeroDataset(write_parquet(tmp_path, rows))[0]
    assert sample["image"].size == (56, 56) and "stored_image" not in sample


def test_wrong_files_are_named(tmp_path):
    rows = [row(0)]
    del rows[0]["problem"]
    with pytest.raises(ValueError, match=r"train-0.*parquet has no column 'problem'"):
        SegZeroDataset(write_parquet(tmp_path, rows))
    (tmp_path / "data" / "train-00000-of-00001.parquet").write_bytes(b"PAR1 not so")
    with pytest.raises(ValueError, match=r"parquet is not a readable Parquet file"):
        SegZeroDataset(tmp_path)


def test_refcoco_trains_on_train_and_is_held_out_on_val(tmp_path):
    refs = [ref(1, "train"), ref(2, "val", ann_id=1)]
    write_refcoco(tmp_path, [[BOX]], refs, name="refcocog", by="umd")
    write_image(tmp_path / "train2014" / image_name(1))
    for sets, split in ((DATASETS, "train"), (EVAL_DATASETS, "val")):
        dataset = sets["refcocog"](tmp_path)
        assert len(dataset) == len(PHRASES) and np.array_equal(dataset[0]["mask"], MASK)
        assert dataset.image_id(0) == dataset[0]["image_id"]
        assert dataset.image_id(0).startswith(f"refcocog/{split}/")
