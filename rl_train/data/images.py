"""Encoded images: where they are, their size without decoding them, and their pixels."""

import base64
import io
import mmap
import os.path
import re
import struct
import zlib
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image

MAX_PIXELS = 100_000_000  # which a worker holds decoded, 4 bytes each, twice if it converts them
MAX_IMAGE_SIDE = 65_535  # JPEG's; resizing to 1,024 columns takes 4 KiB for each row
# Pillow's own limit is a warning between once and twice its value.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# Of all that pillow opens: some others run programs (EPS) or cannot be whole.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "JPEG2000", "PPM")

NO_IMAGE, BAD_HEADER = "no image", "unreadable image header"
TOO_LARGE = f"image above {MAX_PIXELS} pixels, or {MAX_IMAGE_SIDE} on a side"
BAD_DEPTH = "image of floating-point pixels"
OUTSIDE = "image path outside of the data folder"
# What pillow raises.
DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
COCO = re.compile(r"(?<!\d)0{6}(\d{6})(?!\d)")  # of 2014 and 2017 alike
NOT_COCO = -1
Encoded = bytes | mmap.mmap  # an image as a file holds it
# ((W, H) or why the image cannot be used, its `image_key`)
CheckedImage = tuple[tuple[int, int] | str, int]
KEY_BYTES = 1024  # that tell an image from others of its length, at either end


def check_read(read: Callable[[], Encoded]) -> CheckedImage:
    """((W, H), `image_key`) of the encoded image that `read()` returns; reads its header only.

    Of an image that cannot be used (why, 0). Whether its pixels are whole shows when it is decoded.
    """
    try:
        data = read()
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            (width, height), mode = image.size, image.mode
    except FileNotFoundError as error:
        return str(error), 0
    except Image.DecompressionBombError:
        return TOO_LARGE, 0
    except DAMAGED:
        return BAD_HEADER, 0
    if width * height > MAX_PIXELS or max(width, height) > MAX_IMAGE_SIDE:
        return TOO_LARGE, 0
    if mode == "F":  # of what range nobody says
        return BAD_DEPTH, 0
    return (width, height), image_key(data)


def image_key(data: Encoded) -> int:
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
    match = COCO.search(str(name))
    return int(match[1]) if match else NOT_COCO


def read_cell(cell: dict | bytes | None, folder: Path, root: Path) -> Encoded:
    """The encoded image of a cell, bytes or {"bytes", "path"}: its bytes, else what its path names.

    A path is `data:..;base64,..`, or a file relative to `folder`, which is memory-mapped; it must
    lie below `root`. Links are followed wherever they lead: who made the folder put them there, but
    not who wrote the path.

    Raises:
        FileNotFoundError: the reason, if there are no bytes and no such file; or another of
            DAMAGED.
    """
    data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    if isinstance(data, bytes):
        return data
    if not isinstance(path, str) or not path:
        raise FileNotFoundError(NO_IMAGE)
    if path.startswith("data:"):
        return base64.b64decode(path.partition("base64,")[2])
    top, file = os.path.abspath(root), os.path.abspath(folder / path)
    if os.path.commonpath([top, file]) != top:
        raise FileNotFoundError(OUTSIDE)
    return map_file(file)


def map_file(path: str | Path) -> mmap.mmap:
    """The file, memory-mapped for reading; raises OSError, or ValueError for an empty file."""
    if not os.path.isfile(path):  # opening a pipe would wait for ever
        raise FileNotFoundError(NO_IMAGE)
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def decode_image(data: Encoded) -> Image.Image:
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
