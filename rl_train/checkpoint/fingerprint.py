"""Digest of a base's stored weights, by which a checkpoint names the base that it belongs to.

An adapter and trainables load onto any base of the same shapes, but they only work with their own.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sa2va_hf.weights import find_keys

NUM_SPOTS, SPOT_BYTES = 4, 64  # evenly spread parts of a tensor that are read


@dataclass(frozen=True)
class BaseFingerprint:
    """The frozen model of a run or an evaluation."""

    folders: str  # its folders, for messages
    digest: str  # of its weights


def fingerprint_of(*folders: str | Path) -> BaseFingerprint:
    """Return the fingerprint of the base in these folders: the model's, and SAM2's if separate.

    The digest covers each tensor's name, shape, type and a few of its bytes; it takes a tenth of a
    second for a 4B model. How tensors are spread over files makes no difference.

    Raises:
        ValueError: a folder holds no whole safetensors; names the file.
    """
    sha256 = hashlib.sha256()
    for folder in folders:
        file_of_key = find_keys(Path(folder))
        contents = {
            file: np.memmap(file, dtype=np.uint8, mode="r") for file in set(file_of_key.values())
        }
        headers = {file: _header(content) for file, content in contents.items()}
        for key, file in sorted(file_of_key.items()):
            data_start, tensors = headers[file]
            first, last = (data_start + offset for offset in tensors[key]["data_offsets"])
            sha256.update(f"{key} {tensors[key]['dtype']} {tensors[key]['shape']};".encode())
            for spot in np.linspace(first, max(last - SPOT_BYTES, first), NUM_SPOTS).astype(int):
                sha256.update(contents[file][spot : min(spot + SPOT_BYTES, last)].tobytes())
    return BaseFingerprint(" and ".join(map(str, folders)), sha256.hexdigest()[:16])


def _header(content: np.ndarray) -> tuple[int, dict[str, dict]]:
    """Return (offset of the first tensor, {tensor: dtype, shape, data_offsets}) of a safetensors.

    Args:
        content: (n,) uint8, the file's bytes, which begin with the header's length.
    """
    size = int.from_bytes(content[:8].tobytes(), "little")
    return 8 + size, json.loads(content[8 : 8 + size].tobytes())
