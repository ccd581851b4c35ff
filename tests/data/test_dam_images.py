"""Images in tar files, hostile ones too, and in the hub's Arrow shards."""

import gzip
import json
import os
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

from rl_train.data import DATASETS, DescribeAnythingDataset
from tests.campaigns.messy_cases import Bomb
from tests.data.counts import counts
from tests.data.dam_splits import IMAGES, PNGS, add, region, samples, write


def test_first_frame_of_a_video(tmp_path):
    write(
        tmp_path / "SAV",
        {"v.1": region(), "v": region(), "w": region()},
        [
            ("./v.10.jpg", PNGS[1]),
            ("v.2.jpg", PNGS[0]),
            ("v.1.png", PNGS[2]),
            ("w.0.jpg", PNGS[1]),
            ("w.jpg", PNGS[0]),
        ],
    )
    dataset = DescribeAnythingDataset(tmp_path)
    seen = {
        dataset[i]["image_id"]: [
            np.array_equal(dataset[i]["image"], image) for image in IMAGES
        ].index(True)
        for i in range(3)
    }
    assert seen == {
        "SAV/v.1/0": 2,
        "SAV/v/0": 2,
        "SAV/w/0": 0,
    }  # a plain name before any frame, frame 1 before 2 and 10


def test_members_that_are_no_files_are_no_images_and_nothing_is_unpickled(tmp_path):
    path = write(
        tmp_path / "SAV",
        {name: region() for name in ("a", "d", "e", "f")},
        [("a.png", PNGS[0]), ("a.pickle", pickle.dumps(Bomb()))],
    )
    with tarfile.open(path, "a") as tar:
        add(tar, "d.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "e.png", type=tarfile.LNKTYPE, linkname="a.png")
        add(tar, "f.png", type=tarfile.FIFOTYPE)
        add(tar, "folder", type=tarfile.DIRTYPE)
    dataset = DescribeAnythingDataset(tmp_path)
    assert samples(dataset) == [("SAV/a/0", "A cup.")]
    assert counts(dataset) == {
        "rows": 4,
        "kept": 1,
        "skipped": {"no image": 3},
        "resized_masks": 0,
    }


def test_the_reader_imports_no_pickle():
    import rl_train.data.dam

    assert "pickle" not in vars(rl_train.data.dam)


def sized(size: int, kind: bytes) -> bytes:
    """A member's header that says a size of any sign, of base 256."""
    header = bytearray(tarfile.TarInfo("b.png").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (b"\xff" if size < 0 else b"\x80") + (size % 2**88).to_bytes(11, "big")
    header[148:157] = b" " * 8 + kind
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("damage", ["pipe", "header", "backwards"])
def test_what_a_tar_file_lacks_is_no_image(tmp_path, damage):
    path = write(
        tmp_path / "SAV", {"a": region(), "b": region()}, [("a.png", PNGS[0]), ("b.png", PNGS[1])]
    )
    whole = path.read_bytes()
    at = whole.index(b"b.png")
    if damage == "pipe":
        os.mkfifo(path.with_name("1.tar"))
    else:
        header = b"\xff" * 512 if damage == "header" else sized(-1024, b"0")
        path.write_bytes(whole[:at] + header + whole[at + 512 :])
    skipped = {} if damage == "pipe" else {"no image": 1}
    assert DescribeAnythingDataset(tmp_path).report()["skipped"] == skipped


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "gzip", "endless", "endless name"])
def test_unreadable_tar_is_named(tmp_path, damage):
    path = write(
        tmp_path / "SAV", {"a": region(), "b": region()}, [("a.png", PNGS[0]), ("b.png", PNGS[1])]
    )
    whole = path.read_bytes()
    at = whole.index(b"b.png")
    path.write_bytes(
        {
            "cut": whole[: at + 600],
            "garbage": b"garbage" * 200,
            "empty": b"",
            "gzip": gzip.compress(whole),
            "endless": whole[:at] + sized(2**60, b"0") + whole[at + 512 :],
            "endless name": whole[:at] + sized(2**60, b"L") + whole[at + 512 :],
        }[damage]
    )
    with pytest.raises(ValueError, match=f"{path} is not a readable tar file"):
        DescribeAnythingDataset(tmp_path)


def test_image_of_a_later_tar_and_workers(tmp_path):
    write(tmp_path / "SAV", {}, [(f"{i}.png", PNGS[i]) for i in range(2)], tar="2.tar")
    write(
        tmp_path / "SAV", {str(i): region() for i in range(3)}, [("2.png", PNGS[2])], tar="10.tar"
    )
    dataset = DATASETS["dam"](tmp_path)
    assert [np.array_equal(dataset[i]["image"], IMAGES[i]) for i in range(3)] == [True] * 3
    blob = pickle.dumps(dataset)
    assert len(blob) < 3000 and samples(pickle.loads(blob)) == samples(dataset)

    def collate(items):
        return [(item["image_id"], np.asarray(item["image"]).sum()) for item in items]

    alone = list(DataLoader(dataset, batch_size=1, collate_fn=collate))
    assert list(DataLoader(dataset, batch_size=1, collate_fn=collate, num_workers=2)) == alone


IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize("kind", [IMAGE_TYPE, pa.binary(), pa.large_binary()])
def test_hub_form_in_arrow(tmp_path, kind):
    def cell(data):
        return {"bytes": data, "path": None} if kind == IMAGE_TYPE else data

    (tmp_path / "SAV").mkdir()
    (tmp_path / "SAV" / "annotations.json").write_text(
        json.dumps({str(i): region() for i in range(4)})
    )
    schema = pa.schema(
        [
            ("__key__", pa.string()),
            ("jpg", kind),
            ("0.jpg", kind),
            ("1.jpg", kind),
            ("pickle", pa.binary()),
        ]
    )
    rows = [
        {"__key__": "0", "jpg": cell(PNGS[0])},
        {
            "__key__": "1",
            "1.jpg": cell(PNGS[0]),
            "0.jpg": cell(PNGS[1]),
            "pickle": pickle.dumps(Bomb()),
        },
        {"__key__": "2"},
        {"__key__": None, "jpg": cell(PNGS[0])},
    ]
    with pa.ipc.new_stream(str(tmp_path / "SAV" / "data-00000-of-00001.arrow"), schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema), max_chunksize=1)
    dataset = DescribeAnythingDataset(tmp_path)
    assert samples(dataset) == [("SAV/0/0", "A cup."), ("SAV/1/0", "A cup.")] and dataset.report()[
        "skipped"
    ] == {"no image": 2}
    assert all(np.array_equal(dataset[i]["image"], IMAGES[i]) for i in range(2))


def test_hub_form_that_is_compressed_or_of_another_type(tmp_path):
    (tmp_path / "SAV").mkdir()
    (tmp_path / "SAV" / "annotations.json").write_text(json.dumps({"0": region(), "1": region()}))
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    for key, column in (("0", pa.array([PNGS[0]])), ("1", pa.array([3]))):
        table = pa.table({"__key__": pa.array([key]), "jpg": column})
        path = str(tmp_path / "SAV" / f"data-{key}.arrow")
        with pa.ipc.new_stream(path, table.schema, options=options) as writer:
            writer.write_table(table)
    dataset = DescribeAnythingDataset(tmp_path)
    assert np.array_equal(dataset[0]["image"], IMAGES[0])
    assert dataset.report()["skipped"] == {"no image": 1}
