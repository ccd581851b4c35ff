"""A model card beside exported weights: what the run knows of itself, no more."""

import json
import re
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from rl_train.checkpoint.save_load import read_state
from rl_train.config.flags import flags_with
from rl_train.config.sft_config import ALL_CONFIG_CLASSES
from rl_train.evaluation.table import before_after_table
from rl_train.policies.registry import FAMILIES, family_of
from rl_train.utils.io import read_json
from sa2va_hf.hub import FINAL_MODEL, HUB_NAME

CARD = "README.md"
TRAININGS = "rl_sa2va_trainings"  # key of a card's metadata: all trainings since the base
RL = "reinforcement learning"
HUB_CACHE = re.compile(r"models--(.+?)--([^/]+)")  # folder of a model fetched from the hub
# The folders before a file's name, in the values of flags as JSON.
FOLDERS = re.compile(r"(?<=[\"=:,])(?:~|\.{1,2})?/(?:[^/:,=\"]*/)*")
TEMPLATE = """---
{{ card_data }}
---
# {{ base }}, trained further

The {{ trainings[-1].role }} of step {{ trainings[-1].step }} of a run of rl-sa2va, merged into \
{{ trainings[-1].base }}. The licence is that of {{ base }}.

## Training and data
{% for training in trainings -%}
{{ loop.index }}. {{ training.method }} ({{ training.tasks | join(", ") }}), \
from {{ training.base }}, step {{ training.step }}: {% for entry in training.data %}`{{ entry }}`\
{{ "; " if not loop.last }}{% endfor %}.
{% endfor %}
{% if metrics -%}
## Metrics
Before and after the last of these trainings, on its evaluation split, by greedy decoding. The \
interval is a paired bootstrap's.
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
{{ citation }}{% if trainings | selectattr("method", "equalto", RL) | list %}
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
    if name == FINAL_MODEL:  # of a run, which alone tells it from others
        name = f"{name} of {base.resolve().parent.name}"
    # The base's own card alone knows its licence and, if it was trained here too, its history.
    metadata = card_metadata(base)
    earlier = metadata.get(TRAININGS, [])
    base_model = metadata.get("base_model") if earlier else on_hub and name
    hidden = flags_with("out_of_model_card", ALL_CONFIG_CLASSES)
    shown = {flag: value for flag, value in flags.items() if flag not in hidden}
    # A card is published: paths of the machine are cut to the last name.
    settings = FOLDERS.sub("", json.dumps(shown, indent=2))
    sources = [f"{flags['dataset']}:{flags['data_dir']}", *flags.get("data_mixture", [])]
    training = dict(
        method=RL if "kl_coef" in flags else "supervised training",
        base=name,
        tasks=flags.get("tasks", []),
        data=[FOLDERS.sub("", source) for source in sources],
        role=role,
        step=step,
    )
    trainings = [*earlier, training]
    card_data = ModelCardData(
        base_model=base_model or None,
        base_model_relation="finetune" if base_model else None,
        datasets=hub_datasets(sources, metadata.get("datasets", []) if earlier else []),
        library_name=family.library,
        pipeline_tag="image-text-to-text",
        license=metadata.get("license"),
        license_name=metadata.get("license_name"),
        license_link=metadata.get("license_link"),
        tags=["image-segmentation"],
        **{TRAININGS: trainings},
    )
    card = ModelCard.from_template(
        card_data,
        template_str=TEMPLATE,
        base=trainings[0]["base"],
        trainings=trainings,
        RL=RL,
        metrics=metrics_table(folder, role, step),
        loading=family.card_loading.replace("QUESTION", family.example_question(flags, base)),
        settings=settings,
        citation=family.citation,
    )
    (output / CARD).write_text(str(card))


def card_metadata(folder: Path) -> dict:
    """Return the metadata of a model folder's card; {} without a card or metadata."""
    return (metadata_load(folder / CARD) or {}) if (folder / CARD).is_file() else {}


def name_of_base_card(base: Path) -> str:
    """Return the name of the base's card in an export, free of those that the base has itself."""
    num_trainings = len(card_metadata(base).get(TRAININGS, []))
    return f"README_of_training_{num_trainings}.md" if num_trainings else "README_of_the_base.md"


def hub_datasets(sources: list[str], earlier: list[str]) -> list[str] | None:
    """Return names of data sets on the hub, for the card's `datasets`; None without one.

    Args:
        sources: "FORMAT:FOLDER" of each data set of the run; folders of the machine have no name.
        earlier: names of earlier trainings.
    """
    folders = [source.partition(":")[2].partition("=")[0] for source in sources]
    names = [name for name in folders if HUB_NAME.fullmatch(name) and not Path(name).is_dir()]
    return list(dict.fromkeys([*earlier, *names])) or None


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
