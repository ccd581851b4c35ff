"""Read encoded images: their bytes, their size without decoding them, and their pixels."""

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

MAX_PIXELS = 100_000_000  # a worker holds 4 bytes of each, twice if it converts the image
MAX_IMAGE_SIDE = 65_535  # JPEG's; resizing to 1,024 columns takes 4 KiB for each row
# Pillow's own limit is a warning between once and twice its value.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# Other formats of pillow run programs (EPS) or cannot be whole.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "JPEG2000", "PPM")

NO_IMAGE, BAD_HEADER = "no image", "unreadable image header"
TOO_LARGE = f"image above {MAX_PIXELS} pixels, or {MAX_IMAGE_SIDE} on a side"
BAD_DEPTH = "image of floating-point pixels"
OUTSIDE = "image path outside of the data folder"
# What pillow raises for an image that is damaged.
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
COCO_NAME = re.compile(r"(?<!\d)0{6}(\d{6})(?!\d)")  # 2014 and 2017 number images alike
NOT_COCO = -1
Encoded = bytes | mmap.mmap  # an image as a file holds it
# ((W, H) or why the image cannot be used, its `image_key`)
ImageCheck = tuple[tuple[int, int] | str, int]
KEY_BYTES = 1024  # that tell an image from others of its length, at either end


def check_read(read: Callable[[], Encoded]) -> ImageCheck:
    """Return ((W, H), `image_key`) of the encoded image that `read()` returns.

    Only its header is read: damaged pixels are found when it is decoded. If the image cannot be
    used, the result is (reason, 0).
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
    if mode == "F":  # the range of its values is unknown
        return BAD_DEPTH, 0
    return (width, height), image_key(data)


def image_key(data: Encoded) -> int:
    """Hash the length and both ends of an encoded image to 64 bits, which all its copies share."""
    key = blake2b(len(data).to_bytes(8, "little"), digest_size=8)
    key.update(data[:KEY_BYTES])
    key.update(data[-KEY_BYTES:])
    return int.from_bytes(key.digest(), "little", signed=True)


def coco_id(name: str | None) -> int:
    """Return the id of the COCO image that a file or a sample is named after, or NOT_COCO.

    Sets that are made of COCO's images keep names such as COCO_train2014_000000123456.jpg, also
    where they encode the pictures again.
    """
    match = COCO_NAME.search(str(name))
    return int(match[1]) if match else NOT_COCO


def read_cell(cell: dict | bytes | None, folder: Path, root: Path) -> Encoded:
    """Return the encoded image of a cell, which is bytes or {"bytes", "path"}.

    Without bytes the path is read. It is `data:..;base64,..`, or a file relative to `folder` and
    below `root`, which is memory-mapped. Links are followed wherever they lead, since the owner of
    the folder made them, but the path comes from the data set.

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
    """Map a file into memory for reading. Raises OSError, or ValueError for an empty file."""
    if not os.path.isfile(path):  # opening a pipe would wait for ever
        raise FileNotFoundError(NO_IMAGE)
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def decode_image(data: Encoded) -> Image.Image:
    """Decode the image to RGB as stored: an EXIF rotation is not applied. Raises one of DAMAGED.

    An animation gives its first frame. 16 bits are reduced to the upper 8, as pillow itself does
    with colours; grey values it would clip at 255. Alpha is dropped.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        image.load()
        if image.mode.startswith("I"):
            grey = np.asarray(image).astype(np.int64).clip(0, 2**16 - 1) >> 8
            image = Image.fromarray(grey.astype(np.uint8))
        return image if image.mode == "RGB" else image.convert("RGB")
