"""Families of models that can be a policy, by the model_type in their config.json."""

from collections.abc import Iterable
from pathlib import Path

import torch

from rl_train.config.grpo_config import PolicyConfig
from rl_train.policies.base import Policy
from rl_train.policies.qwen_vl import QWEN_VL
from rl_train.policies.sa2va import SA2VA
from rl_train.utils.io import read_json

FAMILIES = {family.name: family for family in (SA2VA, QWEN_VL)}


def family_of(path: str | Path) -> str:
    """Return the name in FAMILIES of the model in a folder; without model_type it is Sa2VA's.

    Raises ValueError if config.json names another type of model, or is no JSON.
    """
    file, model_type = Path(path) / "config.json", SA2VA.model_type
    if file.is_file():
        model_type = read_json(file).get("model_type", model_type)
    families = {family.model_type: family.name for family in FAMILIES.values()}
    if model_type not in families:
        raise ValueError(f"{file} says model_type {model_type!r}; known: {', '.join(families)}")
    return families[model_type]


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
    family = FAMILIES[family_of(config.model_path)]
    for task, needed in tasks.items():
        if needed != family.name:
            raise ValueError(
                f"--tasks {task}: asks a model of the family {needed}, and --model_path "
                f"{config.model_path} is of {family.name}"
            )
    if unknown := set(groups) - set(family.group_patterns):
        known = ", ".join(family.group_patterns)
        raise ValueError(
            f"--trainable_modules {' '.join(sorted(unknown))}: unknown; known: {known}"
        )
    return family.build(config, groups, max_new_tokens, device)
