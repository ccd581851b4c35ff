"""Encoded images: where they are, their size and whether they are whole without decoding them, and
their pixels."""

import base64
import io
import mmap
import os.path
import re
import struct
import zlib
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

MAX_PIXELS = 100_000_000  # which a worker holds decoded, 4 bytes each, twice if it converts them
MAX_IMAGE_SIDE = 65_535  # JPEG's; resizing to 1,024 columns takes 4 KiB for each row
# Pillow's own limit is a warning between once and twice its value.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# Of all that pillow opens: some others run programs (EPS) or cannot be whole.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "JPEG2000", "PPM")

NO_IMAGE, BAD_HEADER, TRUNCATED = "no image", "unreadable image header", "truncated image"
TOO_LARGE = f"image above {MAX_PIXELS} pixels"
TOO_LONG = f"image side above {MAX_IMAGE_SIDE} pixels"
BAD_DEPTH = "image of floating-point pixels"
OUTSIDE = "image path outside of the data folder"
# What pillow raises.
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)
DAMAGED += (Image.DecompressionBombError,)
STARTS = (b"\xff\xd8\xff", b"\x89PN")  # of JPEG and PNG
ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # marks, by format
COCO = re.compile(r"(?<!\d)0{6}(\d{6})(?!\d)")  # of 2014 and 2017 alike
NOT_COCO = -1
KEY_BYTES = 1024  # that tell an image from others of its length, at either end


class OutsideFolder(ValueError):
    """A path of a data set leads out of its folder."""


def check_read(read, *args) -> tuple[tuple[int, int] | str, int]:
    """(`check_image`, `image_key`) of what `read(*args)` returns; 0 is the key of nothing."""
    try:
        data = read(*args)
    except FileNotFoundError:
        return NO_IMAGE, 0
    except OutsideFolder:
        return OUTSIDE, 0
    except DAMAGED:
        return BAD_HEADER, 0
    return check_image(data), image_key(data)


def check_image(data) -> tuple[int, int] | str:
    """(W, H) of an encoded image, or why it cannot be used; reads the header and the last bytes.

    JPEG and PNG must also hold their end mark (bytes behind it are allowed, as pillow allows
    them); whether an image of another format is whole shows only when it is decoded.
    """
    try:
        # Pillow reads an Arrow buffer in place, but for formats that seek beyond its end.
        in_place = bytes(data[:3]) in STARTS
        file = pa.BufferReader(data) if in_place else io.BytesIO(data)
        with Image.open(file, formats=FORMATS) as image:
            (width, height), mode = image.size, image.mode
            end = ENDS.get(image.format, b"")
            header = file.tell() if end else 0
    except Image.DecompressionBombError:
        return TOO_LARGE
    except DAMAGED:
        return BAD_HEADER
    if width * height > MAX_PIXELS:
        return TOO_LARGE
    if max(width, height) > MAX_IMAGE_SIDE:
        return TOO_LONG
    if mode == "F":  # of what range nobody says
        return BAD_DEPTH
    # Behind the header, since a thumbnail in it has an end mark too; coded pixels never hold one.
    whole = not end or bytes(data[-len(end) :]) == end or end in bytes(data[header:])
    return (width, height) if whole else TRUNCATED


def image_key(data) -> int:
    """64 bits that all copies of an encoded image share: of its length and both its ends."""
    key = blake2b(len(data).to_bytes(8, "little"), digest_size=8)
    key.update(data[:KEY_BYTES])
    key.update(data[-KEY_BYTES:])
    return int.from_bytes(key.digest(), "little", signed=True)


def coco_id(name: str | None) -> int:
    """The id of the COCO image that a file or a sample is named by, or NOT_COCO.

    Sets that are made of COCO's images keep its names, as COCO_train2014_000000123456.jpg, also
    where they encode its pictures anew.
    """
    found = COCO.search(name or "")
    return int(found[1]) if found else NOT_COCO


def read_cell(data, path: str | None, folder: Path, root: Path | None = None):
    """The encoded image of a cell struct<bytes, path>: its bytes, else what its path names.

    A path is `data:..;base64,..`, or a file relative to `folder`, which is memory-mapped; it must
    lie below `root`, default `folder`. Links are followed wherever they lead: who made the folder
    put them there, but not who wrote the path.

    Raises:
        FileNotFoundError: neither bytes nor such a file; OutsideFolder; or another of DAMAGED.
    """
    if data is not None:
        return data
    if not path:
        raise FileNotFoundError("neither bytes nor a path")
    if path.startswith("data:"):
        return base64.b64decode(path.partition("base64,")[2])
    top, place = (os.path.abspath(p) for p in (root or folder, folder / path))
    if os.path.commonpath([top, place]) != top:
        raise OutsideFolder(path)
    return map_file(place)


def map_file(path) -> mmap.mmap:
    """The file, memory-mapped for reading; raises OSError, or ValueError for an empty file."""
    if not os.path.isfile(path):  # opening a pipe would wait for ever
        raise FileNotFoundError(f"{path} is no file")
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def decode_image(data) -> Image.Image:
    """The image in RGB, as stored: an EXIF rotation is not applied. Raises one of DAMAGED.

    Of an animation the first frame. Of 16 bits the upper 8, as pillow itself takes of 16-bit
    colours; its grey ones it would clip at 255. Alpha is dropped.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        image.load()
        if image.mode.startswith("I"):
            grey = np.asarray(image).astype(np.int64).clip(0, 2**16 - 1) >> 8
            image = Image.fromarray(grey.astype(np.uint8))
        return image if image.mode == "RGB" else image.convert("RGB")
