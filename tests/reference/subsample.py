"""Makes the files of this folder out of a full recording of the original model (see README.md).

    python -m tests.reference.subsample FOLDER_OF_THE_FULL_RECORDING

The same recording gives the same bytes. Nothing is computed anew, numbers are only left out.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
STRIDE = 7  # a prime that divides no row of a float tensor: every row and every column is met
BLOCK = 64
LARGE = 2**15  # elements; smaller tensors are kept whole
INPUTS = ("image_A_hwc_u8", "image_B_hwc_u8")  # kept whole, whatever their size
MASKS = ("mask_A_nhw_u8", "mask_B_nhw_u8")  # kept as bits
UNUSED = ("prompt16_avgpool_direct_A", "prompt16_avgpool_direct_B")  # a rule nobody trained with
FACTS = {
    "tile_grid_max12_thumb": None,
    "weight_checks": None,
    "sam_A_u8_sum": None,
    "sam_B_u8_sum": None,
    "single_A": ["generate_12_ids"],
    "single_B": ["generate_12_ids"],
    "batch2": ["generate_12_ids"],
    "samx_arg": ["argmax"],
    "e2e_A": ["prediction"],
    "e2e_B": ["prediction"],
}  # fields of the recording's JSON file that the tests read; None = all of one


def thin(tensor: torch.Tensor, large: int = LARGE) -> torch.Tensor:
    """The tensor itself if it is small, else every 7th element, row-major, as one vector.

    Of a float tensor the means of 64 neighbours each follow, so that no element can be far off
    unseen; the last mean is of those that are left and zeros.
    """
    if tensor.numel() <= large:
        return tensor
    flat = tensor.flatten()
    if not tensor.is_floating_point():
        return flat[::STRIDE].clone()
    blocks = F.pad(flat.double(), (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return torch.cat([flat[::STRIDE], blocks.mean(1).to(flat.dtype)])


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the bytes of an integer tensor: equality of the elements that `thin` leaves out."""
    return zlib.crc32(tensor.contiguous().numpy().tobytes())


def pack(masks: torch.Tensor) -> torch.Tensor:
    """(n, H, ceil(W / 8)) uint8: the (n, H, W) masks, a bit for each pixel."""
    return torch.from_numpy(np.packbits(masks.numpy() != 0, axis=-1))


def unpack(bits: torch.Tensor, width: int) -> torch.Tensor:
    """(n, H, width) uint8 of zeros and ones: what `pack` was given."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1, count=width))


def main(source: Path):
    """Write numbers.safetensors, facts.json, and the layouts and configurations of both sizes."""
    numbers, kept = load_file(source / "tiny_reference.safetensors"), {}
    recorded = json.loads((source / "tiny_reference.json").read_text())
    facts = {
        name: recorded[name] if fields is None else {k: recorded[name][k] for k in fields}
        for name, fields in FACTS.items()
    } | {"shapes": {}, "checksums": {}}
    for name in sorted(set(numbers) - set(UNUSED)):
        tensor = numbers[name]
        kept[name] = (
            tensor if name in INPUTS else pack(tensor) if name in MASKS else thin(tensor).clone()
        )
        if name not in INPUTS + MASKS and tensor.numel() > LARGE:
            facts["shapes"][name] = list(tensor.shape)
            if not tensor.is_floating_point():
                facts["checksums"][name] = checksum(tensor)
    save_file(kept, HERE / "numbers.safetensors")
    (HERE / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    for size in ("tiny", "sa2va_4b"):
        layout = json.loads((source / f"{size}_manifest.json").read_text())
        lines = ",\n".join(f"{json.dumps(key)}: {shape}" for key, shape in layout.items())
        (HERE / f"{size}_layout.json").write_text(f"{{\n{lines}\n}}\n")
        config = json.loads((source / f"{size}_config.json").read_text())
        (HERE / f"{size}_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
