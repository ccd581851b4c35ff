"""Encoded images: their size and whether they are whole without decoding them, and their pixels."""

import base64
import io
import mmap
import struct
import zlib
from hashlib import blake2b
from pathlib import Path

from PIL import Image

MAX_PIXELS = 300_000_000  # as in sa2va_hf.processing_sa2va
Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # pillow's own limit lies below ours, and is a warning between once and twice its value

NO_IMAGE, BAD_HEADER, TRUNCATED, TOO_LARGE = (
    "no image",
    "unreadable image header",
    "truncated image",
    f"image above {MAX_PIXELS} pixels",
)
DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)  # from pillow

PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {
    0xC4,
    0xC8,
    0xCC,
}  # the JPEG segments that hold height and width
SCAN_OR_END = {0xDA, 0xD9}
KEY_BYTES = 1024  # that tell an image from others of its length, at either end


def check_image(data) -> tuple[int, int] | str:
    """(W, H) of an encoded image, or the reason why it cannot be used; reads the header and the last bytes.

    JPEG and PNG must also hold their end mark (bytes behind it are allowed, as pillow allows them); whether an image of
    another format is whole shows only when it is decoded.

    Args:
        data: bytes, memoryview or another flat buffer of bytes.
    """
    size, whole = None, True
    if data[:3] == JPEG_START:
        size, body = _jpeg_size(data)
        whole = (
            size is None or data[-2:] == JPEG_END or bytes(data[body:]).find(JPEG_END) >= 0
        )  # never inside of coded pixels
    elif data[:8] == PNG_START and data[12:16] == b"IHDR" and len(data) >= 24:
        size = struct.unpack_from(">II", data, 16)
        whole = data[-8:] == PNG_END or bytes(data[24:]).rfind(PNG_END) >= 0
    if size is None or 0 in size:
        try:
            with Image.open(io.BytesIO(data)) as image:
                size = image.size
        except Image.DecompressionBombError:
            return TOO_LARGE
        except DAMAGED:
            return BAD_HEADER
    if size[0] * size[1] > MAX_PIXELS:
        return TOO_LARGE
    return tuple(size) if whole else TRUNCATED


def image_key(data) -> int:
    """A number of 64 bits that all copies of an encoded image share, in every process: from its length, first and last KEY_BYTES."""
    key = blake2b(len(data).to_bytes(8, "little"), digest_size=8)
    key.update(data[:KEY_BYTES])
    key.update(data[-KEY_BYTES:])
    return int.from_bytes(key.digest(), "little", signed=True)


def check_image_path(path: str | None, folder: Path) -> tuple[tuple[int, int] | str, int]:
    """(`check_image`, `image_key`) of a path cell, see `read_path`; the key is 0 where nothing can be read."""
    try:
        data = read_path(path, folder)
        return check_image(data), image_key(data)
    except FileNotFoundError:
        return NO_IMAGE, 0
    except DAMAGED:
        return BAD_HEADER, 0


def read_path(path: str | None, folder: Path):
    """The encoded image behind a path cell: `data:..;base64,..`, or a memory-mapped file relative to `folder`.

    Raises one of DAMAGED, FileNotFoundError if there is no such file.
    """
    if not path:
        raise FileNotFoundError("neither bytes nor a path")
    if path.startswith("data:"):
        return base64.b64decode(path.partition("base64,")[2])
    return map_file(folder / path)


def map_file(path: Path) -> mmap.mmap:
    """The file, memory-mapped for reading; raises OSError, or ValueError for an empty file."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def decode_image(data) -> Image.Image:
    """The image in RGB, never rotated (EXIF), since masks belong to the stored pixels. Raises one of DAMAGED."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")


def _jpeg_size(data) -> tuple[tuple[int, int] | None, int]:
    """((W, H), position of the frame segment); None instead of a size where the segments do not lead to one."""
    at, end = 2, len(data) - 9
    while at <= end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in START_OF_FRAME:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return (width, height), at
        if marker in SCAN_OR_END:
            break
        at += 1 if marker == 0xFF else 2 + (data[at + 2] << 8 | data[at + 3])
    return None, at
