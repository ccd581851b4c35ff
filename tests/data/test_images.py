"""Images of every mode, format and kind of damage, read as rows of Grasp-Any-Region."""

import base64
import io
import pickle

import numpy as np
import pytest
from PIL import Image

from rl_train.data import DamagedSample
from rl_train.data.images import MAX_PIXELS, image_key
from rl_train.data.samples import number_images
from tests.data.gar_rows import IMAGE, JPEG, PNG, H, W, read, row, write
from tools.gar_writer import encode_image
from tools.messy_cases import bad_huffman


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


def test_regions_of_one_image_share_its_number(tmp_path):
    """Whatever rows, shards and parts they are in, as bytes or behind a path.

    Numbers are by first appearance; the keys are those of another data set with these images.
    """
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
    keys = dataset.image_keys
    assert keys.dtype == np.int64 and keys[0] == image_key(PNG) and keys[1] == image_key(others[0])
    assert number_images(keys).tolist() == [0, 1, 0, 2, 0, 3, 0, 2]
    assert np.array_equal(pickle.loads(pickle.dumps(dataset)).image_keys, keys)


def test_image_keys():
    """They differ with the length and either end, not from process to process as `hash` does."""
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
