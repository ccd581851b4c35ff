"""The readers of rows that name image files: every layout's regions, and its faults by reason."""

import json

import numpy as np
import pytest

from rl_train.data import gcg
from rl_train.data.errors import BadData
from rl_train.data.registry import DATASETS
from tests.data import image_file_sets
from tests.data.image_file_sets import CAPTIONS, FIRST, LAYOUTS, MASKS, SECOND, SKIPPED, H, W


def open_layout(layout: str, root):
    name, write = LAYOUTS[layout]
    write(root)
    return DATASETS[name](root)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_regions_are_read_and_faults_counted(tmp_path, layout):
    dataset = open_layout(layout, tmp_path)
    skipped = dict(SKIPPED)
    if layout == "folders":  # its images are those that lie there
        skipped["unreadable image header"] = skipped.pop("no image")
    if layout == "jsonl":
        skipped["image path outside of the data folder"] = skipped.pop("no image")
    report = dataset.report()
    assert (report["rows"], report["kept"], report["skipped"]) == (5, 2, skipped)
    # Each fault is told by its file or row.
    assert all(len(places) == 1 for places in report["first_skipped"].values())
    for sample, caption, mask in zip(dataset, CAPTIONS, MASKS, strict=True):
        assert sample["caption"] == caption and sample["image"].size == (W, H)
        assert np.array_equal(sample["mask"], mask)
    num_images = 1 if layout == "sa2va" else 2
    assert len(set(dataset.image_keys.tolist())) == num_images


@pytest.mark.parametrize("layout", ["sa2va", "coco", "muse", "gcg", "jsonl"])
def test_places_name_file_and_row(tmp_path, layout):
    report = open_layout(layout, tmp_path).report()
    places = {
        "sa2va": ["annotations/1/0", "annotations/2/0", "annotations/1/1"],
        "coco": ["instances_train2017/2", "instances_train2017/3", "instances_train2017/4"],
        "muse": ["muse_train/0/1", "muse_train/2/0", "muse_train/0/2"],
        "gcg": [f"GranDf_HA_GCG_train/{row}" for row in (2, 3, 4)],
        "jsonl": ["rows/2", "rows/3", "rows/4"],
    }[layout]
    found = [place for held in report["first_skipped"].values() for place in held]
    assert sorted(found) == sorted(places)


@pytest.mark.parametrize(
    "layout, file, row",
    [
        ("sa2va", "annotations.json", dict(image="a.jpg", mask=[], text=[])),
        ("sa2va", "annotations.json", 7),
        ("muse", "muse_train.json", dict(file_name="a.jpg", questions=["a"], answers=[])),
        ("gcg", "GranDf_HA_GCG_train.json", dict(file_name="a.jpg", groundings={})),
        ("gcg", "GranDf_HA_GCG_train.json", dict(file_name="a.jpg", groundings=dict(a=7))),
        (
            "gcg",
            "GranDf_HA_GCG_train.json",
            dict(file_name="a.jpg", groundings=dict(a=dict(token_positives=[3]))),
        ),
        ("jsonl", "rows.jsonl", dict(image="a.jpg", caption="a cup")),
        ("jsonl", "rows.jsonl", [1]),
    ],
)
def test_a_row_of_another_form_is_counted(tmp_path, layout, file, row):
    LAYOUTS[layout][1](tmp_path)
    path = tmp_path / file
    if path.suffix == ".jsonl":
        path.write_text(f"{path.read_text()}\n{json.dumps(row)}")
    else:
        path.write_text(json.dumps([*json.loads(path.read_text()), row]))
    report = DATASETS[LAYOUTS[layout][0]](tmp_path).report()
    assert report["skipped"]["row of another form"] == 1 and report["kept"] == 2


@pytest.mark.parametrize(
    "layout, file, content, sentence",
    [
        ("sa2va", "annotations.json", "{", "annotations.json is not a readable JSON file"),
        ("sa2va", "annotations.json", "{}", "annotations.json holds no list of rows"),
        ("coco", "annotations/instances_train2017.json", "{}", "has no list 'images'"),
        ("csv", "rows.csv", b"image,mask,caption\n\xff", "rows.csv is not a readable table"),
        ("reasonseg", "train/a.json", "[]", "a.json is not a readable JSON file of shapes"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path, layout, file, content, sentence):
    LAYOUTS[layout][1](tmp_path)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadData, match=sentence):
        DATASETS[LAYOUTS[layout][0]](tmp_path)


def test_a_missing_or_second_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.json"):
        DATASETS["sa2va"](tmp_path)
    with pytest.raises(ValueError, match="neither a table .* nor images/ and masks/"):
        DATASETS["folders"](tmp_path)
    image_file_sets.write_muse(tmp_path)
    (tmp_path / "muse_val.json").write_text("[]")
    with pytest.raises(ValueError, match="several .json: name one by --subsets: muse_train, muse"):
        DATASETS["muse"](tmp_path)
    with pytest.raises(ValueError, match="no muse_test.json: name one by --subsets"):
        DATASETS["muse"](tmp_path, split="muse_test")
    assert len(DATASETS["muse"](tmp_path, split="muse_train")) == 2
    image_file_sets.write_reasonseg(tmp_path)
    with pytest.raises(ValueError, match=r"has no split 'val'; it has \['train'\]"):
        DATASETS["reasonseg"](tmp_path, split="val")
    with pytest.raises(ValueError, match="--subsets val: .* Parquet is one split"):
        DATASETS["reasonseg"](tmp_path / "train", split="val")


def test_categories_of_coco_can_be_the_captions(tmp_path):
    image_file_sets.write_coco(tmp_path)
    dataset = DATASETS["coco_names"](tmp_path)
    assert [sample["caption"] for sample in dataset] == [*CAPTIONS, "cup"]
    assert dataset[0]["category"] == "cup"


def test_images_elsewhere(tmp_path):
    image_file_sets.write_sa2va(tmp_path / "set")
    (tmp_path / "set" / "images").rename(tmp_path / "pictures")
    assert len(DATASETS["sa2va"](tmp_path / "set", image_root=tmp_path / "pictures")) == 2


def test_shapes_of_reasonseg(tmp_path):
    """A shape with the label "ignore" is no target; a smaller target on it is one."""
    folder = tmp_path / "train"
    image_file_sets.write_images(folder, ("a.jpg",))
    corners = {
        "target": (5, 5, 30, 25),
        "ignored area": (10, 8, 20, 20),
        "target 2": (12, 10, 15, 14),
    }
    shapes = [
        dict(label=label, points=[[x0, y0], [x1, y0], [x1, y1], [x0, y1]])
        for label, (x0, y0, x1, y1) in corners.items()
    ]
    content = dict(text="the café", is_sentence=False, shapes=shapes)
    (folder / "a.json").write_bytes(json.dumps(content, ensure_ascii=False).encode("cp1252"))
    expected = np.zeros((H, W), dtype=bool)
    for label, (x0, y0, x1, y1) in corners.items():
        expected[y0 : y1 + 1, x0 : x1 + 1] = "ignored" not in label
    sample = DATASETS["reasonseg"](tmp_path)[0]
    assert sample["caption"] == "the café" and np.array_equal(sample["mask"], expected)


def test_objects_of_a_question_are_united(tmp_path):
    image_file_sets.write_muse(tmp_path)
    dataset = DATASETS["muse"](tmp_path)
    assert np.array_equal(dataset[1]["mask"], image_file_sets.box(SECOND))
    assert dataset[1]["category"] == "thing, thing"
    assert dataset[1]["objects"].sum((1, 2)).tolist() == [4 * 26, 4 * 26]
    assert np.array_equal(dataset[0]["mask"], image_file_sets.box(FIRST))


def test_a_caption_is_cleaned_before_its_phrases_are_tagged():
    places = [dict(token_positives=place) for place in ([0, 5], [13, 16])]
    phrases = list(zip(("a dog", "mat"), places))
    tagged = gcg.grounded_caption("a dog [SEG]  mat\n<image> \ue000.", phrases)
    assert tagged == "<p> a dog </p> [SEG] <p> mat </p> [SEG]."


def test_phrases_of_a_caption_have_their_masks_in_its_order(tmp_path):
    image_file_sets.write_gcg(tmp_path)
    dataset = DATASETS["gcg"](tmp_path)
    sample = dataset[1]
    tagged = "<p> a d </p> [SEG]og on <p> the </p> [SEG] right"
    assert sample["columns"] == dict(phrases=["a dog", "the right"], grounded_caption=tagged)
    assert [mask.any(0).argmax() for mask in sample["objects"]] == [30, 34]
    assert np.array_equal(sample["objects"].any(0), sample["mask"])
    assert dataset.has_objects and not dataset.names_nothing
