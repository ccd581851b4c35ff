"""tools/convert_data.py: the readers read back what it writes, and it names what it cannot use."""

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco

from rl_train.data import GraspAnyRegionDataset
from tools import convert_data

SIZE = (40, 30)  # W, H


@pytest.fixture
def images(tmp_path):
    """Two images as files, of which one is a JPEG."""
    folder = tmp_path / "images"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.jpg")
    Image.fromarray(pixels[::-1]).save(folder / "b.png")
    return folder


def region(x, y, width, height) -> np.ndarray:
    mask = np.zeros((30, 40), dtype=bool)
    mask[y : y + height, x : x + width] = True
    return mask


def annotations(tmp_path, **changes):
    """A COCO file: a polygon and run lengths with captions, and one that has a category alone."""
    rle = coco.encode(np.asfortranarray(region(5, 6, 7, 8), dtype=np.uint8))
    rle["counts"] = rle["counts"].decode()
    polygon = [[10, 10, 20, 10, 20, 25, 10, 25]]
    size = dict(width=40, height=30)
    content = dict(
        images=[dict(id=1, file_name="a.jpg", **size), dict(id=2, file_name="b.png", **size)],
        categories=[dict(id=7, name="dog")],
        annotations=[
            dict(image_id=1, category_id=7, segmentation=polygon, caption="A red dog."),
            dict(image_id=2, category_id=7, segmentation=rle, description="A cat"),
            dict(image_id=2, category_id=7, segmentation=polygon),
        ],
    )
    file = tmp_path / "instances.json"
    file.write_text(json.dumps(content | changes))
    return file


def convert(tmp_path, images, *argv):
    output = tmp_path / "out"
    convert_data.main([*map(str, argv), "--image_root", str(images), "--output", str(output)])
    return output


def test_coco_is_read_back(tmp_path, images, capsys):
    output = convert(tmp_path, images, "coco", "--annotations", annotations(tmp_path))
    assert "2 regions; skipped: without a caption: 1" in capsys.readouterr().out
    first, second = GraspAnyRegionDataset(output)
    assert (first["caption"], first["category"]) == ("A red dog.", "dog")
    assert np.array_equal(first["mask"], region(10, 10, 10, 15))
    assert second["caption"] == "A cat" and np.array_equal(second["mask"], region(5, 6, 7, 8))
    with Image.open(images / "a.jpg") as image:  # the file itself, not encoded again
        assert np.array_equal(first["image"], image.convert("RGB"))


def test_a_category_can_be_the_caption(tmp_path, images):
    argv = ("coco", "--annotations", annotations(tmp_path), "--category_captions")
    captions = [
        sample["caption"] for sample in GraspAnyRegionDataset(convert(tmp_path, images, *argv))
    ]
    assert captions == ["A red dog.", "A cat", "dog"]


def test_folders_are_read_back(tmp_path, images):
    masks = tmp_path / "masks"
    (masks / "b").mkdir(parents=True)
    wanted = {
        "a": region(1, 2, 3, 4),
        "b/first": region(0, 0, 40, 10),
        "b/second": region(9, 9, 9, 9),
    }
    for name, mask in wanted.items():
        Image.fromarray(mask).save(masks / f"{name}.png")
        (masks / f"{name}.txt").write_text(f"Region {name}\n")
    samples = list(
        GraspAnyRegionDataset(convert(tmp_path, images, "folders", "--mask_root", masks))
    )
    assert [sample["caption"] for sample in samples] == [f"Region {name}" for name in wanted]
    for sample, mask in zip(samples, wanted.values()):
        assert np.array_equal(sample["mask"], mask)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(images=[dict(id=1, file_name="c.jpg", width=40, height=30)]), "has no c.jpg"),
        (dict(images=[dict(id=1, file_name="a.jpg", width=8, height=8)]), "annotation 0 is 8 x 8"),
        (dict(annotations=[]), "annotations need a caption, or --category_captions"),
        (
            dict(annotations=[dict(image_id=1, caption="a", segmentation=dict(size=[1]))]),
            "annotation 0: its segmentation cannot be read",
        ),
    ],
)
def test_a_bad_coco_file_is_named(tmp_path, images, changes, sentence):
    with pytest.raises(SystemExit, match=sentence) as ended:
        convert(tmp_path, images, "coco", "--annotations", annotations(tmp_path, **changes))
    assert "\n" not in ended.value.code
    assert not (tmp_path / "out").exists()  # nor a part of it


def test_bad_folders_are_named(tmp_path, images):
    masks = tmp_path / "masks"
    argv = ("folders", "--mask_root", masks)
    with pytest.raises(SystemExit, match="masks: no such folder"):
        convert(tmp_path, images, *argv)
    masks.mkdir()
    Image.fromarray(region(1, 2, 3, 4)).save(masks / "a.png")
    with pytest.raises(SystemExit, match=r"without a caption: 1, images without a mask: 1.*X\.txt"):
        convert(tmp_path, images, *argv)
    (masks / "a.txt").write_text("small")
    Image.fromarray(region(1, 2, 3, 4)[:5]).save(masks / "a.png")
    with pytest.raises(SystemExit, match="a.png is 40 x 5 pixels, its image 40 x 30"):
        convert(tmp_path, images, *argv)


def test_what_is_there_stays(tmp_path, images):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="is not empty"):
        convert(tmp_path, images, "coco", "--annotations", annotations(tmp_path))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]
