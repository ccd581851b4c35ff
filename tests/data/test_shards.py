"""Arrow shards: where they are, what is refused by name, and that opening them is cheap."""

import pickle
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from rl_train.data import GraspAnyRegionDataset
from tests.data.gar_rows import IMAGE, MASK, PNG, ids, read, row, write
from tools.gar_writer import SCHEMA, encode_image


def test_zero_row_shards(tmp_path):
    write(tmp_path / "Part1" / "data-0.arrow", [])
    with pa.ipc.new_stream(str(tmp_path / "Part1" / "data-1.arrow"), SCHEMA):
        pass  # not even an empty batch
    write(tmp_path / "Part1" / "data-2.arrow", [row()])
    assert ids(GraspAnyRegionDataset(tmp_path)) == ["Part1/data-2/0"]


@pytest.mark.parametrize("column", ["image", "conversations"])
def test_missing_column_is_named_with_its_file(tmp_path, column):
    path = write(tmp_path / "data-0.arrow", [row()], SCHEMA.remove(SCHEMA.get_field_index(column)))
    with pytest.raises(ValueError, match=f"{path} has no column '{column}'"):
        GraspAnyRegionDataset(tmp_path)


@pytest.mark.parametrize(
    "position, value, kind",
    [
        (0, PNG, pa.binary()),
        (2, "A cup.", pa.string()),
    ],
)
def test_column_of_another_type_is_named_with_its_file(tmp_path, position, value, kind):
    name = SCHEMA.names[position]
    path = write(
        tmp_path / "data-0.arrow",
        [row(**{name: value})],
        SCHEMA.set(position, pa.field(name, kind)),
    )
    with pytest.raises(ValueError, match=re.escape(f"{path}: column '{name}' holds {kind}, not ")):
        GraspAnyRegionDataset(tmp_path)


def test_columns_without_a_value_and_with_wide_offsets(tmp_path):
    wide = pa.schema(
        [
            ("image", pa.struct([("bytes", pa.large_binary()), ("path", pa.null())])),
            (
                "mask_rle",
                pa.struct([("counts", pa.large_string()), ("size", pa.list_(pa.int32(), 2))]),
            ),
            (
                "conversations",
                pa.large_list(
                    pa.struct([("from", pa.large_string()), ("value", pa.large_string())])
                ),
            ),
        ]
    )
    write(tmp_path / "Part1" / "data-0.arrow", [row(), row(mask_rle=None)], wide)
    for number, name in enumerate(("image", "mask_rle", "conversations"), start=1):
        write(
            tmp_path / "Part1" / f"data-{number}.arrow",
            [row(**{name: None})],
            SCHEMA.set(number - 1, pa.field(name, pa.null())),
        )
    dataset = GraspAnyRegionDataset(tmp_path)
    assert ids(dataset) == ["Part1/data-0/0"] and np.array_equal(dataset[0]["mask"], MASK)
    assert dataset.report()["skipped"] == {"no mask": 2, "no image": 1, "blank caption": 1}


def test_unreadable_shard_is_named(tmp_path):
    write(tmp_path / "data-0.arrow", [row()])
    path = write(tmp_path / "data-1.arrow", [row(), row()])
    whole = path.read_bytes()
    for damaged in (
        b"",
        b"garbage" * 30,
        whole[:50],
        whole[:-300],
        b"version https://git-lfs.github.com/spec/v1\n",
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} is not a readable Arrow shard"):
            GraspAnyRegionDataset(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: None,
        lambda folder: folder.mkdir(),
        lambda folder: (folder / "a").mkdir(parents=True) or (folder / "a" / "other.arrow").touch(),
    ],
)
def test_no_folder_or_no_shard(tmp_path, make):
    make(tmp_path / "gar")
    with pytest.raises(ValueError, match=f"--data_dir {tmp_path / 'gar'}"):
        GraspAnyRegionDataset(tmp_path / "gar")


def test_layouts_order_and_parts(tmp_path):
    root = tmp_path / "gar [v1]"  # no glob pattern in a folder's name
    for name in (
        "Part10/data-00000-of-00001",
        "Part2/data-00010-of-00011",
        "Part2/data-00002-of-00011",
        "saved/train/data-00000-of-00001",
        "top",
    ):
        write(root / f"{name}.arrow", [row()])
    (root / "cache-1234.arrow").write_bytes(b"left behind by datasets.map")
    expected = [
        "Part2/data-00002-of-00011/0",
        "Part2/data-00010-of-00011/0",
        "Part10/data-00000-of-00001/0",
        "gar [v1]/top/0",
        "saved/train/data-00000-of-00001/0",
    ]
    assert ids(GraspAnyRegionDataset(root)) == expected
    assert ids(GraspAnyRegionDataset(str(root), parts=["Part10", "saved"])) == [
        expected[2],
        expected[4],
    ]
    assert (
        ids(GraspAnyRegionDataset(root / "Part2")) == expected[:2]
    )  # the same id from the folder itself
    with pytest.raises(ValueError, match="no part 'Part3'; it has Part2, Part10, gar"):
        GraspAnyRegionDataset(root, parts=["Part2", "Part3"])
    write(root / "Part1" / "data-00000-of-00001.arrow", [row()])
    assert set(expected) < set(ids(GraspAnyRegionDataset(root)))  # stable when a part is added


def collate(samples):
    return [
        (sample["image_id"], np.asarray(sample["image"]).sum(), sample["mask"].sum())
        for sample in samples
    ]


def test_workers_and_pickling_see_the_same_samples(tmp_path):
    dataset = read(
        tmp_path,
        *[row(image={"bytes": encode_image(IMAGE.rotate(90 * i)), "path": None}) for i in range(4)],
    )
    blob = pickle.dumps(dataset)
    assert len(blob) < 4000 and PNG[:100] not in blob  # paths and numbers, no image bytes
    copy = pickle.loads(blob)
    assert copy.report() == dataset.report() and ids(copy) == ids(dataset)
    alone = list(DataLoader(dataset, batch_size=2, collate_fn=collate))
    assert list(DataLoader(dataset, batch_size=2, collate_fn=collate, num_workers=2)) == alone


def test_opening_takes_little_memory_and_time(tmp_path):
    """8,000 rows of 25 KB, which are 200 MB in one record batch.

    Their pages are read once, none is decoded.
    """
    noise = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)
    )
    data = encode_image(noise, "JPEG")[:25_000] + b"\xff\xd9"
    write(tmp_path / "data-0.arrow", [row(image={"bytes": data, "path": None})] * 8000)
    code = """
import sys, time
from rl_train.data import GraspAnyRegionDataset
def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0])
before, start = peak(), time.process_time()
dataset = GraspAnyRegionDataset(sys.argv[1])
print(len(dataset), peak() - before, time.process_time() - start)"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    rows, kibibytes, seconds = map(float, done.stdout.split())
    assert rows == 8000 and kibibytes < 300_000 and seconds < 3


def test_import_pulls_no_heavy_package():
    code = """
import sys, rl_train.data
print([m for m in ("torch", "transformers", "datasets", "trl", "openai") if m in sys.modules])"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
        ).stdout
        == "[]\n"
    )
