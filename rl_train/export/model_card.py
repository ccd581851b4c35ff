"""A model card beside exported weights: what the run knows of itself, no more."""

import json
import re
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from rl_train.checkpoint.save_load import read_state
from rl_train.config.flags import flags_with
from rl_train.config.sft_config import ALL_PARTS
from rl_train.evaluation.table import before_after_table
from rl_train.policies.registry import FAMILIES, family_of
from rl_train.utils.io import read_json

CARD = "README.md"
HUB_CACHE = re.compile(r"models--(.+?)--([^/]+)")  # folder of a model fetched from the hub
# The folders before a file's name, in the values of flags as JSON.
FOLDERS = re.compile(r"(?<=[\"=:,])(?:~|\.{1,2})?/(?:[^/:,=\"]*/)*")
TEMPLATE = """---
{{ card_data }}
---
# {{ base }}, trained further

The {{ role }} of step {{ step }} of a run of rl-sa2va, merged into {{ base }}. \
The licence is that of the base.

## Data
Format `{{ flags.dataset }}`, `{{ flags.data_dir }}`\
{% for entry in flags.data_mixture %}; `{{ entry }}`{% endfor %}.

{% if metrics -%}
## Metrics
On the evaluation split, greedy decoding; the interval is a paired bootstrap's.
```
{{ metrics }}
```

{% endif -%}
## Loading
{{ loading }}

## Flags
```json
{{ settings }}
```

## Citation
```bibtex
@software{rl_sa2va,
  title = {rl-sa2va: Reinforcement learning of Sa2VA by closed mask-caption cycles},
  version = {0.1.0}
}
{{ citation }}{% if "kl_coef" in flags %}
@article{shao2024deepseekmath,
  title = {% raw %}{{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language
           Models}{% endraw %},
  author = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and others},
  journal = {arXiv preprint arXiv:2402.03300},
  year = {2024}
}
{% endif -%}
```
"""


def write_card(output: Path, folder: Path, base: Path, role: str):
    """Write the model card of an export into the folder `output`.

    Args:
        folder: the checkpoint; base: the folder of the model it was trained from.
    """
    flags, step = read_json(folder / "config.json"), read_state(folder)["step"]
    on_hub, family = HUB_CACHE.search(str(base)), FAMILIES[family_of(base)]
    name = "/".join(on_hub.groups()) if on_hub else base.name
    # Metadata of the base's own card, which alone knows its licence.
    metadata = metadata_load(base / CARD) if (base / CARD).is_file() else None
    hidden = flags_with("out_of_model_card", ALL_PARTS)
    shown = {flag: value for flag, value in flags.items() if flag not in hidden}
    # A card is published: paths of the machine are cut to the last name.
    settings = FOLDERS.sub("", json.dumps(shown, indent=2))
    card_data = ModelCardData(
        base_model=name if on_hub else None,
        base_model_relation="finetune" if on_hub else None,
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        license=(metadata or {}).get("license"),
        tags=["image-segmentation"],
    )
    card = ModelCard.from_template(
        card_data,
        template_str=TEMPLATE,
        base=name,
        role=role,
        step=step,
        flags=json.loads(settings),
        metrics=metrics_table(folder, role, step),
        loading=family.loading,
        settings=settings,
        citation=family.citation,
    )
    (output / CARD).write_text(str(card))


def metrics_table(folder: Path, role: str, step: int) -> str:
    """Return the metrics before and after, by the run's own evaluations; "" without both."""
    evaluations = folder.resolve().parent / "evaluation"
    files = evaluations / "step_0.json", evaluations / f"step_{step}.json"
    if not all(file.is_file() for file in files):
        return ""
    before, after = (read_json(file) for file in files)
    roles = dict(policy=after) | ({"teacher": after["teacher"]} if "teacher" in after else {})
    # The base's columns, then those of the exported role.
    values = [
        {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
        for columns in (before["values"], roles[role]["values"])
    ]
    return before_after_table(*values)
