"""The Describe-Anything reader on splits written here: every form of annotations."""

import json

import numpy as np
import pytest

from rl_train.data import DamagedSample, DescribeAnythingDataset
from rl_train.data.base import number_images
from rl_train.data.dam import BAD_NAME, read_annotations
from rl_train.data.images import image_key
from rl_train.data.rle import rle_runs
from rl_train.data.text import NOT_UNICODE
from tests.campaigns.messy_cases import bad_huffman, huge_png
from tests.data.dam_splits import IMAGES, MASK, PNGS, H, W, region, samples, write
from tools.gar_writer import encode_image, encode_mask


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
        ("image above 100000000 pixels, or 65535 on a side", [("b.png", huge_png())]),
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
    """But half a surrogate pair, which no tokenizer takes, nor names that break a log's line."""
    text = 'Ein "Ёлка" \U0001f600.'
    regions = {'k"': region(text), "half": region(text + "\ud83d"), "a\nb": region(text)}
    write(tmp_path / "LVIS", {"ключ": regions}, [("ключ.png", PNGS[0])])
    dataset = DescribeAnythingDataset(tmp_path)
    assert samples(dataset) == [('LVIS/ключ/k"', text)]
    assert dataset.report()["skipped"] == {NOT_UNICODE: 1, BAD_NAME: 1}


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
    with pytest.raises(ValueError, match="no usable region: blank caption: 1 .other/a/0"):
        DescribeAnythingDataset(tmp_path / "other")


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
    keys = DescribeAnythingDataset(tmp_path).image_keys
    assert number_images(keys).tolist() == [0, 0, 1, 0, 1, 2] and keys[2] == image_key(PNGS[0])
