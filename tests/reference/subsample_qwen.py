"""Makes the files qwen25vl* and qwen3vl* of this folder out of full recordings (see README.md).

    python -m tests.reference.subsample_qwen FOLDER_OF_THE_FULL_RECORDINGS

The same recordings give the same bytes. Nothing is computed anew, numbers are only left out.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.reference.subsample import thin

HERE = Path(__file__).parent
FAMILIES = ("qwen25vl", "qwen3vl")
SIZES = dict(qwen25vl=("3b", "7b"), qwen3vl=("2b", "4b"))
LARGE = 2**11  # elements; smaller tensors are kept whole
# Colours by which pixels were normalised: mean and std.
COLOURS = dict(
    qwen25vl=((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    qwen3vl=((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
)
PATCH = dict(qwen25vl=14, qwen3vl=16)
# With the other image processor, or the same numbers again.
UNUSED = re.compile(r"^e2e_[AB]_|^pixA_|_rows_stride97$|rope_deltas|_flipped_|logits_orig")
SLOW_ROWS = re.compile(r"^slow_.*_rows_stride97$")
FACTS = ("texts", "grids", "token_ids", "A", "B", "AB", "text", "e2e_text", "e2e_video2")
LAYER = re.compile(r"((?:layers|blocks|deepstack_merger_list)\.)(\d+)(?=\.)")


def levels(rows: torch.Tensor, family: str) -> torch.Tensor:
    """Return normalised patches (n, 3 * 2 * p * p) of two equal frames as (n, 3, p, p) uint8."""
    p, (mean, std) = PATCH[family], (torch.tensor(c).view(3, 1, 1) for c in COLOURS[family])
    frames = rows.view(len(rows), 3, 2, p, p)
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])
    return ((frames[:, :, 0] * std + mean) * 255).round().to(torch.uint8)


def rows(levels: torch.Tensor, family: str) -> torch.Tensor:
    """Return the patches that `levels` was given."""
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in COLOURS[family])
    values = ((levels.float() / 255 - mean) / std)[:, :, None]
    return values.expand(-1, -1, 2, -1, -1).flatten(1)


def patterns(layout: dict[str, list[int]]) -> dict[str, list]:
    """Return {key with * for the number of a layer: [numbers of layers, shape]} of a layout.

    SAM2's keys are left out: they are those of Sa2VA-4B.
    """
    layers = defaultdict(list)
    for key, shape in layout.items():
        if not key.startswith("grounding_encoder."):
            number = LAYER.search(key)
            layers[LAYER.sub(r"\1*", key), tuple(shape)].append(number and number[2])
    return {key: [len(set(found)), list(shape)] for (key, shape), found in layers.items()}


def expand(patterns: dict[str, list], sam2: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    """Return the layout that `patterns` was given; sam2: a layout with SAM2's keys."""
    layout = {key: tuple(s) for key, s in sam2.items() if key.startswith("grounding_encoder.")}
    for key, (count, shape) in patterns.items():
        for number in range(count):
            layout[key.replace("*", str(number))] = tuple(shape)
    return layout


def main(source: Path):
    """Write the numbers, facts, layouts and configurations of both families."""
    for family in FAMILIES:
        kept, facts = {}, dict(shapes={}, checksums={})
        for part in ("reference", "training", "slowproc"):
            for name, tensor in load_file(source / f"{family}_tiny_{part}.safetensors").items():
                if part == "slowproc" and SLOW_ROWS.match(name):
                    tensor = levels(tensor, family)
                elif name in ("A_pixel_values", "B_pixel_values"):
                    kept[name] = levels(tensor, family)
                    continue
                elif name in ("image_A", "image_B"):
                    if family == FAMILIES[0]:  # both saw the same images
                        kept[name] = tensor
                    continue
                elif UNUSED.search(name) and part != "slowproc":
                    continue
                if tensor.dtype == torch.int64:
                    tensor = tensor.int()
                whole = tensor.numel() <= LARGE or name.endswith("_packbits")
                kept[name] = tensor if whole else thin(tensor, LARGE).clone()
                if not whole:
                    facts["shapes"][name] = list(tensor.shape)
        recorded = json.loads((source / f"{family}_tiny_reference.json").read_text())
        facts |= {name: recorded[name] for name in FACTS}
        for part in ("training", "slowproc"):
            facts |= json.loads((source / f"{family}_tiny_{part}.json").read_text())
        facts |= dict(weight_checks=recorded["weight_checks"])
        save_file(kept, HERE / f"{family}.safetensors")
        (HERE / f"{family}_facts.json").write_text(json.dumps(facts) + "\n")
        names = {"tiny": f"{family}_tiny"} | {s: f"sa2va_{family}_{s}" for s in SIZES[family]}
        layouts, configs = {}, {}
        for size, name in names.items():
            layouts[size] = patterns(json.loads((source / f"{name}_manifest.json").read_text()))
            configs[size] = json.loads((source / f"{name}_config.json").read_text())
        (HERE / f"{family}_layouts.json").write_text(json.dumps(layouts) + "\n")
        (HERE / f"{family}_configs.json").write_text(json.dumps(configs) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
