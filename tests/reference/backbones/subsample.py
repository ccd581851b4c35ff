"""Makes the files of this folder out of the full recordings of the other backbones.

    python -m tests.reference.backbones.subsample FOLDER_OF_THE_FULL_RECORDINGS

As `tests.reference.subsample`, of which the README is. A family is a row of FAMILIES. SAM2's keys
are left out of the layouts: they are those of `tiny_layout.json` in every size.
"""

import json
import re
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
SAM2 = "grounding_encoder."
LAYERS = re.compile(r"\.layers\.(\d+)\.")
PUBLISHED = (
    "sa2va_8b",
    "sa2va_26b",
    "sa2va_internvl3_2b",
    "sa2va_internvl3_8b",
    "sa2va_internvl3_14b",
)
# {family: (tensors that no test reads, {name in the facts: configurations kept with it})}
FAMILIES = {
    "internlm2": (
        (
            *("A_inputs_embeds", "text1_logits_last24", "sam_A_low_stride2", "sam_B_low_stride2"),
            *("e2e_A_logits_orig_0_stride3", "e2e_A_mask_0_packbits", "e2e_A_mask_1_packbits"),
        ),
        ("internlm2_tiny", "internvit6b_tiny"),
    ),
}


def fold(layout: dict[str, list[int]]) -> dict[str, list]:
    """{key with {} for the number of its layer: [number of layers or null, shape]} without SAM2."""
    folded = {}
    for key, shape in layout.items():
        if key.startswith(SAM2):
            continue
        layer = LAYERS.search(key)
        name = LAYERS.sub(".layers.{}.", key, count=1)
        folded[name] = [int(layer[1]) + 1 if layer else None, shape]
    return folded


def unfold(folded: dict[str, list], sam2: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    """The whole {key: shape} of a folded layout, with SAM2's part of another layout."""
    layout = {key: tuple(shape) for key, shape in sam2.items() if key.startswith(SAM2)}
    for name, (count, shape) in folded.items():
        keys = [name] if count is None else [name.format(i) for i in range(count)]
        layout.update(dict.fromkeys(keys, tuple(shape)))
    return layout


def written(value: dict) -> str:
    """JSON with a line for each entry of the second level."""
    parts = []
    for name, entries in value.items():
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
        parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(source: Path):
    """Write the layouts and configurations of published sizes, and each family's numbers."""
    read = lambda name: json.loads((source / name).read_text())  # noqa: E731
    sam2 = json.loads((HERE.parent / "tiny_layout.json").read_text())
    layouts, configs = {}, {}
    for size in PUBLISHED:
        layout, configs[size] = read(f"{size}_manifest.json"), read(f"{size}_config.json")
        layouts[size] = fold(layout)
        assert unfold(layouts[size], sam2) == {k: tuple(v) for k, v in layout.items()}, size
    for family, (unread, tiny) in FAMILIES.items():
        numbers = load_file(source / f"{family}_tiny_reference.safetensors")
        kept = {name: tensor for name, tensor in numbers.items() if name not in unread}
        save_file(kept, HERE / f"{family}.safetensors")
        facts = read(f"{family}_tiny_reference.json")
        del facts["weight_checks"]  # of parts that all families share
        (HERE / f"{family}.json").write_text(json.dumps(facts, indent=1) + "\n")
        for name in tiny:
            layouts[name], configs[name] = (
                fold(read(f"{name}_manifest.json")),
                read(f"{name}_config.json"),
            )
    (HERE / "layouts.json").write_text(written(layouts))
    (HERE / "configs.json").write_text(written(configs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
