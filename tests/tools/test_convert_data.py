"""tools/convert_data.py: shards hold what the readers read, split by image; it goes on where it was
stopped, and names what it leaves out."""

import json

import numpy as np
import pyarrow as pa
import pytest

from rl_train.data import DATASETS, GraspAnyRegionDataset
from rl_train.data.arrow import read_shard
from rl_train.data.digest import data_facts
from rl_train.data.errors import BadData
from tests.campaigns.messy_cases import bad_huffman
from tests.data.image_file_sets import (
    CAPTIONS,
    LAYOUTS,
    MASKS,
    write_folders,
    write_images,
    write_json,
    write_sa2va,
)
from tools import convert_data
from tools.demo import refcoco_writer
from tools.experiments.tasks.data import write_grounded


def convert(root, output, *flags, dataset="sa2va", max_bad_fraction=1):
    words = ["--dataset", dataset, "--data_dir", root, "--output", output, *flags]
    words += ["--max_bad_fraction", max_bad_fraction]
    convert_data.main([str(word) for word in words])
    return output


@pytest.fixture
def pictures(tmp_path):
    """Sa2VA's layout: 8 images of one region each, and one of three."""
    names = tuple(f"{letter}.jpg" for letter in "abcdefghi")
    write_images(tmp_path / "set" / "images", names)
    corners = [5, 5, 25, 5, 25, 20, 5, 20]
    rows = [dict(image=name, mask=[[corners]], text=[f"cup {name}"]) for name in names]
    rows[0] |= dict(mask=[[corners]] * 3, text=["a cup", "the cup", "one cup"])
    write_json(tmp_path / "set" / "annotations.json", rows)
    return tmp_path / "set"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_back(tmp_path, layout, capsys):
    name, write = LAYOUTS[layout]
    write(tmp_path / "set")
    before = DATASETS[name](tmp_path / "set")
    dataset = GraspAnyRegionDataset(convert(tmp_path / "set", tmp_path / "out", dataset=name))
    for sample, caption, mask in zip(dataset, CAPTIONS, MASKS, strict=True):
        assert sample["caption"] == caption and np.array_equal(sample["mask"], mask)
    assert [sample["category"] for sample in dataset] == [sample["category"] for sample in before]
    # The files themselves, not encoded again.
    assert dataset.image_keys.tolist() == before.image_keys.tolist()
    printed = capsys.readouterr().out
    assert "out: 2 regions" in printed
    for reason, places in before.report()["first_skipped"].items():
        assert f"{reason}: 1 ({places[0]})" in printed


def test_images_of_coco_stay_known(tmp_path):
    write_images(tmp_path / "set" / "images", ("COCO_train2014_000000000123.jpg",))
    rows = [dict(image="COCO_train2014_000000000123.jpg", mask=[[[1, 1, 9, 1, 9, 9]]], text=["a"])]
    write_json(tmp_path / "set" / "annotations.json", rows)
    dataset = GraspAnyRegionDataset(convert(tmp_path / "set", tmp_path / "out"))
    assert dataset.coco_ids.tolist() == [123]


def test_no_image_is_on_both_sides(tmp_path, pictures):
    output = convert(pictures, tmp_path / "out", "--heldout_fraction", 0.34)
    train, heldout = (GraspAnyRegionDataset(output / name) for name in ("train", "heldout"))
    keys, heldout_keys = set(train.image_keys.tolist()), set(heldout.image_keys.tolist())
    assert (len(keys), len(heldout_keys), keys & heldout_keys) == (6, 3, set())
    assert len(train) + len(heldout) == 11


def test_it_goes_on_where_it_was_stopped(tmp_path, pictures, monkeypatch, capsys):
    monkeypatch.setattr(convert_data, "ROWS_PER_SHARD", 3)
    whole = convert(pictures, tmp_path / "whole", "--heldout_fraction", 0.34)
    write_shard, written = convert_data.write_shard, []

    def stopped_at_the_third(rows, path):
        written.append(path.name)
        if len(written) == 3:
            path.with_name(f"{path.name}.part").write_bytes(b"half")
            raise KeyboardInterrupt
        write_shard(rows, path)

    monkeypatch.setattr(convert_data, "write_shard", stopped_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        convert(pictures, tmp_path / "out", "--heldout_fraction", 0.34)
    assert not (tmp_path / "out").exists()
    convert(pictures, tmp_path / "out", "--heldout_fraction", 0.34)
    assert "out.unfinished holds 2 shards: going on" in capsys.readouterr().out
    # The two whole shards were not written again.
    files = sorted(path.relative_to(whole) for path in whole.rglob("*.arrow"))
    assert len(written) == len(files) + 1
    everything = sorted(p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*.*"))
    assert everything == files
    for file in files:
        assert (whole / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


def test_other_data_do_not_go_on(tmp_path, pictures, monkeypatch):
    monkeypatch.setattr(convert_data, "write_shard", lambda rows, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(pictures, tmp_path / "out")
    monkeypatch.undo()
    (tmp_path / "out.unfinished" / "progress.json").write_text(
        json.dumps(dict(source=dict(rows=1), damaged={}))
    )
    with pytest.raises(
        SystemExit, match="out.unfinished is an unfinished conversion of other data"
    ):
        convert(pictures, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_samples_are_left_out_by_name(tmp_path, pictures, capsys):
    good = (pictures / "images" / "b.jpg").read_bytes()
    (pictures / "images" / "b.jpg").write_bytes(bad_huffman(good))
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"1 of 11 regions \(9.1%\) are bad, .* decoded: 1"):
            convert(pictures, tmp_path / "out", max_bad_fraction=0.05)
    assert not (tmp_path / "out").exists()
    # With a higher limit the same command goes on from there.
    dataset = GraspAnyRegionDataset(convert(pictures, tmp_path / "out", max_bad_fraction=0.1))
    assert len(dataset) == 10
    assert "left out: damaged image: 1 (annotations/1/0)" in capsys.readouterr().out


def test_too_many_bad_rows_stop_before_anything_is_written(tmp_path):
    write_sa2va(tmp_path / "set")
    with pytest.raises(SystemExit, match=r"3 of 5 regions .* no image: 1 \(annotations/2/0\)"):
        convert(tmp_path / "set", tmp_path / "out", max_bad_fraction=0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_several_regions_and_none_are_read_back(tmp_path):
    refcoco_writer.main(
        f"--output_dir {tmp_path / 'set'} --name grefcoco --num_train 4 --num_heldout 1".split()
    )
    before = DATASETS["grefcoco"](tmp_path / "set")
    dataset = GraspAnyRegionDataset(convert(tmp_path / "set", tmp_path / "out", dataset="grefcoco"))
    assert dataset.has_objects and dataset.names_nothing and len(dataset) == len(before)
    numbers = set()
    for found, sample in zip(dataset, before, strict=True):
        assert np.array_equal(found["objects"], sample["objects"])
        assert np.array_equal(found["mask"], sample["mask"])
        assert found["caption"] == sample["caption"]
        numbers.add(len(found["objects"]))
    assert {0, 1} < numbers


def test_phrases_of_grounded_captions_are_read_back(tmp_path):
    """With them the shards train and measure the task as the files themselves do."""
    write_grounded(tmp_path / "set", 0, {"train": 2, "heldout": 1})
    before = DATASETS["gcg"](tmp_path / "set" / "train")
    root = convert(tmp_path / "set" / "train", tmp_path / "out", dataset="gcg")
    dataset = GraspAnyRegionDataset(root)
    for found, sample in zip(dataset, before, strict=True):
        assert found["columns"] == sample["columns"] and len(found["columns"]["phrases"]) == 3
        assert np.array_equal(found["objects"], sample["objects"])
        assert found["caption"] == sample["caption"]
    [path] = root.glob("*.arrow")
    table = read_shard(path, {})
    changed = [cell.replace("a ", "one ") for cell in table["columns"].to_pylist()]
    rewrite(table, path, changed)
    digests = [data_facts(each)["captions"] for each in (dataset, GraspAnyRegionDataset(root))]
    assert digests[0] != digests[1]  # so a resume sees the change
    rewrite(table, path, ["[]", changed[1]])
    with pytest.raises(BadData, match="data-00000-of-00001.arrow row 0: .* no JSON object"):
        GraspAnyRegionDataset(root)


def rewrite(table, path, columns: list[str]):
    """Write a shard with other cells in its column "columns"."""
    number = table.schema.get_field_index("columns")
    other = table.set_column(number, "columns", pa.array(columns))
    written = path.with_suffix(".new")  # the file itself is mapped into memory
    with pa.ipc.new_stream(str(written), other.schema) as writer:
        writer.write_table(other)
    written.replace(path)


def test_a_large_image_keeps_its_mask(tmp_path, monkeypatch):
    """The mask of a large image is used at a smaller size; a shard holds it at the image's."""
    monkeypatch.setattr("rl_train.data.rle.MASK_PIXELS", 100)
    write_folders(tmp_path / "set")
    output = convert(tmp_path / "set", tmp_path / "out", dataset="folders")
    monkeypatch.undo()
    assert np.array_equal(GraspAnyRegionDataset(output)[1]["mask"], MASKS[1])


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            ("--heldout_fraction", 0.01),
            "--heldout_fraction 0.01: of 9 images these are 0; choose one from 0.11 to 0.89",
        ),
        (("--subsets", "other"), "holds no other.json: name one by --subsets: annotations"),
    ],
)
def test_flags_that_do_not_fit_are_named(tmp_path, pictures, flags, sentence):
    with pytest.raises(SystemExit, match=sentence) as ended:
        convert(pictures, tmp_path / "out", *flags)
    assert "\n" not in ended.value.code
    assert not (tmp_path / "out").exists()


def test_what_is_there_stays(tmp_path, pictures):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="is not empty"):
        convert(pictures, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]
