"""The GAR reader on shards written here: each edge case is kept, or skipped under its reason."""

import io

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.images import TOO_LARGE
from sa2va_hf.processing_sa2va import region_grid
from tests.campaigns.messy_cases import huge_png
from tests.data.counts import counts
from tests.data.gar_rows import IMAGE, JPEG, MASK, PNG, H, W, ids, read, row, turns, write
from tools.demo.scenes import make_scene
from tools.gar_writer import SCHEMA, encode_mask, write_gar


def test_what_is_written_is_read(tmp_path):
    rows = [
        {
            "image": scene.image,
            "mask": obj.mask,
            "caption": obj.caption,
            "category": obj.shape,
        }
        for scene in (make_scene(0, 0, i) for i in range(2))
        for obj in scene.objects
    ]
    paths = write_gar(iter(rows), tmp_path, rows_per_shard=4)
    num_shards = -(-len(rows) // 4)
    assert [str(p.relative_to(tmp_path)) for p in paths] == [
        f"Fine-Grained-Dataset-Part1/data-{i:05d}-of-{num_shards:05d}.arrow"
        for i in range(num_shards)
    ]
    assert sorted(tmp_path.rglob("*.*")) == paths
    dataset = GraspAnyRegionDataset(tmp_path)
    assert counts(dataset) == {
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


def test_shards_are_not_written_over(tmp_path):
    row = dict(image=IMAGE, mask=MASK, caption="A cup.", category="cup")
    [path] = write_gar([row], tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="already holds shards: name another folder"):
        write_gar([row | dict(caption="A plate."), row], tmp_path)
    assert sorted(tmp_path.rglob("*.*")) == [path] and path.read_bytes() == before


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
    "blank caption": [
        dict(conversations=None),
        dict(conversations=[]),
        dict(conversations=turns(("human", "Describe."))),
        *(
            dict(conversations=turns(("human", "Describe."), ("gpt", text)))
            for text in (None, "", " \n", "<image> [SEG]")
        ),
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
    "no image": [
        dict(image=None),
        dict(image={"bytes": None, "path": None}),
        dict(image={"bytes": None, "path": "gone.png"}),
    ],
    "unreadable image header": [
        dict(image={"bytes": data, "path": None})
        for data in (b"", b"not an image", PNG[:20], JPEG[:20])
    ],
    TOO_LARGE: [dict(image={"bytes": huge_png(), "path": None})],
}


@pytest.mark.parametrize("reason", SKIPPED)
def test_unusable_rows_are_skipped_and_counted(tmp_path, reason):
    bad = [row(**changes) for changes in SKIPPED[reason]]
    dataset = read(tmp_path, row(), *bad, row())
    assert counts(dataset) == {
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
    with pytest.raises(
        ValueError,
        match=r"--data_dir .* no usable region: blank caption: 1 \(Part1/data-.*row 0\)",
    ):
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
    assert counts(dataset) == {
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


def test_no_mask_column_means_the_whole_image(tmp_path):
    dataset = read(
        tmp_path,
        row(),
        row(conversations=[]),
        schema=SCHEMA.remove(SCHEMA.get_field_index("mask_rle")),
    )
    assert ids(dataset) == ["Part1/data-00000-of-00001/0"]
    assert dataset[0]["mask"].shape == (H, W) and dataset[0]["mask"].all()
    assert counts(dataset) == {
        "rows": 2,
        "kept": 1,
        "skipped": {"blank caption": 1},
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


def test_the_first_answer_is_the_caption(tmp_path):
    rows = [row(conversations=SEVERAL), row(), row(conversations=turns(("human", "Describe.")))]
    dataset = read(tmp_path, *rows)
    assert [dataset[i]["caption"] for i in range(len(dataset))] == ["One.", "A cup."]
    assert dataset.report()["skipped"] == {"blank caption": 1}


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


def test_a_null_turn_is_passed_over(tmp_path):
    said = [turns(("human", "Describe."))[0], None, turns(("gpt", "A cup."))[0]]
    assert read(tmp_path, row(conversations=said))[0]["caption"] == "A cup."
