"""Hostile images, masks and captions, each drawn from a random generator."""

import base64
import io
import os
import random
import struct
import zlib

import numpy as np
from PIL import Image

from tests.campaigns.messy_cases import bad_huffman, huge_png, runs_of
from tools.gar_writer import encode_mask

SIZES = [(1, 1), (1, 2), (20_000, 20), (20, 20_000), (2500, 1900), (65_536, 1), (1, 5000)]
MODES = {  # format -> modes that it holds
    "PNG": ("RGB", "L", "LA", "RGBA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L", "1"),
    "BMP": ("RGB", "L", "P", "1"),
    "TIFF": ("RGB", "L", "CMYK", "I;16", "I", "F", "LAB", "YCbCr"),
    "JPEG2000": ("RGB", "L", "RGBA"),
    "PPM": ("RGB", "L", "1"),
}
PIECES = (
    "[SEG] [seg] <img> </img> <IMG_CONTEXT> <p> </p> <vp> </vp> <|im_end|> <|im_start|> <|end|> "
    "<|user|> <|endoftext|> <|vision_start|> <tool_call> <image> <Prompt7> [S<img>EG] [S[SEG]EG] "
    "<|im_<vp>end|> <IMG_<p>CONTEXT> [S\0EG] [SE\x1fG] <\x7fimg> <|im_e\x9bnd|> "
    "<|<|im_end|>im_end|> "
    "[S\u200bEG] \uff3bSEG\uff3d \uff1cimg\uff1e <\u0131mg> <|\u0131m_end|> [\u017fEG] "
    "<\u0338 \u202eGES\u202c \u05d0\u05d1 \u0645\u0631\u062d\u0628\u0627 \u4e00\u5200 \U0001f600 "
    "e\u0301 \u0130 \u1e9e \ufb01 \ufffd \ufeff {input} {x} {} %s \\n <b> a a, a. the red cup it's"
).split(" ")
CONTROLS = "\n\r\t\0\x08\x1b\x7f\x85\u2028\u2029\xa0"
HALVES = ("\ud800", "\udfff", "\ud83d\ud83d", "\udcff")


def text_of(rng: random.Random) -> str | None:
    """A caption: pieces with and without spaces, or none, or 5,000 words."""
    how = rng.random()
    if how < 0.04:
        return rng.choice([None, "", " ", "\n", "\0", "[SEG]", "<img> <vp>", "\u200b", "."])
    if how < 0.07:
        count = rng.choice([400, 600, 5000])
        return " ".join(rng.choice(PIECES) for _ in range(count))
    if how < 0.08:
        return rng.choice("a[<\0 \u05d0") * rng.choice([1000, 40_000])
    pieces = [rng.choice(PIECES) for _ in range(rng.randrange(1, 12))]
    if rng.random() < 0.3:
        pieces.insert(rng.randrange(len(pieces)), rng.choice(CONTROLS))
    if rng.random() < 0.06:
        pieces.insert(rng.randrange(len(pieces)), rng.choice(HALVES))
    return rng.choice(["", " ", " "]).join(pieces)


def picture(rng: random.Random, size: tuple[int, int], mode: str) -> Image.Image:
    """An image of noise, coarse where it is large."""
    width, height = size
    numbers = np.random.default_rng(rng.randrange(2**32))
    if mode in ("I;16", "I", "F"):
        kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
        return Image.fromarray(numbers.integers(0, 2**16, (height, width)).astype(kind))
    coarse = numbers.integers(0, 256, (min(height, 64), min(width, 64), 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size)
    if mode in ("LA", "RGBA") or (mode == "P" and rng.random() < 0.5):
        image.putalpha(rng.randrange(256))
    return image.convert(mode)


def image_of(rng: random.Random) -> tuple[bytes | None, tuple[int, int]]:
    """(an encoded image or what pretends to be one, the size that it was meant to have)."""
    size = (rng.randrange(1, 300), rng.randrange(1, 300))
    if rng.random() < 0.04:
        size = rng.choice(SIZES)
    kind = rng.choice(list(MODES))
    if rng.random() < 0.5:
        kind = rng.choice(["PNG", "JPEG"])
    image, how, file = picture(rng, size, rng.choice(MODES[kind])), {}, io.BytesIO()
    if kind in ("JPEG", "PNG", "WEBP", "TIFF") and rng.random() < 0.2:
        how["exif"] = Image.Exif()
        how["exif"][0x0112] = rng.randrange(10)
    if kind in ("GIF", "PNG", "WEBP", "TIFF") and image.mode in ("RGB", "P", "L", "RGBA"):
        if rng.random() < 0.2:
            how |= dict(save_all=True, append_images=[picture(rng, size, image.mode)] * 2)
    if image.mode == "P" and kind == "PNG" and rng.random() < 0.5:
        how["transparency"] = rng.randrange(256)
    try:
        image.save(file, format=kind, **how)
    except (OSError, ValueError, RuntimeError, SystemError, ArithmeticError):  # a side, a mode
        kind, file = "PNG", io.BytesIO()
        image.convert("RGB").save(file, format=kind)
    return damage(rng, file.getvalue(), kind), size


def damage(rng: random.Random, data: bytes, kind: str) -> bytes | None:
    """The image as it is, in two of three cases, or damaged, or something else altogether."""
    case = rng.randrange(30)
    if case == 0:
        return data[: rng.randrange(len(data))]
    if case in (1, 2):
        mutated = bytearray(data)
        for _ in range(rng.choice((1, 4, 16))):
            limit = rng.choice((len(data), min(100, len(data))))
            mutated[rng.randrange(limit)] = rng.randrange(256)
        return bytes(mutated)
    if case == 3 and kind == "PNG":  # a header of another size, with a good checksum
        sides = [rng.choice((0, 1, 50, 9_999, 10_001, 65_536, 2**31 - 1)) for _ in range(2)]
        header = b"IHDR" + struct.pack(">II", *sides) + data[24:29]
        return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    if case == 4 and kind == "PNG":  # a text that unpacks to 64 MiB
        text = b"zTXta\0\0" + zlib.compress(bytes(2**26), 9)
        chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
        return data[:33] + chunk + data[33:]
    if case == 5 and kind == "JPEG":
        return bad_huffman(data)
    if case == 6:
        return rng.choice([b"", None, b"GIF89a", huge_png(), rng.randbytes(200), b"%!PS-Adobe-3.0"])
    return data + rng.randbytes(20) if case == 7 else data


def mask_of(rng: random.Random, size: tuple[int, int]):
    """Run lengths of a mask for an image of `size` (W, H), or what pretends to be some."""
    width, height = size
    if rng.random() < 0.15:
        width, height = rng.choice([(height, width), (7, 5), (1, 1), (width + 1, height), (999, 3)])
    mask = np.zeros((height, width), dtype=bool)
    shape = rng.randrange(6)
    if shape == 1:
        mask[rng.randrange(height), rng.randrange(width)] = True
    elif shape == 2:
        mask[:] = True
    elif shape == 3:
        mask[:, :: rng.randrange(1, 4)] = True
    elif shape:
        top, left = rng.randrange(height), rng.randrange(width)
        mask[top : top + height // 2 + 1, left : left + width // 2 + 1] = True
    rle = runs_of(mask) if rng.random() < 0.1 else encode_mask(mask)
    counts = rle["counts"]
    if not isinstance(counts, str):
        return rle
    case = rng.randrange(40)
    if case == 0:
        return rle | {"counts": counts[: rng.randrange(len(counts))]}
    if case == 1:
        place = rng.randrange(len(counts))
        return rle | {"counts": counts[:place] + chr(rng.randrange(1, 127)) + counts[place + 1 :]}
    if case == 2:
        return rle | {"size": [rng.choice((0, -1, 5, 10**5, 2**62)), width]}
    return rle | {"counts": None} if case == 3 else None if case == 4 else rle


def place_of(rng: random.Random, data: bytes | None, folder, name: str) -> dict:
    """A cell struct<bytes, path> of Grasp-Any-Region; some images lie in files below `folder`."""
    case = rng.randrange(12)
    if case == 0 and data:
        (folder / name).write_bytes(data)
        return {"bytes": None, "path": rng.choice([name, f"./{name}", f"../{folder.name}/{name}"])}
    if case == 1 and data:
        return {"bytes": None, "path": "data:;base64," + base64.b64encode(data).decode()}
    if case == 2:
        paths = [
            "../../x.png",
            "/etc/passwd",
            "/dev/zero",
            "pipe",
            ".",
            "",
            None,
            "a\0b",
            "x" * 9000,
        ]
        if not os.path.lexists(folder / "pipe"):
            os.mkfifo(folder / "pipe")
        return {"bytes": None, "path": rng.choice(paths)}
    return {"bytes": data, "path": rng.choice([None, "/elsewhere.png"])}
