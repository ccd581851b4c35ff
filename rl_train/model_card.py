"""A model card and citations beside exported weights: what the run knows of itself, no more."""

import json
import os
import re
from pathlib import Path

import torch

from rl_train import checkpoint
from rl_train.citations import PROJECT, bibtex
from rl_train.data.opening import Ingredient
from rl_train.files import read_json
from rl_train.policies.families import family_of
from rl_train.policies.lora import parameter_counts
from rl_train.statistics import means, metrics_of, paired_difference, rows_of
from rl_train.tasks.cycle_measures import WITHOUT_INTERVAL

CARD, CITATION = "README.md", "CITATION.bib"
# Files of the base that would lie where the card's own do.
COPIED_AS = {CARD: "README_of_the_base.md", CITATION: "CITATION_of_the_base.bib"}
CODE = "modeling_sa2va_chat.py"  # the original's, beside a published checkpoint
TASKS = {  # {name: (flag of its weight, what is asked)}
    "mask_caption_mask": (
        "mask_to_caption_weight",
        "region -> caption -> mask: the policy describes a region, a teacher (a moving average of "
        "the policy) segments the description",
    ),
    "caption_mask_caption": (
        "caption_to_mask_weight",
        "caption -> mask -> caption: the policy segments a caption, the teacher describes the mask",
    ),
    "point_segmentation": (
        "point_weight",
        "phrase -> box and points -> mask: the policy answers with a box, positive and negative "
        "points, of which SAM2 draws the mask",
    ),
    "region_captions": ("caption_weight", "true captions of regions"),
    "referring_segmentation": ("mask_weight", "true masks of captions"),
    "point_answers": ("point_weight", "a box and points that SAM2 draws true regions of"),
}
# Flags of the machine that it ran on; of other paths the last name is shown.
MACHINE = {"output_dir", "resume", "llm_judge_base_url", "wandb", "export_final", "num_workers"}
PATH = re.compile(r"(?:(?<=^)|(?<=[:=,]))(?:~|\.{1,2})?/(?:[^/:,=]*/)*")
LOADING = {
    "sa2va": """```python
from PIL import Image
from sa2va_hf import Sa2VAModel

model = Sa2VAModel.from_pretrained(FOLDER, dtype="bfloat16", device_map="cuda")
model.require_tokenizer()
image = Image.open("photo.jpg").convert("RGB")
print(model.predict_forward(image=image, text="<image>\\nPlease segment the dog.")["prediction"])
```""",
    "qwen2_5_vl": """```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype="bfloat16", device_map="cuda")
processor = AutoProcessor.from_pretrained(FOLDER)
```
It answers with a box and points; SAM2, which draws the mask of them, is not in this folder.""",
}
REMOTE = """
The folder also holds the original's code, which loads it as it loads its base:
`AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`.
"""


def write_card(output: Path, folder: Path, base: Path, role: str, policy):
    """Write card and citations of an export into the folder `output`.

    Args:
        folder: the checkpoint; base: the folder of what it was trained from.
        policy: with the checkpoint's LoRA not yet merged.
    """
    flags, family = read_json(folder / "config.json"), family_of(base)
    counts = parameter_counts(policy.model, policy.trainable, policy.group_of)
    step = step_of(folder)
    parts = [
        front_matter(base, flags),
        f"# {name_of(base)}, trained by {kind_of(flags)}\n",
        method(flags, base, role, step),
        parameters(counts),
        held_out(folder, flags, role, step),
        loading(base, family),
        settings(flags),
        f"## Citation\nSee `{CITATION}`.\n",
    ]
    (output / CARD).write_text("\n".join(part for part in parts if part))
    (output / CITATION).write_text(bibtex(family, "kl_coef" in flags))


def name_of(path) -> str:
    """What a folder is called: its name on the hub, if it lies in the hub's cache, or its own."""
    for part in Path(path).parts:
        if part.startswith(("models--", "datasets--")):
            return part.partition("--")[2].replace("--", "/")
    return Path(path).name


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint, by its name or by what checkpoint_best says of itself."""
    if at_step := checkpoint.NAME.search(folder.resolve().name):
        return int(at_step[1])
    file = folder / "eval.json"
    return read_json(file)["step"] if file.is_file() else None


def kind_of(flags: dict) -> str:
    """What a run did, of which only one kind has a KL."""
    return "reinforcement learning" if "kl_coef" in flags else "supervised examples"


def front_matter(base: Path, flags: dict) -> str:
    """The card's yaml. Base and licence are said if the base's folder says them."""
    lines = ["library_name: transformers", "pipeline_tag: image-text-to-text"]
    if "/" in name_of(base):
        lines = [f"base_model: {name_of(base)}", "base_model_relation: finetune", *lines]
    lines += licence(base / CARD)
    tags = ["reinforcement-learning", "grpo"] if "kl_coef" in flags else []
    tags += ["image-segmentation"]
    tags += ["custom_code"] if (base / CODE).is_file() else []
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---\n"])


def licence(card: Path) -> list[str]:
    """The lines about its licence in a card's yaml, if there is one."""
    text = card.read_text(errors="replace") if card.is_file() else ""
    yaml = text.split("\n---")[0].splitlines() if text.startswith("---\n") else []
    return [line for line in yaml if re.match(r"license(_name|_link)?: *\S", line)]


def method(flags: dict, base: Path, role: str, step: int | None) -> str:
    whose = dict(policy="the policy", ema="the teacher, a moving average of the policy")[role]
    after = "" if step is None else f", after step {step}"
    reinforced = "kl_coef" in flags
    how = "GRPO in closed cycles" if reinforced else "supervised training"
    has_lora = "lora" in (flags.get("train") or ["lora"])
    merged = "; its LoRA is merged" if has_lora else ""
    lines = [
        f"From {name_of(base)} by {how} ({PROJECT}). These weights are {whose}{after}{merged}.\n",
        "## Method",
    ]
    asked = [TASKS.get(task, ("", task)) for task in flags["tasks"]]
    lines += [f"- {words}" for flag, words in asked if flags.get(flag, 1) > 0]
    lines.append("\nThe reward is what the settings below say." if reinforced else "")
    data = [f"format `{flags['dataset']}`", f"`{shown(flags['data_dir'])}`"]
    more = [f"{one.name} `{shown(one.folder)}`, weight {one.weight:g}" for one in mix_of(flags)]
    lines.append(f"Trained on: {'; '.join([', '.join(data), *more])}.\n")
    return "\n".join(lines)


def mix_of(flags: dict) -> list[Ingredient]:
    """What a run mixed with its --data_dir; older ones have no such flag."""
    return [Ingredient.parse(text) for text in flags.get("mix", [])]


def parameters(counts: dict[str, int]) -> str:
    trained = {part: n for part, n in counts.items() if not part.endswith("(frozen)")}
    some, whole = sum(trained.values()), sum(counts.values())
    by_part = ", ".join(f"{part} {n:,d}" for part, n in sorted(trained.items()))
    both = "; the LoRA counts in both" if "lora" in trained else ""
    return f"Trained parameters: {some:,d} of {whole:,d} ({some / whole:.2%}; {by_part}){both}.\n"


def held_out(folder: Path, flags: dict, role: str, step: int | None) -> str:
    """The table before and after, of the run's own evaluations; "" where it has not both."""
    place = folder.resolve().parent / "evaluation"
    files = place / "step_0.json", place / f"step_{step}.json"
    if not all(file.is_file() for file in files):
        return ""
    before, after = (read_json(file) for file in files)
    now = after if role == "policy" else after.get("teacher", {})
    if before["image_ids"] != after["image_ids"] or "values" not in now:
        return ""
    start, end = (
        {n: torch.tensor(v, dtype=torch.float64) for n, v in found["values"].items()}
        for found in (before, now)
    )
    where = flags["eval_data_dir"]
    of = f"of `{shown(where)}`" if where else "of images of the training data that were left out"
    lines = [
        f"## Held out\n{len(after['image_ids'])} regions {of}, greedy answers; change and its "
        "paired 95 % bootstrap interval.\n",
        "| | before | after | change | |",
        "|---|---|---|---|---|",
    ]
    words, ends = metrics_of(start), means(end)
    for metric, value in means(start).items():
        if metric in ends:
            row = [f"{words[metric]} (`{metric}`)", f"{value:.4f}", f"{ends[metric]:.4f}"]
            row += [f"{ends[metric] - value:+.4f}", ""]
            if metric not in WITHOUT_INTERVAL:
                _, low, high = paired_difference(rows_of(start, metric), rows_of(end, metric))
                row[-1] = f"[{low:+.4f}, {high:+.4f}]"
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def loading(base: Path, family: str) -> str:
    remote = REMOTE if (base / CODE).is_file() else ""
    return f"## Loading\n{LOADING[family]}\n{remote}"


def settings(flags: dict) -> str:
    kept = {name: shown(value) for name, value in flags.items() if name not in MACHINE}
    return f"## Settings\n```json\n{json.dumps(kept, indent=2)}\n```\n"


def shown(value):
    """A flag's value without the folders that lead to a file or folder of the machine."""
    if isinstance(value, list):
        return [shown(one) for one in value]
    if not isinstance(value, str):
        return value
    there = os.path.exists(value)  # Path.exists raises of names that are too long
    return name_of(value) if there else PATH.sub("", value)
