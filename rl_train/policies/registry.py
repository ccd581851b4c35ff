"""Families of models that can be a policy, by the model_type in their config.json."""

from collections.abc import Iterable
from pathlib import Path

import torch

from rl_train.config.grpo_config import PolicyConfig
from rl_train.engine import quantize
from rl_train.policies.base import Policy
from rl_train.policies.qwen_vl import QWEN_VL
from rl_train.policies.sa2va import SA2VA
from rl_train.utils.io import read_json

FAMILIES = {family.name: family for family in (SA2VA, QWEN_VL)}


def family_of(path: str | Path, flag: str = "--model_path") -> str:
    """Return the name in FAMILIES of the model in a folder; without model_type it is Sa2VA's.

    Raises ValueError, naming `flag`, if the folder holds no model or one of another type.
    """
    folder = Path(path)
    families = {
        model_type: family.name for family in FAMILIES.values() for model_type in family.model_types
    }
    if not (folder / "config.json").is_file():
        names = sorted(file.name for file in folder.iterdir())
        raise ValueError(
            f"{flag} {folder}: holds no config.json, so it is no model folder; found "
            f"{', '.join(names[:3]) or 'nothing'}{' ..' * (len(names) > 3)} in it"
        )
    model_type = read_json(folder / "config.json").get("model_type", SA2VA.model_types[0])
    if model_type not in families:
        advice = "; a SAM2 is given as --sam_path" * str(model_type).startswith("sam2")
        raise ValueError(
            f"{flag} {folder}: config.json says model_type {model_type!r}; known: "
            f"{', '.join(families)}{advice}"
        )
    return families[model_type]


def check_model(config: PolicyConfig, tasks: dict[str, str]):
    """Raise ValueError, naming the flag, if folders are not of the models that the tasks need.

    Only config.json files are read, so that this is said before data are.

    Args:
        tasks: {task: the family that it needs}.
    """
    family = FAMILIES[family_of(config.model_path)]
    for task, needed in tasks.items():
        if needed != family.name:
            raise ValueError(
                f"--tasks {task}: asks a model of the family {needed}, and --model_path "
                f"{config.model_path} is of {family.name}"
            )
    family.check(config)
    if config.quantize_base == "4bit":
        quantize.require_library("--quantize_base 4bit")


def build_policy(
    config: PolicyConfig,
    tasks: dict[str, str],
    groups: Iterable[str],
    max_new_tokens: int,
    device: torch.device,
) -> Policy:
    """Build the policy that `config` names: its base, a fresh LoRA and the groups that train.

    Args:
        tasks: {task: the family that it needs}.

    Raises:
        ValueError: a folder is not what its flag asks for, a task needs another family, or a group
            is unknown; names the flag.
    """
    check_model(config, tasks)
    family = FAMILIES[family_of(config.model_path)]
    if unknown := set(groups) - set(family.group_patterns):
        known = ", ".join(family.group_patterns)
        raise ValueError(
            f"--trainable_modules {' '.join(sorted(unknown))}: unknown; known: {known}"
        )
    return family.build(config, groups, max_new_tokens, device)
