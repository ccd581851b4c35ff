"""Which base a checkpoint belongs to: a digest of the base's weights as they are stored.

An adapter and trainables load onto any base of the same shapes, and on another than their own they
mean nothing.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sa2va_hf.weights import find_keys

SPOTS, SPOT = 4, 64  # parts of a tensor that are read, evenly spread, and bytes of each


@dataclass(frozen=True)
class BaseFingerprint:
    """The frozen model that a run or an evaluation stands on."""

    folders: str  # in words
    digest: str  # of its weights


def fingerprint_of(*folders: str | Path) -> BaseFingerprint:
    """The base that lies in these folders: the model's, and SAM2's if that has one of its own.

    A 4B model takes a tenth of a second: of each tensor a few bytes are read, with its name, shape
    and type. So it does not matter how the files are cut, nor how the base is loaded.

    Raises:
        ValueError: a folder holds no whole safetensors; names the file.
    """
    whole = hashlib.sha256()
    for folder in folders:
        files = find_keys(Path(folder))
        headers = {file: _header(file) for file in set(files.values())}
        opened = {file: np.memmap(file, dtype=np.uint8, mode="r") for file in headers}
        for key, file in sorted(files.items()):
            start, stated = headers[file][0], headers[file][1][key]
            first, last = (start + place for place in stated["data_offsets"])
            whole.update(f"{key} {stated['dtype']} {stated['shape']};".encode())
            for spot in np.linspace(first, max(last - SPOT, first), SPOTS).astype(int):
                whole.update(opened[file][spot : min(spot + SPOT, last)].tobytes())
    return BaseFingerprint(" and ".join(map(str, folders)), whole.hexdigest()[:16])


def _header(file: Path) -> tuple[int, dict]:
    """(where the numbers begin, {tensor: type, shape, place}) of a whole safetensors file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        return 8 + size, json.loads(opened.read(size))
