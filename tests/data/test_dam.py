"""The Describe-Anything reader on splits written here: every form of annotations, hostile tar files, the hub's form."""

import gzip
import io
import json
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from rl_train.data import DATASETS, DamagedSample, DescribeAnythingDataset
from rl_train.data.dam import read_annotations
from rl_train.data.masks import rle_runs
from tools.gar_writer import encode_image, encode_mask
from tools.messy_data import Bomb, bad_huffman, huge_png

W, H = 40, 30
MASK = np.zeros((H, W), dtype=bool)
MASK[5:20, 10:35] = True
IMAGES = [
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (H, W, 3), dtype=np.uint8))
    for i in range(3)
]
PNGS = [encode_image(image) for image in IMAGES]


def region(text="A cup.", mask=MASK, **changes):
    return {"caption": text, "mask_rle": encode_mask(mask)} | changes


def add(tar, name, data=b"", **changes):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in changes.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))


def write(folder, annotations, members, tar="000.tar"):
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "annotations.json").write_text(
        annotations if isinstance(annotations, str) else json.dumps(annotations)
    )
    with tarfile.open(folder / "images" / tar, "w") as file:
        for name, data in members:
            add(file, name, data)
    return folder / "images" / tar


def samples(dataset):
    return [(dataset[i]["image_id"], dataset[i]["caption"]) for i in range(len(dataset))]


def test_every_form_of_annotations(tmp_path):
    a, b = region("A cup."), region("A mug.", ~MASK)
    forms = {
        "one": a,
        "plain": [a, b],
        **{
            name: {name: [a, b], "height": H}
            for name in ("regions", "items", "objects", "annotations", "list")
        },
        "keyed": {"7": a, "x": b},
        "nested": {"regions": {"3": b}},
    }
    write(tmp_path / "LVIS", forms, [(f"{name}.png", PNGS[0]) for name in forms])
    dataset = DescribeAnythingDataset(tmp_path)
    both = {
        name: [(f"LVIS/{name}/{k}", text) for k, text in enumerate(("A cup.", "A mug."))]
        for name in forms
    }
    expected = sum([both[name] for name in forms], [])
    expected = [s for s in expected if s[0].split("/")[1] not in ("one", "keyed", "nested")] + [
        ("LVIS/one/0", "A cup."),
        ("LVIS/keyed/7", "A cup."),
        ("LVIS/keyed/x", "A mug."),
        ("LVIS/nested/3", "A mug."),
    ]
    assert sorted(samples(dataset)) == sorted(expected)
    assert dataset.report() == {
        "rows": len(forms),
        "kept": len(expected),
        "skipped": {},
        "resized_masks": 0,
        "ignored_members": 0,
    }
    for i in range(len(dataset)):
        sample = dataset[i]
        assert (
            sample["image"].mode == "RGB"
            and np.array_equal(sample["image"], IMAGES[0])
            and sample["category"] == ""
        )
        assert sample["mask"].dtype == bool and np.array_equal(
            sample["mask"], MASK if sample["caption"] == "A cup." else ~MASK
        )


def test_counts_as_a_list_and_another_size(tmp_path):
    runs, double = (
        rle_runs(encode_mask(MASK))[0].tolist(),
        np.kron(MASK, np.ones((2, 2), dtype=bool)),
    )
    write(
        tmp_path / "LVIS",
        {"a": [region(mask_rle={"counts": runs, "size": [H, W]}), region(mask=double)]},
        [("a.jpg", PNGS[0])],
    )
    dataset = DescribeAnythingDataset(tmp_path)
    assert (
        all(np.array_equal(dataset[i]["mask"], MASK) for i in range(2))
        and dataset.report()["resized_masks"] == 1
    )


BAD = {
    "blank caption": [region(text) for text in (None, "", " \n", "<image>", 7, ["A cup."])]
    + [{"mask_rle": encode_mask(MASK)}],
    "no mask": [{"caption": "A cup."}]
    + [
        region(mask_rle=rle)
        for rle in (None, [], "132", {}, {"size": [H, W]}, {"size": [H, W], "counts": None})
    ],
    "bad mask RLE": [
        region(mask_rle={"counts": counts, "size": size})
        for counts, size in (
            ("132", [H, W]),
            ("132", None),
            ("132", "23"),
            ("132", [2.0, 3]),
            ("132", [True, 6]),
            ("132", [2, 10**30]),
            (7, [2, 3]),
            ("1é2", [2, 3]),
            ("1\ud8002", [2, 3]),
            ([3, -3, 6], [2, 3]),
            ([3, 3.0], [2, 3]),
            ([10**30], [2, 3]),
            ({}, [2, 3]),
            ("", [2, 3]),
        )
    ],
    "empty mask": [region(mask=MASK & False)],
    "mask empty at the image's size": [
        region(mask=np.eye(H * 10, dtype=bool) & (np.arange(H * 10) == 0))
    ],
}


@pytest.mark.parametrize("reason", BAD)
def test_unusable_regions_are_skipped_and_counted(tmp_path, reason):
    write(tmp_path / "LVIS", {"a": [region(), *BAD[reason], region("Last.")]}, [("a.png", PNGS[0])])
    dataset = DescribeAnythingDataset(tmp_path)
    assert dataset.report()["skipped"] == {reason: len(BAD[reason])}
    assert samples(dataset) == [("LVIS/a/0", "A cup."), (f"LVIS/a/{len(BAD[reason]) + 1}", "Last.")]


@pytest.mark.parametrize(
    "reason, members",
    [
        ("no image", []),
        ("no image", [("b.pickle", PNGS[0]), ("b.txt", PNGS[0])]),
        ("unreadable image header", [("b.jpg", b"no image")]),
        ("truncated image", [("b.png", PNGS[0][:-9])]),
        ("image above 300000000 pixels", [("b.png", huge_png())]),
    ],
)
def test_unusable_images_are_skipped_and_counted(tmp_path, reason, members):
    write(
        tmp_path / "LVIS",
        {"a": region(), "b": [region(), region()], "c": []},
        [("a.png", PNGS[0]), ("c.png", PNGS[1]), *members],
    )
    dataset = DescribeAnythingDataset(tmp_path)
    assert samples(dataset) == [("LVIS/a/0", "A cup.")] and dataset.report()["skipped"] == {
        reason: 2,
        "no region": 1,
    }


def test_what_only_decoding_shows_raises_with_id(tmp_path):
    write(
        tmp_path / "LVIS",
        {"a": region()},
        [("a.jpg", bad_huffman(encode_image(IMAGES[0], "JPEG")))],
    )
    with pytest.raises(DamagedSample, match="^LVIS/a/0: damaged image$"):
        DescribeAnythingDataset(tmp_path)[0]


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


def test_hostile_members_are_ignored_and_counted_and_nothing_is_unpickled(tmp_path):
    path = write(
        tmp_path / "SAV",
        {name: region() for name in ("a", "../b", "/c", "d", "e", "f")},
        [("a.png", PNGS[0]), ("a.pickle", pickle.dumps(Bomb()))],
    )
    with tarfile.open(path, "a") as tar:
        add(tar, "../b.png", PNGS[0])
        add(tar, "x/../../b.png", PNGS[0])
        add(tar, "/c.png", PNGS[0])
        add(tar, "d.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "e.png", type=tarfile.LNKTYPE, linkname="a.png")
        add(tar, "f.png", type=tarfile.FIFOTYPE)
        add(tar, "folder", type=tarfile.DIRTYPE)
    dataset = DescribeAnythingDataset(tmp_path)
    assert samples(dataset) == [("SAV/a/0", "A cup.")]
    assert dataset.report() == {
        "rows": 6,
        "kept": 1,
        "skipped": {"no image": 5},
        "resized_masks": 0,
        "ignored_members": 6,
    }


def test_readers_import_no_pickle():
    import rl_train.data.dam
    import rl_train.data.packed

    for module in (rl_train.data.dam, rl_train.data.packed):
        assert "pickle" not in vars(module)


@pytest.mark.parametrize("damage", ["cut", "garbage", "header", "empty", "gzip"])
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
            "header": whole[:at] + b"\xff" * 512 + whole[at + 512 :],
            "empty": b"",
            "gzip": gzip.compress(whole),
        }[damage]
    )
    with pytest.raises(ValueError, match=f"{path} is not a readable tar file"):
        DescribeAnythingDataset(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"a": 1',
        '{"a" 1}',
        '{"a": 1,}',
        "{7: 1}",
        '{"a": nul}',
        '{"a": 1 "b": 2}',
        "[" * 100_000,
        '{"a": ' + "[" * 100_000,
    ],
)
def test_unreadable_annotations_are_named(tmp_path, text):
    write(tmp_path / "SAV", text, [])
    with pytest.raises(
        ValueError, match=f"{tmp_path}/SAV/annotations.json is not a readable annotations.json"
    ):
        DescribeAnythingDataset(tmp_path)


@pytest.mark.parametrize(
    "ensure_ascii, start", [(True, ""), (False, ""), (False, "\ufeff"), (True, "\ufeff")]
)
def test_annotations_in_any_encoding_of_json(tmp_path, ensure_ascii, start):
    values = {"a": ["é", {"x": "\U0001f600"}], "ключ": 3, 'q"\\': "}", "": {}}
    path = tmp_path / "annotations.json"
    path.write_bytes((start + json.dumps(values, ensure_ascii=ensure_ascii, indent=1)).encode())
    assert read_annotations(path) == values
    path.write_text(" { } ")
    assert read_annotations(path) == {}


def test_captions_and_ids_of_any_characters(tmp_path):
    """Half a surrogate pair too, which no text file can hold but \\ud83d in JSON is."""
    text = 'Ein "Ёлка" \U0001f600 \ud83d.'
    write(tmp_path / "LVIS", {"ключ": {'k"': region(text)}}, [("ключ.png", PNGS[0])])
    assert samples(DescribeAnythingDataset(tmp_path)) == [('LVIS/ключ/k"', text)]


def test_splits(tmp_path):
    for number, split in enumerate(("SAV", "LVIS", "Part10", "Part2")):
        write(
            tmp_path / split,
            {"a": region(split)},
            [("a.png", PNGS[number % 3])],
            tar=f"{number}.tar",
        )
    (tmp_path / "other").mkdir()
    assert samples(DescribeAnythingDataset(tmp_path)) == [
        (f"{s}/a/0", s) for s in ("LVIS", "Part2", "Part10", "SAV")
    ]
    assert samples(DescribeAnythingDataset(str(tmp_path), splits=["SAV"])) == [("SAV/a/0", "SAV")]
    assert samples(DescribeAnythingDataset(tmp_path / "SAV")) == [("SAV/a/0", "SAV")]
    with pytest.raises(ValueError, match="no split 'PACO'; it has LVIS, Part2, Part10, SAV"):
        DescribeAnythingDataset(tmp_path, splits=["PACO"])
    with pytest.raises(
        ValueError, match=f"--data_dir {tmp_path / 'other'} holds no annotations.json"
    ):
        DescribeAnythingDataset(tmp_path / "other")
    write(tmp_path / "other", {"a": region("")}, [("a.png", PNGS[0])])
    with pytest.raises(ValueError, match="no usable region: .*'blank caption': 1"):
        DescribeAnythingDataset(tmp_path / "other")


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


def test_samples_of_one_picture_share_its_number(tmp_path):
    """COCO's pictures are in several splits."""
    write(
        tmp_path / "LVIS",
        {"a": [region(), region()], "b": region(), "c": region()},
        [("a.png", PNGS[1]), ("b.png", PNGS[0]), ("c.png", PNGS[1])],
    )
    write(
        tmp_path / "PACO",
        {"d": region(), "e": region(), "gone": region()},
        [("d.png", PNGS[0]), ("e.png", PNGS[2])],
    )
    assert DescribeAnythingDataset(tmp_path).images.tolist() == [0, 0, 1, 0, 1, 2]


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


def test_hub_form_that_is_compressed_or_of_another_type_is_named(tmp_path):
    (tmp_path / "SAV").mkdir()
    (tmp_path / "SAV" / "annotations.json").write_text(json.dumps({"0": region()}))
    path = tmp_path / "SAV" / "data-0.arrow"
    for kind, value, options, message in (
        (pa.binary(), PNGS[0] * 20, pa.ipc.IpcWriteOptions(compression="zstd"), "is compressed"),
        (pa.int64(), 3, None, "column 'jpg' holds int64"),
    ):
        table = pa.table({"__key__": pa.array(["0"]), "jpg": pa.array([value], kind)})
        with pa.ipc.new_stream(str(path), table.schema, options=options) as writer:
            writer.write_table(table)
        with pytest.raises(ValueError, match=f"{path}.*{message}"):
            DescribeAnythingDataset(tmp_path)
