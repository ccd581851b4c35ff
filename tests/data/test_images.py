"""Images of every mode, format and kind of damage, read as rows of Grasp-Any-Region."""

import base64
import io
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from rl_train.data import DamagedSample, base
from rl_train.data.base import number_images
from rl_train.data.images import (
    BAD_DEPTH,
    BAD_HEADER,
    MAX_IMAGE_SIDE,
    MAX_PIXELS,
    NO_IMAGE,
    OUTSIDE,
    TOO_LARGE,
    image_key,
)
from rl_train.data.rle import decode_mask
from tests.campaigns.messy_cases import bad_huffman
from tests.data.gar_rows import IMAGE, JPEG, PNG, H, W, read, row, write
from tools.gar_writer import encode_image, encode_mask


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


@pytest.mark.parametrize("path", ["../a.png", "{tmp}/Part1/a.png", "images/../../Part1/a.png"])
def test_a_path_may_go_anywhere_below_the_data_folder(tmp_path, path):
    for folder in (tmp_path / "Part1", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "a.png").write_bytes(PNG)
    cell = {"bytes": None, "path": path.format(tmp=tmp_path)}
    assert np.array_equal(read(tmp_path, row(image=cell))[0]["image"], IMAGE)


@pytest.mark.parametrize("path", ["../../secret.png", "{tmp}/secret.png", "/etc/passwd", ".."])
def test_a_path_out_of_the_data_folder_is_refused(tmp_path, path):
    (tmp_path / "secret.png").write_bytes(PNG)
    cell = {"bytes": None, "path": path.format(tmp=tmp_path)}
    dataset = read(tmp_path / "data", row(), row(image=cell))
    reason = NO_IMAGE if path == ".." else OUTSIDE  # the folder of the parts is a folder
    assert len(dataset) == 1 and dataset.report()["skipped"] == {reason: 1}


def test_links_in_the_data_folder_are_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a.png").write_bytes(PNG)
    (tmp_path / "data" / "Part1").mkdir(parents=True)
    (tmp_path / "data" / "Part1" / "images").symlink_to(tmp_path / "disk")
    cell = {"bytes": None, "path": "images/a.png"}
    assert len(read(tmp_path / "data", row(image=cell))) == 1


@pytest.mark.parametrize("path", ["pipe", ".", "no\0name", "x" * 5000, "pipe/a.png"])
def test_what_is_no_file_is_no_image(tmp_path, path):
    """Opening a pipe would wait for ever for somebody to write."""
    (tmp_path / "Part1").mkdir()
    os.mkfifo(tmp_path / "Part1" / "pipe")
    dataset = read(tmp_path, row(), row(image={"bytes": None, "path": path}))
    assert len(dataset) == 1 and dataset.report()["skipped"] == {NO_IMAGE: 1}


@pytest.mark.parametrize(
    "dtype, image_format", [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF")]
)
def test_16_bits_of_grey_are_scaled(tmp_path, dtype, image_format):
    """Pillow's own conversion clips at 255, so that all but the darkest pixels would be white."""
    grey = (np.arange(W * H).reshape(H, W) * 54).astype(dtype)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, format=image_format)
    found = np.asarray(
        read(tmp_path, row(image={"bytes": file.getvalue(), "path": None}))[0]["image"]
    )
    assert np.array_equal(found, np.repeat((grey // 256).astype(np.uint8)[..., None], 3, 2))


def test_of_an_animation_the_first_frame(tmp_path):
    for image_format in ("GIF", "PNG", "WEBP"):
        file, frames = io.BytesIO(), [Image.new("RGB", (W, H), c) for c in ("red", "blue")]
        how = dict(save_all=True, append_images=frames[1:], lossless=True)
        frames[0].save(file, format=image_format, **how)
        sample = read(tmp_path, row(image={"bytes": file.getvalue(), "path": None}))[0]
        assert sample["image"].getcolors() == [(W * H, (255, 0, 0))], image_format


@pytest.mark.parametrize(
    "reason, data",
    [
        (BAD_HEADER, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\n"),
        (BAD_DEPTH, encode_image(Image.fromarray(np.ones((H, W), np.float32)), "TIFF")),
        (TOO_LARGE, encode_image(Image.new("1", (1, MAX_IMAGE_SIDE + 1)))),
    ],
)
def test_images_that_are_refused_by_their_header(tmp_path, reason, data):
    """EPS is a program, which pillow hands to ghostscript."""
    dataset = read(tmp_path, row(), row(image={"bytes": data, "path": None}))
    assert len(dataset) == 1 and dataset.report()["skipped"] == {reason: 1}


def test_the_mask_of_a_large_image_is_reduced(tmp_path):
    image, mask = Image.new("L", (4000, 3000)), np.zeros((3000, 4000), dtype=bool)
    mask[600:1500, 1000:3000] = True
    changes = dict(image={"bytes": encode_image(image), "path": None}, mask_rle=encode_mask(mask))
    dataset = read(tmp_path, row(**changes))
    sample = dataset[0]
    assert sample["image"].size == (4000, 3000) and sample["mask"].shape == (1773, 2364)
    assert sample["mask"].mean() == pytest.approx(mask.mean(), rel=2e-3)
    assert dataset.report()["resized_masks"] == 0


def test_a_mask_that_is_damaged_after_opening_names_its_row(tmp_path, monkeypatch):
    dataset = read(tmp_path, row())
    monkeypatch.setattr(base, "decode_mask", lambda rle: decode_mask(rle | {"counts": "~"}))
    with pytest.raises(DamagedSample, match="^Part1/data-00000-of-00001/0: bad mask RLE$"):
        dataset[0]


def test_what_gets_lost_after_opening_is_damaged(tmp_path):
    """A truncated image, and a mask of which no pixel is left at its image's size."""
    lost = encode_mask(np.eye(H * 10, dtype=bool) & (np.arange(H * 10) == 0))
    cut_image = {"bytes": PNG[: len(PNG) // 2], "path": None}
    dataset = read(tmp_path, row(image=cut_image), row(mask_rle=lost), row())
    for number, reason in enumerate(("damaged image", "mask empty at the image's size")):
        with pytest.raises(DamagedSample, match=f"/{number}: {reason}$"):
            dataset[number]
    assert np.array_equal(dataset[2]["image"], IMAGE)


def test_what_only_decoding_shows_raises_with_id_and_reason(tmp_path):
    dataset = read(tmp_path, row(), row(image={"bytes": bad_huffman(JPEG), "path": None}))
    assert dataset.report()["skipped"] == {}  # its header is good
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


def test_pixel_limit_is_pillows_and_below_the_processors():
    from sa2va_hf.processing_sa2va import MAX_PIXELS as limit

    assert Image.MAX_IMAGE_PIXELS == MAX_PIXELS < limit


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
