"""The edge cases of bad and odd data, one by one, and what a correct reader reports of each."""

import io
import struct
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
from PIL import Image

from tools.demo.scenes import make_scene
from tools.gar_writer import encode_image, encode_mask

PER_CASE = 250  # one row in so many is a case's, plus 0 to 2 more


def regions(seed: int) -> Iterator[tuple[Image.Image, np.ndarray, str, str]]:
    """Yield endless (image, mask (H, W) bool, caption, shape) of drawn scenes."""
    for i in range(1 << 30):
        scene = make_scene(seed, 11, i)
        yield from ((scene.image, obj.mask, obj.caption, obj.shape) for obj in scene.objects)


def good(image: Image.Image, mask: np.ndarray, text: str) -> dict:
    """A region as both layouts hold it: the encoded image, the run-length mask, the caption."""
    return dict(image=encode_image(image, "JPEG"), rle=encode_mask(mask), caption=text)


def empty(mask: np.ndarray) -> np.ndarray:
    return np.zeros_like(mask)


def one_pixel(mask: np.ndarray, scale: int = 1) -> np.ndarray:
    """A mask `scale` times as large with one pixel set, which no smaller size keeps."""
    found = np.zeros((mask.shape[0] * scale, mask.shape[1] * scale), dtype=bool)
    found[0, 0] = True
    return found


def huge_png() -> bytes:
    """A complete PNG file whose header says 50,000 x 50,000."""
    chunks = (
        b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0),
        b"IDAT" + zlib.compress(b"\0"),
        b"IEND",
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks
    )


def bad_huffman(jpeg: bytes) -> bytes:
    """The JPEG with its first Huffman table overwritten: only decoding fails."""
    at = jpeg.index(b"\xff\xc4") + 5
    return jpeg[:at] + b"\xff" * 16 + jpeg[at + 16 :]


def rotated_by_exif(image: Image.Image) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    image.save(file, format="JPEG", exif=exif)
    return file.getvalue()


def runs_of(mask: np.ndarray) -> dict:
    """The mask with uncompressed counts."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat])))
    return {
        "counts": np.diff(np.concatenate([[0], edges, [flat.size]])).tolist(),
        "size": list(mask.shape),
    }


# name -> (the reason it is skipped for, or None; what is other than in a good region, of image i,
# mask m and caption c)
CASES = {
    "mask of twice the size": (
        None,
        lambda i, m, c: dict(rle=encode_mask(np.kron(m, np.ones((2, 2), dtype=bool)))),
    ),
    "region below a cell": (None, lambda i, m, c: dict(rle=encode_mask(one_pixel(m)))),
    "full mask": (None, lambda i, m, c: dict(rle=encode_mask(~empty(m)))),
    "EXIF orientation": (None, lambda i, m, c: dict(image=rotated_by_exif(i))),
    "markers in the caption": (
        None,
        lambda i, m, c: dict(caption=f'<image>\n<Prompt0> "{c}" {{0}}\n[SEG]<IMG_CONTEXT>'),
    ),
    **{
        f"{mode} image": (
            None,
            lambda i, m, c, mode=mode, kind=kind: dict(image=encode_image(i.convert(mode), kind)),
        )
        for mode, kind in (("L", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"))
    },
    "blank caption": ("blank caption", lambda i, m, c: dict(caption=" \n")),
    "caption of markers": ("blank caption", lambda i, m, c: dict(caption="<image> [SEG]")),
    "all-zero mask": ("empty mask", lambda i, m, c: dict(rle=encode_mask(empty(m)))),
    "cut counts": (
        "bad mask RLE",
        lambda i, m, c: dict(rle=encode_mask(m) | {"counts": encode_mask(m)["counts"][:-1]}),
    ),
    "characters in counts": (
        "bad mask RLE",
        lambda i, m, c: dict(rle=encode_mask(m) | {"counts": "~~ ~"}),
    ),
    "counts of another size": (
        "bad mask RLE",
        lambda i, m, c: dict(rle=encode_mask(m) | {"size": [m.shape[0], m.shape[1] + 1]}),
    ),
    "mask of 10^10 pixels": (
        "bad mask RLE",
        lambda i, m, c: dict(rle=encode_mask(m) | {"size": [100_000, 100_000]}),
    ),
    "null counts": ("no mask", lambda i, m, c: dict(rle={"counts": None, "size": None})),
    "null mask": ("no mask", lambda i, m, c: dict(rle=None)),
    "pixel lost in resizing": (
        "mask empty at the image's size",
        lambda i, m, c: dict(rle=encode_mask(one_pixel(m, 10))),
    ),
    "no image": ("no image", lambda i, m, c: dict(image=None)),
    "no image file": ("unreadable image header", lambda i, m, c: dict(image=b"<html>404</html>")),
    "cut JPEG": ("damaged image", lambda i, m, c: dict(image=encode_image(i, "JPEG")[:-400])),
    "cut PNG": ("damaged image", lambda i, m, c: dict(image=encode_image(i, "PNG")[:-400])),
    "50,000 x 50,000 header": (
        "image above 100000000 pixels, or 65535 on a side",
        lambda i, m, c: dict(image=huge_png()),
    ),
    "bad Huffman table": (
        "damaged image",
        lambda i, m, c: dict(image=bad_huffman(encode_image(i, "JPEG"))),
    ),
}


class Planted:
    """Facts that a correct reader reports."""

    def __init__(self):
        self.rows, self.kept, self.resized, self.skipped, self.damaged = (
            0,
            0,
            0,
            Counter(),
            Counter(),
        )

    def add(self, reason: str | None, resized: bool = False):
        """One region: kept, or skipped for `reason`, or kept at first and found damaged."""
        late = reason in ("damaged image", "mask empty at the image's size")
        (self.damaged if late else self.skipped)[reason] += reason is not None
        self.kept += reason is None or late
        self.resized += resized

    def report(self) -> dict:
        return {
            "rows": self.rows,
            "kept": self.kept,
            "skipped": {r: n for r, n in self.skipped.items() if n},
            "resized_masks": self.resized,
            "damaged": {r: n for r, n in self.damaged.items() if n},
        }


def counted_cases(num_rows: int):
    """Names of CASES, each as often as it is planted."""
    return [
        name for k, name in enumerate(CASES) for _ in range(max(1, num_rows // PER_CASE) + k % 3)
    ]


def plant(name: str | None, region: tuple, planted: Planted) -> tuple[dict, str]:
    """(the region with case `name` in it, its shape), and counts it."""
    image, mask, text, shape = region
    reason, changes = CASES[name] if name else (None, lambda *args: {})
    planted.add(reason, resized=name in ("mask of twice the size", "pixel lost in resizing"))
    return good(image, mask, text) | changes(image, mask, text), shape


class Bomb:
    """Stops the process that unpickles it."""

    def __reduce__(self):
        return exit, (3,)
