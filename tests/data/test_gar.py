"""The GAR reader on shards written here: each edge case is kept, skipped under its reason, or refused by name."""

import base64
import io
import pickle
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from rl_train.data import DamagedSample, GraspAnyRegionDataset
from rl_train.data.images import MAX_PIXELS, image_key
from sa2va_hf.processing_sa2va import region_grid
from tools.demo_scenes import caption, make_scene
from tools.gar_writer import SCHEMA, encode_image, encode_mask, write_gar
from tools.messy_data import bad_huffman, huge_png

W, H = 40, 30
MASK = np.zeros((H, W), dtype=bool)
MASK[5:20, 10:35] = True
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8))
PNG, JPEG = encode_image(IMAGE), encode_image(IMAGE, "JPEG")


def turns(*pairs):
    return [{"from": who, "value": text} for who, text in pairs]


def row(**changes):
    good = {
        "image": {"bytes": PNG, "path": None},
        "mask_rle": encode_mask(MASK),
        "conversations": turns(("human", "<image>\nDescribe."), ("gpt", "A cup.")),
        "catagory": ["cup"],
    }
    return good | changes


def write(path, rows, schema=SCHEMA, ipc=pa.ipc.new_stream):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows, schema=schema)
    with ipc(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def read(tmp_path, *rows, schema=SCHEMA):
    write(tmp_path / "Part1" / "data-00000-of-00001.arrow", rows, schema)
    return GraspAnyRegionDataset(tmp_path)


def ids(dataset):
    return [dataset[i]["image_id"] for i in range(len(dataset))]


def collate(samples):
    return [
        (sample["image_id"], np.asarray(sample["image"]).sum(), sample["mask"].sum())
        for sample in samples
    ]


@pytest.mark.parametrize("ipc_format", ["stream", "file"])
def test_what_is_written_is_read(tmp_path, ipc_format):
    rng = np.random.default_rng(0)
    rows = [
        {
            "image": scene.image,
            "mask": obj.mask,
            "caption": caption(obj, scene, rng),
            "category": obj.shape,
        }
        for scene in (make_scene(0, 0, i) for i in range(2))
        for obj in scene.objects
    ]
    paths = write_gar(iter(rows), tmp_path, rows_per_shard=4, ipc_format=ipc_format)
    num_shards = -(-len(rows) // 4)
    assert [str(p.relative_to(tmp_path)) for p in paths] == [
        f"Fine-Grained-Dataset-Part1/data-{i:05d}-of-{num_shards:05d}.arrow"
        for i in range(num_shards)
    ]
    assert sorted(tmp_path.rglob("*.*")) == paths
    assert (paths[0].read_bytes()[:6] == b"ARROW1") == (ipc_format == "file")
    dataset = GraspAnyRegionDataset(tmp_path)
    assert dataset.report() == {
        "rows": len(rows),
        "kept": len(rows),
        "skipped": {},
        "resized_masks": 0,
    }
    for k, (sample, expected) in enumerate(
        zip((dataset[i] for i in range(len(dataset))), rows, strict=True)
    ):
        assert sample["image"].mode == "RGB" and np.array_equal(sample["image"], expected["image"])
        assert sample["mask"].dtype == bool and np.array_equal(sample["mask"], expected["mask"])
        assert (sample["caption"], sample["category"]) == (
            expected["caption"],
            expected["category"],
        )
        assert sample["image_id"] == f"Fine-Grained-Dataset-Part1/{paths[k // 4].stem}/{k % 4}"


def test_writer_keeps_the_documented_columns(tmp_path):
    [path] = write_gar(
        [{"image": IMAGE, "mask": MASK, "caption": "A cup.", "category": "cup"}],
        tmp_path,
        image_format="JPEG",
    )
    with pa.ipc.open_stream(str(path)) as reader:
        table = reader.read_all()
    assert {field.name: str(field.type) for field in table.schema} == {
        "image": "struct<bytes: binary, path: string>",
        "mask_rle": "struct<counts: string, size: list<item: int64>>",
        "conversations": "list<item: struct<from: string, value: string>>",
        "catagory": "list<item: string>",
    }
    [record] = table.to_pylist()
    assert Image.open(io.BytesIO(record["image"]["bytes"])).format == "JPEG"
    assert record["mask_rle"]["size"] == [H, W]
    assert record["conversations"] == turns(
        ("human", "<image>\nDescribe the masked region in detail."), ("gpt", "A cup.")
    )


SKIPPED = {
    "no conversation": [dict(conversations=None), dict(conversations=[])],
    "no assistant turn": [dict(conversations=turns(("human", "Describe.")))],
    "blank caption": [
        dict(conversations=turns(("human", "Describe."), ("gpt", text)))
        for text in (None, "", " \n", "<image> [SEG]")
    ],
    "no mask": [dict(mask_rle=None), dict(mask_rle={"counts": None, "size": None})],
    "bad mask RLE": [
        dict(mask_rle={"counts": "132", "size": [H, W]}),
        dict(mask_rle=encode_mask(MASK) | {"size": [H, W + 1]}),
        dict(mask_rle=encode_mask(MASK) | {"size": None}),
        dict(mask_rle={"counts": "~~", "size": [H, W]}),
        dict(mask_rle={"counts": "", "size": [H, W]}),
        dict(mask_rle=encode_mask(MASK) | {"size": [H, W, 1]}),
        dict(mask_rle=encode_mask(MASK) | {"size": [H, None]}),
        dict(mask_rle=encode_mask(MASK) | {"size": [10**6, 10**6]}),
    ],
    "empty mask": [dict(mask_rle=encode_mask(np.zeros((H, W), dtype=bool)))],
    "mask empty at the image's size": [
        dict(mask_rle=encode_mask(np.eye(H * 10, dtype=bool) & (np.arange(H * 10) == 0)))
    ],
    "no image": [
        dict(image=None),
        dict(image={"bytes": None, "path": None}),
        dict(image={"bytes": None, "path": "gone.png"}),
    ],
    "unreadable image header": [
        dict(image={"bytes": data, "path": None})
        for data in (b"", b"not an image", PNG[:20], JPEG[:20])
    ],
    "truncated image": [
        dict(image={"bytes": data, "path": None})
        for data in (
            PNG[:-4],
            PNG[: len(PNG) // 2],
            JPEG[:-1],
            JPEG[: len(JPEG) // 2],
            JPEG[:-200] + bytes(200),
        )
    ],
    f"image above {MAX_PIXELS} pixels": [dict(image={"bytes": huge_png(), "path": None})],
}


@pytest.mark.parametrize("reason", SKIPPED)
def test_unusable_rows_are_skipped_and_counted(tmp_path, reason):
    bad = [row(**changes) for changes in SKIPPED[reason]]
    dataset = read(tmp_path, row(), *bad, row())
    assert dataset.report() == {
        "rows": len(bad) + 2,
        "kept": 2,
        "skipped": {reason: len(bad)},
        "resized_masks": 0,
    }
    assert len(dataset) == 2 and ids(dataset) == [
        "Part1/data-00000-of-00001/0",
        f"Part1/data-00000-of-00001/{len(bad) + 1}",
    ]
    with pytest.raises(IndexError):
        dataset[2]


def test_a_set_without_a_usable_region_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--data_dir .* no usable region: .*'blank caption': 1"):
        read(tmp_path, row(conversations=turns(("gpt", ""))))


def test_first_assistant_turn_is_the_caption_and_is_cleaned(tmp_path):
    said = turns(
        ("human", "Describe."),
        ("assistant", '<Prompt0> A "big"\n{cup} [SEG].<|end|>'),
        ("human", "And?"),
        ("gpt", "No."),
    )
    assert read(tmp_path, row(conversations=said))[0]["caption"] == 'A "big" {cup}.'


@pytest.mark.parametrize("counts_type", ["binary", "uncompressed"])
def test_counts_as_bytes_or_list(tmp_path, counts_type):
    rle = encode_mask(MASK)
    flat = MASK.T.ravel()  # runs by counting pixels, down the columns
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat])))
    runs = np.diff(np.concatenate([[0], edges, [H * W]])).tolist()
    counts, kind = {
        "binary": (rle["counts"].encode(), pa.binary()),
        "uncompressed": (runs, pa.list_(pa.int64())),
    }[counts_type]
    schema = SCHEMA.set(
        1, pa.field("mask_rle", pa.struct([("counts", kind), ("size", pa.list_(pa.int64()))]))
    )
    dataset = read(
        tmp_path,
        row(mask_rle={"counts": counts, "size": [H, W]}),
        row(mask_rle={"counts": counts[:-1], "size": [H, W]}),
        schema=schema,
    )
    assert dataset.report()["skipped"] == {"bad mask RLE": 1}
    assert np.array_equal(dataset[0]["mask"], MASK)


def test_list_of_masks_is_one_sample_each(tmp_path):
    schema = SCHEMA.set(1, pa.field("mask_rle", pa.list_(SCHEMA.field("mask_rle").type)))
    empty = encode_mask(np.zeros((H, W), dtype=bool))
    dataset = read(
        tmp_path,
        row(mask_rle=[encode_mask(MASK), empty, encode_mask(~MASK), None]),
        row(mask_rle=[]),
        row(mask_rle=None),
        schema=schema,
    )
    assert dataset.report() == {
        "rows": 3,
        "kept": 2,
        "skipped": {"empty mask": 1, "no mask": 3},
        "resized_masks": 0,
    }
    assert ids(dataset) == ["Part1/data-00000-of-00001/0-0", "Part1/data-00000-of-00001/0-2"]
    assert np.array_equal(dataset[0]["mask"], MASK) and np.array_equal(dataset[1]["mask"], ~MASK)


def test_mask_of_another_size_is_resized_to_the_image(tmp_path):
    double = np.kron(MASK, np.ones((2, 2), dtype=bool))
    dataset = read(tmp_path, row(mask_rle=encode_mask(double)), row())
    assert dataset.report() | {"rows": None} == {
        "rows": None,
        "kept": 2,
        "skipped": {},
        "resized_masks": 1,
    }
    assert np.array_equal(dataset[0]["mask"], MASK)


def test_exif_orientation_is_not_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to show"
    file = io.BytesIO()
    IMAGE.save(file, format="JPEG", exif=exif)
    dataset = read(tmp_path, row(image={"bytes": file.getvalue(), "path": None}))
    assert dataset[0]["image"].size == (W, H) and dataset.report()["resized_masks"] == 0


@pytest.mark.parametrize(
    "mode, image_format",
    [("L", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("1", "PNG"), ("CMYK", "JPEG")],
)
def test_image_modes_become_rgb(tmp_path, mode, image_format):
    image = IMAGE.convert(mode)
    dataset = read(tmp_path, row(image={"bytes": encode_image(image, image_format), "path": None}))
    assert dataset[0]["image"].mode == "RGB" and dataset[0]["image"].size == (W, H)
    if image_format == "PNG":
        assert np.array_equal(dataset[0]["image"], image.convert("RGB"))


def test_image_by_path_and_by_data_url(tmp_path):
    (tmp_path / "Part1" / "images").mkdir(parents=True)
    (tmp_path / "Part1" / "images" / "a.png").write_bytes(PNG)
    code = base64.b64encode(PNG).decode()
    paths = ["images/a.png", f"data:base64,{code}", f"data:image/png;base64,{code}"]
    dataset = read(tmp_path, *[row(image={"bytes": None, "path": path}) for path in paths])
    assert all(np.array_equal(dataset[i]["image"], IMAGE) for i in range(3)) and len(dataset) == 3


def test_what_only_decoding_shows_raises_with_id_and_reason(tmp_path):
    dataset = read(tmp_path, row(), row(image={"bytes": bad_huffman(JPEG), "path": None}))
    assert dataset.report()["skipped"] == {}  # header and end are good
    with pytest.raises(
        DamagedSample, match="^Part1/data-00000-of-00001/1: damaged image$"
    ) as caught:
        dataset[1]
    assert (caught.value.image_id, caught.value.reason) == (
        "Part1/data-00000-of-00001/1",
        "damaged image",
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # from a worker


@pytest.mark.parametrize(
    "data",
    [
        JPEG + bytes(100),
        JPEG + b"trailer of a phone",
        PNG + b"\n",
        encode_image(IMAGE, "WEBP"),
        encode_image(IMAGE, "BMP"),
    ],
)
def test_bytes_behind_the_end_and_other_formats_are_kept(tmp_path, data):
    assert read(tmp_path, row(image={"bytes": data, "path": None}))[0]["image"].size == (W, H)


def test_pixel_limit_is_that_of_the_processor():
    from sa2va_hf.processing_sa2va import MAX_PIXELS as limit

    assert MAX_PIXELS == limit == Image.MAX_IMAGE_PIXELS


def test_no_mask_column_means_the_whole_image(tmp_path):
    dataset = read(
        tmp_path,
        row(),
        row(conversations=[]),
        schema=SCHEMA.remove(SCHEMA.get_field_index("mask_rle")),
    )
    assert ids(dataset) == ["Part1/data-00000-of-00001/0"]
    assert dataset[0]["mask"].shape == (H, W) and dataset[0]["mask"].all()
    assert dataset.report() == {
        "rows": 2,
        "kept": 1,
        "skipped": {"no conversation": 1},
        "resized_masks": 0,
    }


def test_full_mask_is_all_cells_and_a_small_one_its_cell(tmp_path):
    pixel = np.zeros((H, W), dtype=bool)
    pixel[H - 1, 0] = True
    dataset = read(
        tmp_path,
        row(mask_rle=encode_mask(np.ones((H, W), dtype=bool))),
        row(mask_rle=encode_mask(pixel)),
    )
    grids = [
        region_grid(torch.from_numpy(dataset[i]["mask"].copy())[None], 16, 448, "area")[0]
        for i in range(2)
    ]
    assert grids[0].sum() == 256 and grids[1].nonzero().tolist() == [[15, 0]]


SEVERAL = turns(
    ("human", "Describe."),
    ("gpt", "One."),
    ("human", "And?"),
    ("gpt", " "),
    ("assistant", "Three."),
)


def test_one_sample_for_each_answer_by_option(tmp_path):
    write(
        tmp_path / "Part1" / "data-0.arrow",
        [row(conversations=SEVERAL), row(), row(conversations=turns(("human", "Describe.")))],
    )
    first, every = (GraspAnyRegionDataset(tmp_path, turns=which) for which in ("first", "all"))
    assert [first[i]["caption"] for i in range(len(first))] == ["One.", "A cup."]
    assert [(every[i]["image_id"], every[i]["caption"]) for i in range(len(every))] == [
        ("Part1/data-0/0-t0", "One."),
        ("Part1/data-0/0-t2", "Three."),
        ("Part1/data-0/1-t0", "A cup."),
    ]
    assert every.report()["skipped"] == {"blank caption": 1, "no assistant turn": 1}
    with pytest.raises(ValueError, match="turns is first or all, not 'last'"):
        GraspAnyRegionDataset(tmp_path, turns="last")


def test_extra_and_reordered_columns_and_category_names(tmp_path):
    schema = pa.schema(
        [
            ("id", pa.int64()),
            *reversed([SCHEMA.field(i) for i in range(3)]),
            ("category", pa.string()),
        ]
    )
    write(tmp_path / "Part1" / "data-0.arrow", [row(id=3, category="mug")], schema)
    write(tmp_path / "Part2" / "data-0.arrow", [row(catagory=["cup", "mug"]), row(catagory=None)])
    write(tmp_path / "Part3" / "data-0.arrow", [row()], SCHEMA.remove(3))
    dataset = GraspAnyRegionDataset(tmp_path)
    assert [dataset[i]["category"] for i in range(4)] == ["mug", "cup, mug", "", ""]


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
        (
            0,
            {"bytes": "text", "path": None},
            pa.struct([("bytes", pa.string()), ("path", pa.string())]),
        ),
        (1, "132", pa.string()),
        (
            1,
            {"counts": 3, "size": [1, 2]},
            pa.struct([("counts", pa.int64()), ("size", pa.list_(pa.int64()))]),
        ),
        (
            1,
            {"counts": "132", "size": "2x3"},
            pa.struct([("counts", pa.string()), ("size", pa.string())]),
        ),
        (2, "A cup.", pa.string()),
        (
            2,
            {"from": ["gpt"], "value": ["A cup."]},
            pa.struct([("from", pa.list_(pa.string())), ("value", pa.list_(pa.string()))]),
        ),
        (3, 7, pa.int64()),
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
    assert dataset.report()["skipped"] == {"no mask": 2, "no image": 1, "no conversation": 1}


@pytest.mark.parametrize("ipc", [pa.ipc.new_stream, pa.ipc.new_file])
def test_unreadable_shard_is_named(tmp_path, ipc):
    write(tmp_path / "data-0.arrow", [row()])
    path = write(tmp_path / "data-1.arrow", [row(), row()], ipc=ipc)
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
    with pytest.raises(ValueError, match=f"--data_dir {tmp_path / 'gar'} "):
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
    """8,000 rows of 25 KB, which are 200 MB in one record batch: most of them are never in memory together, none is decoded."""
    noise = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)
    )
    data = encode_image(noise, "JPEG")[:25_000] + b"\xff\xd9"
    write(tmp_path / "data-0.arrow", [row(image={"bytes": data, "path": None})] * 8000)
    code = """
import sys, time
from rl_train.data import GraspAnyRegionDataset
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before, start = peak(), time.process_time()
dataset = GraspAnyRegionDataset(sys.argv[1])
print(len(dataset), peak() - before, time.process_time() - start)"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    rows, kibibytes, seconds = map(float, done.stdout.split())
    assert rows == 8000 and kibibytes < 100_000 and seconds < 1.6


def test_import_pulls_no_heavy_package():
    code = "import sys, rl_train.data; print([m for m in ('torch', 'transformers', 'datasets', 'trl', 'openai') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_a_null_turn_is_passed_over(tmp_path):
    said = [turns(("human", "Describe."))[0], None, turns(("gpt", "A cup."))[0]]
    assert read(tmp_path, row(conversations=said))[0]["caption"] == "A cup."


def test_regions_of_one_image_share_its_number(tmp_path):
    """Whatever rows, shards and parts they are in, as bytes or behind a path; numbers are by first appearance."""
    others = [encode_image(IMAGE.rotate(90 * k)) for k in (1, 2)]
    (tmp_path / "Part1").mkdir()
    (tmp_path / "Part1" / "a.png").write_bytes(others[1])
    inline = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    write(
        tmp_path / "Part2" / "data-0.arrow",
        [row(), row(image={"bytes": others[1], "path": "b.png"})],
    )
    dataset = read(
        tmp_path,
        *(
            row(image={"bytes": data, "path": path})
            for data, path in (
                (PNG, None),
                (others[0], "a.png"),
                (b"no image", None),
                (PNG, "other.png"),
                (None, "a.png"),
                (None, inline),
                (JPEG, None),
            )
        ),
        row(conversations=[]),
    )
    assert dataset.images.tolist() == [0, 1, 0, 2, 0, 3, 0, 2] and dataset.images.dtype == np.int64
    assert pickle.loads(pickle.dumps(dataset)).images.tolist() == dataset.images.tolist()


def test_image_keys():
    """They differ with the length and either end, and not from process to process as `hash` does."""
    data = bytes(range(256)) * 12
    assert (
        image_key(data)
        == image_key(memoryview(data))
        == image_key(data[:1500] + b"x" + data[1501:])
        == 547837433970159251
    )
    assert len({image_key(data[:n]) for n in range(len(data))} | {image_key(data)}) == len(data) + 1
    assert (
        image_key(data)
        != image_key(b"x" + data[1:])
        != image_key(data[:-1] + b"x")
        != image_key(data)
    )
